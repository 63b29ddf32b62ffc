"""What is evaluated: a checkpoint of a run or a finished model, with the recipe and the flags that score it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.commands import weights
from app.config import EMAConfig
from app.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from app.commands.evaluate.command import Options
    from app.rundir.history import History


@dataclass
class Subject:
    """What is evaluated."""

    about: dict[str, Any]
    """What it is, for --json."""
    name: str
    """What it is, in words."""
    recipe: Path
    flags: list[str]
    imports: str = ""
    """A further folder for the recipe's imports."""
    state: str = ""
    """The folder of a checkpoint's state; empty: the model has its weights already."""
    averaged: bool = False


def of_run(options: "Options", run: "History") -> Subject:
    """Return the checkpoint of a run that the options ask for.

    Raises:
        UserError: there is no such checkpoint, or no recipe.
    """
    from app.checkpoints.store import CheckpointStore

    checkpoints = CheckpointStore(run.folder / "checkpoints", 0, 1, best=run.asked_best)
    step = weights.one_step(options, checkpoints)
    state, _ = checkpoints.at(step)
    recipe, imports = recipe_of(run)
    flags = [
        *settings(run.folder / "config.yaml", run.config),
        *eval_flags(data_of(options, run.config), options.split, run.config),
    ]
    about, averaged = {"run": str(run.folder), "step": step}, weights.averaged(options, run.config)
    return Subject(about, f"step {step} of {run.folder}", recipe, flags, imports, str(state), averaged)


def recipe_of(run: "History") -> tuple[Path, str]:
    """Return the recipe that a run has kept, and the folder that it was in."""
    recipe = run.folder / "recipe.py"
    if not recipe.is_file():
        raise UserError(
            f"{recipe} is missing, and it builds the model. A run from a notebook has no recipe: put it into a file"
        )
    return recipe, str(run.info.get("recipe_folder", ""))


def settings(file: Path, config: dict[str, Any]) -> list[str]:
    """Return the flags for a recipe to be as a file of settings says, but for what an evaluation has no use for."""
    flags = ["--config", str(file), "--run.trackers"]
    if "ema" in config:  # one or the other is loaded as the weights
        flags += [word for name, value in vars(EMAConfig()).items() for word in (f"--ema.{name}", str(value).lower())]
    return flags


def data_of(options: "Options", config: dict[str, Any]) -> str:
    """Return the data to evaluate on, if the options name any: by their path, or as one of the run's sets.

    Raises:
        UserError: the run has no such set.
    """
    from app.data.tables.splits import named_sets

    if not options.set:
        return options.data
    if options.data:
        raise UserError(f"--set {options.set} and {options.data}: give one of them, the run's own data or others")
    data = config.get("data")
    sets = named_sets(data.get("eval_sets") or () if isinstance(data, dict) else ())
    if options.set not in sets:
        there = f"it has {', '.join(sets)}" if sets else "it has none (--data.eval-sets)"
        raise UserError(f"--set {options.set}: the run has no such set; {there}{did_you_mean(options.set, sets)}")
    return sets[options.set]


def eval_flags(data: str, split: str, config: dict[str, Any]) -> list[str]:
    """Return the flags for a recipe to evaluate on these data, and on no other set.

    Args:
        config: settings that the recipe reads too; theirs of other data are cleared.
    """
    known = config.get("data") if isinstance(config.get("data"), dict) else {}
    flags = ["--data.eval-path", data] if data else []
    if data:
        flags += ["--data.eval-sets"] if known.get("eval_sets") else []
        flags += [f"--data.{name.replace('_', '-')}=" for name in ("eval_split", "eval_masks") if known.get(name)]
    return [*flags, *(["--data.eval-split", split] if split else [])]
