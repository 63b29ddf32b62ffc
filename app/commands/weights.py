"""Which weights a command takes out of a run: of which checkpoint, and themselves or their average."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from app.config import BestMetric, EMAConfig
from app.config.score_names import AVERAGE, PLAIN, ScoreName
from app.errors import UserError
from app.rundir.foreign import section

if TYPE_CHECKING:
    from app.checkpoints.record import Record
    from app.checkpoints.store import CheckpointStore


@dataclass
class Options:
    """The options that say it."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    step: int = 0
    """Step of the checkpoint; 0: the newest one. The command `runs` lists them."""
    best: bool = False
    """Take the checkpoint with the best value of the run's --run.best."""
    weights: Literal["auto", "plain", "ema"] = "auto"
    """plain: the weights themselves. ema: their average, of a run with --ema. auto: the weights that the run itself
    scored; with --best, those that have the best score."""
    trust_code: bool = False
    """Run the recipe that lies in the folder, whoever wrote it. Recipes of this installation, and those that you have
    trained with on this machine, need no such word."""


def one_step(options: Options, checkpoints: "CheckpointStore") -> int:
    """Choose the step of a checkpoint: the one that is asked for, the best, or the newest.

    Raises:
        UserError: there is no checkpoint, or none is the best.
    """
    there = checkpoints.steps()
    if not there:
        raise UserError(f"{options.run} has no checkpoint: the run has not saved one yet")
    return _best_step(options, checkpoints) if options.best else options.step or there[-1]


def _best_step(options: Options, checkpoints: "CheckpointStore") -> int:
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


def averaged(options: Options, config: dict[str, Any]) -> bool:
    """Tell whether to take the average of the weights that the run has kept.

    Raises:
        UserError: it has kept none.
    """
    settings = averaging(config)
    if options.weights == "ema" and not settings.on:
        raise UserError(f"--weights ema: {options.run} was trained without --ema.decay, so it has no average")
    best = BestMetric.parse(str(section(config, "run").get("best") or ""))
    by_average = options.best and bool(best.of_average)
    chosen = settings.use == "instead" or by_average
    return settings.on and (options.weights == "ema" or (options.weights == "auto" and chosen))


def averaging(config: dict[str, Any]) -> EMAConfig:
    """Return a run's settings of averages."""
    usual, of_run = vars(EMAConfig()), section(config, "ema")
    kinds = {name: (int, float) if isinstance(value, float) else type(value) for name, value in usual.items()}
    return EMAConfig(**{name: of_run[name] for name in usual if isinstance(of_run.get(name), kinds[name])})


def scores_of(record: "Record", config: dict[str, Any], averaged: bool) -> dict[str, Any]:
    """Return the scores in a checkpoint's record that were measured with these weights, named as a run's own."""
    scores, settings = record.scores, averaging(config)
    if settings.on and settings.use == "instead":
        return scores if averaged else {}
    names = {name: ScoreName.parse(name) for name in scores}
    kind = AVERAGE if averaged else PLAIN
    return {
        str(parsed._replace(kind=PLAIN)): scores[n] for n, parsed in names.items() if parsed and parsed.kind == kind
    }
