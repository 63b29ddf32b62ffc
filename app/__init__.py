"""Samestep: the same training step, whatever the hardware."""

import os
import warnings

# A thread that waits for another must not spin for long: if anything else runs on the machine, steps would take ten
# times longer. libgomp reads this when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from app.config import OptimConfig, RunConfig
from app.errors import UserError
from app.launching.flags import parse

# A warning of tqdm's progress bars for notebooks, which other libraries use; a run itself prints lines there.
warnings.filterwarnings("ignore", message="IProgress not found")

__all__ = ["OptimConfig", "Run", "RunConfig", "UserError", "launch", "parse"]


def __getattr__(name: str):
    # torch is imported together with Run, only when it is needed: --help and mistakes answer at once.
    if name == "Run":
        from app.run import Run

        return Run
    if name == "launch":
        from app.launching.notebook import launch

        return launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
