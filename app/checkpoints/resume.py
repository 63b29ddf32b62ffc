"""What must agree between a checkpoint and a run before the run goes on from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from app.checkpoints.record import Counts, DataRecord, Record
from app.config import RunConfig
from app.data.fingerprint import contents, difference, other_models
from app.data.rows import Rows
from app.distributed import collectives
from app.distributed.layout_record import Layout
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan


class Start(NamedTuple):
    """Where this launch begins in the run."""

    step: int = 0
    """The number of steps made before this launch."""
    scores: dict[str, float] = {}
    """The last value of each score before this launch."""
    unevaluated: bool = False
    """Whether the last of those steps was stopped during its evaluation, which then comes first."""
    buffers: Sequence[str] = ()
    """Names of the buffers that are known to change in training."""
    changed: dict[str, tuple[Any, Any]] = {}
    """Settings that are others from here on: by name, as they were and as they are."""
    losses: dict[str, Any] = {}
    """Sums of the losses of the last steps, from which the means that are logged next are formed."""
    patience: dict[str, Any] = {}
    """How long ago the best score was measured."""
    counts: Counts = Counts()
    """What happened in those steps."""

    @property
    def made(self) -> int:
        """Return the number of steps that have updated weights."""
        return self.counts.made


def start(saved: Record, changed: dict[str, tuple[Any, Any]]) -> Start:
    """Read from a checkpoint's record where a launch begins."""
    return Start(
        saved.step, saved.scores, saved.unevaluated, saved.buffers, changed, saved.losses, saved.patience, saved.counts
    )


def described(start: Start, plan: BatchPlan, before: Layout, here: Layout, folder: Path) -> str:
    """Tell the user where a run goes on; `before` is the layout that saved it."""
    moved = "" if before == here else f" (saved on {before})"
    first = ", whose evaluation comes first" if start.unevaluated else ""
    return f"resuming {folder} after step {start.step} of {plan.steps}{moved}{first}"


def contents_everywhere(data: Rows) -> dict[str, Any]:
    """Digest the training data once on each machine, and compare the digests. Every rank takes part.

    Call it before anything draws from `data`, such as the loader.

    Raises:
        UserError: a machine has other data than the main process.
    """
    contents_by_rank = collectives.from_each_machine(lambda: contents(data))
    for rank, other in contents_by_rank.items():
        if changed := difference(contents_by_rank[0], other) or ", ".join(other_models(contents_by_rank[0], other)):
            raise UserError(
                f"rank {rank} would train on other data than rank 0: {changed}. Give every machine the same data, for "
                "example on a disk that all of them share"
            )
    return contents_by_rank[0]


def fitting(saved: Record, plan: BatchPlan, settings: RunConfig, folder: Path) -> BatchPlan:
    """Plan what follows a checkpoint, from its record.

    Raises:
        UserError: the checkpoint is of a data set of another size, or of a longer run.
    """
    step, seen = saved.step, saved.seen
    plan = plan.going_on(settings, step, seen)
    if step > plan.steps or seen > plan.total:
        made = f"made {step} steps" if step > plan.steps else f"seen {seen:,} samples"
        asked = f"{plan.steps}" if step > plan.steps else f"{plan.total:,}"
        raise UserError(
            f"the run in {folder} has {made}, and only {asked} are asked for: give a larger --run.steps or "
            "--run.epochs, or another --run.dir"
        )
    rows, before = plan.samples, saved.data.rows
    if plan.fingerprint != saved.data.fingerprint:
        now = f"now there are {rows:,}" if rows != before else "their lengths or weights were others"
        raise UserError(
            f"{folder} holds a run over other training data: it had {before:,} rows, and {now}. Give it the "
            "data that it had, or another --run.dir"
        )
    return plan


def check_contents(saved: DataRecord, now: dict[str, Any], folder: Path, accept: bool) -> str:
    """Compare the training data, and models that belong to them, with those that a checkpoint's run had.

    Args:
        saved: `data` of the checkpoint's record.
        now: the digest of the data.
        accept: let the run go on over changed data.

    Returns:
        What the user should know; empty where nothing has changed.

    Raises:
        UserError: they have changed, and that is not accepted.
    """
    rows = difference(saved.contents, now)
    changes = {"the training data have changed": rows} if rows else {}
    for model in other_models(saved.contents, now):
        changes[f"{model} has changed"] = "its weights or its config are others"
    if changes and not accept:
        raise UserError(
            f"{folder} holds a run, and since it began {_joined(changes, ': ')}. Give it what it had, accept the "
            "change with --run.changed accept, or give another --run.dir"
        )
    return _joined(changes, ", which is accepted (--run.changed): ")


def _joined(changes: dict[str, str], between: str) -> str:
    return "; ".join(f"{what}{between}{how}" for what, how in changes.items())
