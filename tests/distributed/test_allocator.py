"""Memory that a step frees is kept for the next one, unless the user has said otherwise."""

import ctypes
import os
import subprocess
import sys

import pytest

ASK = "from app.distributed.allocator import keep_freed_memory; print(keep_freed_memory())"


def kept(**environment: str) -> str:
    known = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", ASK], env={**known, **environment}, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_settings_are_taken_unless_the_user_has_some():
    assert kept() == "True"
    assert kept(MALLOC_TRIM_THRESHOLD_="200000") == "False"
    assert kept(GLIBC_TUNABLES="glibc.malloc.arena_max=2") == "False"
