"""What a checkpoint says beside its state, and what must agree before a run goes on from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from app import layout
from app.accelerator import Accelerator
from app.batches import BatchPlan
from app.checkpoint import Checkpoints
from app.errors import UserError


def record(plan: BatchPlan, accelerator: Accelerator, scores: dict, measured: dict) -> dict[str, Any]:
    """Describe a step for its checkpoint.

    Args:
        scores: the last value of each.
        measured: those that were measured at this very step; they decide which checkpoint is best.
    """
    data = {"rows": plan.samples, "fingerprint": plan.fingerprint}
    here = {"layout": layout.layout(accelerator), "versions": layout.versions()}
    return {"metrics": measured, "scores": scores, **here, "data": data}


def resume(
    checkpoints: Checkpoints, accelerator: Accelerator, plan: BatchPlan, folder: Path, warn: Callable[[str], Any]
) -> dict[str, Any] | None:
    """Load the newest good checkpoint and return its record; None where there is none. Every rank takes part.

    Raises:
        UserError: it is of other data, of a longer run, of another model, or bound to another layout.
    """
    found = checkpoints.newest(warn)
    if found is None:
        return None
    path, saved = found
    layout.check_bound(saved["layout"], layout.layout(accelerator))
    if saved["step"] > plan.steps:
        raise UserError(
            f"{folder} holds a run after step {saved['step']}, and {plan.steps} steps are asked for: give at least as "
            "many with --run.steps or --run.epochs, or another --run.dir"
        )
    rows, before = plan.samples, saved["data"]["rows"]
    if plan.fingerprint != saved["data"]["fingerprint"]:
        what = f"{before:,} rows, and now there are {rows:,}" if rows != before else f"{rows:,} rows of other lengths"
        raise UserError(
            f"{folder} holds a run over other training data: it had {what}. Give it the data that it had, or another "
            "--run.dir"
        )
    accelerator.load_state(str(path))
    return saved
