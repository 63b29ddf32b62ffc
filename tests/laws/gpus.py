"""Helpers of the tests that need a GPU. Without one they are skipped; CUDA_PARTS_ON_CPU=1 runs them on a CPU."""

import importlib.util
import json
import os
import time
from pathlib import Path

import pytest
import torch
from support.launching import furthest_loss, launch_all, profile_of

from laws.small import SMALL

GPUS = torch.cuda.device_count()
wants_gpu = pytest.mark.skipif(not GPUS and "CUDA_PARTS_ON_CPU" not in os.environ, reason="needs a GPU")
NEEDS = {"seg": "monai"}
# By default, convolutions round to the 10 bits of TF32; these tests compare with a CPU, which does not.
PLAIN = {"NVIDIA_TF32_OVERRIDE": "0"}


def recipes(*names: str) -> list:
    """Return pytest parameters for recipes; one whose packages are missing is skipped with the reason."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name in NEEDS and not importlib.util.find_spec(NEEDS[name]), reason=f"needs {NEEDS.get(name)}"
            ),
        )
        for name in names or SMALL
    ]


def profile(folder: Path, name: str, precision: str = "no") -> Path:
    """Write a profile of accelerate_configs with another precision; return its file."""
    file = folder / f"{name}-{precision}.yaml"
    return profile_of(folder, name, mixed_precision=precision).rename(file)


def launch(profile: Path, processes: int, commands: list[tuple], folder: Path, **options) -> None:
    """Run recipes one after the other in one launch, without TF32, and note how long it took."""
    start = time.monotonic()
    launch_all(profile, processes, commands, folder, env=PLAIN, **options)
    note(launch=profile.stem, processes=processes, runs=len(commands), seconds=time.monotonic() - start)


def apart(a: list[dict], b: list[dict], **what) -> float:
    """Return the largest relative difference of two runs' losses, and note it."""
    found = furthest_loss(a, b)
    note(**what, loss_apart=found)
    return found


def note(**found) -> None:
    """Write a line for `python -m benchmarks.gpu`, if it runs these tests."""
    if file := os.environ.get("BENCH_FOUND"):
        with open(file, "a") as lines:
            lines.write(json.dumps(found) + "\n")
