"""Samestep: the same training step, whatever the hardware."""

import os

# A thread that waits for another must not spin: where anything else runs on the machine, steps take ten times longer.
# libgomp reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from app.config import OptimConfig, RunConfig, parse
from app.errors import UserError

__all__ = ["OptimConfig", "Run", "RunConfig", "UserError", "parse"]


def __getattr__(name: str):
    # torch is imported with Run, and not before it is needed: --help and mistakes answer at once.
    if name == "Run":
        from app.run import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
