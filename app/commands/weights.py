"""Which weights a command takes out of a run: of which checkpoint, and themselves or their average."""

from typing import TYPE_CHECKING, Any, Protocol

from app.config import EMAConfig
from app.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from app.checkpoints.store import CheckpointStore


class Asked(Protocol):
    """The options that say it."""

    @property
    def run(self) -> "Path": ...
    @property
    def step(self) -> int: ...
    @property
    def best(self) -> bool: ...
    @property
    def weights(self) -> str: ...


def one_step(options: Asked, checkpoints: "CheckpointStore") -> int:
    """Choose the step of a checkpoint: the one that is asked for, the best, or the newest.

    Raises:
        UserError: there is no checkpoint, or none is the best.
    """
    there = checkpoints.steps()
    if not there:
        raise UserError(f"{options.run} has no checkpoint")
    return _best_step(options, checkpoints) if options.best else options.step or there[-1]


def _best_step(options: Asked, checkpoints: "CheckpointStore") -> int:
    there = ", ".join(map(str, checkpoints.steps()))
    if options.step:
        raise UserError(f"--best and --step {options.step}: give one of the two")
    if not checkpoints.retention.best:
        raise UserError(
            f"--best: {options.run} was trained without --run.best, so none of its checkpoints is the best; take one "
            f"with --step, of {there}"
        )
    best = checkpoints.best({})
    if best is None:
        raise UserError(
            f"--best: no checkpoint of {options.run} was scored with {checkpoints.retention.metric.name}; "
            f"take one with --step, of {there}"
        )
    return best[0]


def averaged(options: Asked, config: dict[str, Any]) -> bool:
    """Tell whether to take the average of the weights that the run has kept.

    Raises:
        UserError: it has kept none.
    """
    settings = EMAConfig(**config.get("ema", {}))
    if options.weights == "ema" and not settings.on:
        raise UserError(f"--weights ema: {options.run} was trained without --ema.decay, so it has no average")
    return settings.on and (options.weights == "ema" or (options.weights == "auto" and settings.use == "instead"))
