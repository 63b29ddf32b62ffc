"""Memory that a step frees is there for the next one."""

import ctypes
import os
import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from app.allocator import keep_freed_memory

kept = keep_freed_memory()
torch.set_num_threads(1)
for step in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)  # 64 MB, which glibc as it is would give back
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> tuple[str, int]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    words = [sys.executable, "-c", FAULTS]
    found = subprocess.run(words, env={**known, **environment}, capture_output=True, text=True, check=True).stdout
    kept, count = found.split()
    return kept, int(count)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_freed_memory_is_kept_unless_the_user_has_said_how():
    kept, count = faults()
    assert kept == "True" and count < 20
    kept, count = faults(MALLOC_TRIM_THRESHOLD_="200000")
    assert kept == "False" and count > 20, "and so the system clears pages again"
