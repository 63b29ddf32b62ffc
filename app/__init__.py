"""Samestep: the same training step, whatever the hardware."""

import gc
import os
import warnings

# A thread that waits for another must not spin for long: if anything else runs on the machine, steps would take ten
# times longer. libgomp reads this when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from app.config import EMAConfig, OptimConfig, RunConfig
from app.config.needs import Needs
from app.errors import UserError
from app.launching.flags import parse

# A warning of tqdm's progress bars for notebooks, which other libraries use; a run itself prints lines there.
warnings.filterwarnings("ignore", message="IProgress not found")

__version__ = "0.1.0"
__all__ = ["Accelerator", "EMAConfig", "Needs", "OptimConfig", "Run", "RunConfig", "UserError", "launch", "parse"]


def __getattr__(name: str):
    # torch is imported together with Run, only when it is needed: --help and mistakes answer at once.
    if name == "Run":
        globals()[name] = run = _import_run()  # once: it freezes what is alive
        return run
    if name == "Accelerator":
        from app.distributed.accelerator import Accelerator

        return Accelerator
    if name == "launch":
        from app.launching.notebook import launch

        return launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _import_run() -> type:
    """Import Run and torch without Python's garbage collector, and have it leave alone for good what is alive then.

    Otherwise it looks through a million objects again and again, none of them garbage: a fifth of a short launch.
    """
    gc.collect()  # what is garbage already would stay for good
    collects = gc.isenabled()
    gc.disable()
    try:
        from app.distributed.environment import in_notebook
        from app.run import Run

        if not in_notebook():  # whose own objects are alive too, and may become garbage later
            gc.freeze()
        return Run
    finally:
        if collects:
            gc.enable()
