"""How ranks with GPUs join their process group, on a machine that has none: what is called, and in which order."""

import os
import subprocess
import sys

import pytest
from support.launching import ROOT

# Joins as the first of two ranks of a launcher would, up to the call that would wait for the other one.
JOINS = """
import datetime, sys
from unittest.mock import patch
import torch
from app.distributed import accelerator

called = []
kind = torch.device("cuda")

def joins(*args, **known):
    called.append(f"init {known.get('device_id')} {known['timeout'].total_seconds():g}")
    print("; ".join(called))
    sys.exit()

with (
    patch.object(accelerator, "_on_cpu", lambda: False),
    patch.object(torch.accelerator, "current_accelerator", lambda *known: kind),
    patch.object(torch.accelerator, "device_count", lambda: 2),
    patch.object(torch.accelerator, "set_device_index", lambda index: called.append(f"device {index}")),
    patch.object(torch.distributed, "init_process_group", joins),
):
    accelerator.Accelerator(timeout=3600.0)
"""


def joined(**more) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **more}
    environment |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    environment |= {"ACCELERATE_USE_CPU": "true"}  # so that accelerate goes as far as it can here
    words = [sys.executable, "-c", JOINS]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ({}, "device 1; init cuda:1 3720"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "device 1; init None 3720"),
    ],
)
def test_a_rank_takes_its_gpu_and_then_joins_with_it(profile, expected):
    """Canary, accelerate 1.15: fields of its handler reach init_process_group, with the time limit of --run.timeout."""
    assert joined(**profile) == expected
