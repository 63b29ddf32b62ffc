"""Samestep: the same training step, whatever the hardware."""

from app.config import OptimConfig, RunConfig, parse
from app.errors import UserError

__all__ = ["OptimConfig", "Run", "RunConfig", "UserError", "parse"]


def __getattr__(name: str):
    # torch is imported with Run, and not before it is needed: --help and mistakes answer at once.
    if name == "Run":
        from app.run import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
