"""Samestep: the same training step, whatever the hardware."""

import os

# A thread that waits for another must not spin for long: where anything else runs on the machine, steps would take ten
# times longer. libgomp reads this when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from app.config import OptimConfig, RunConfig, parse
from app.errors import UserError

__all__ = ["OptimConfig", "Run", "RunConfig", "UserError", "parse"]


def __getattr__(name: str):
    # torch is imported with Run, and not before it is needed: --help and mistakes answer at once.
    if name == "Run":
        from app.run import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
