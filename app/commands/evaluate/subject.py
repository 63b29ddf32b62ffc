"""What is evaluated: a checkpoint of a run or a finished model, with the recipe and the flags that score it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import storage
from app.commands import weights
from app.config import EMAConfig
from app.data.tables.splits import NamedSet, named_sets
from app.errors import UserError, did_you_mean, whole_urls
from app.launching import trust

if TYPE_CHECKING:
    from app.commands.evaluate.command import Options
    from app.rundir.history import History


GIVEN = "given"
"""Names the set of the data that the command was given."""


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
    """The folder for the recipe's imports; empty: its own."""
    state: str = ""
    """The folder of a checkpoint's state; empty: the model has its weights already."""
    averaged: bool = False
    only: str = ""
    """The one of the recipe's sets to evaluate on; empty: all of them."""


def of_run(options: "Options", run: "History") -> Subject:
    """Return the checkpoint of a run that the options ask for.

    Raises:
        UserError: there is no such checkpoint, or no recipe.
    """
    from app.checkpoints.store import CheckpointStore

    checkpoints = CheckpointStore(run.folder / "checkpoints", 0, 1, best=run.asked_best)
    step = weights.one_step(options, checkpoints)
    state, _ = checkpoints.at(step)
    recipe, imports = trust.recipe_of(run.folder, run.record.recipe_folder, options.trust_code)
    flags, only = settings(storage.at(run.folder).down("config.yaml"), run.config), ""
    data_settings = run.config.get("data")
    data_settings = data_settings if isinstance(data_settings, dict) else {}
    data = data_of(options, run.config)
    if (mix := data_settings.get("mix")) and options.split and not data.path:
        raise UserError(
            f"--split {options.split}: {run.folder} has trained on a mixture ({mix}), so name the data of the split too"
        )
    if not data.path and options.split and len(paths := _words(data_settings.get("path"))) == 1:
        data = NamedSet(paths[0], options.split)
    if data.path and "eval_sets" in data_settings:
        # In addition to the run's own data, because what it has learnt from them (a tokenizer, classes) it learns anew.
        flags, only = [*flags, "--data.eval-sets", f"{GIVEN}={'::'.join(filter(None, data))}"], GIVEN
    else:
        flags += eval_flags(data.path, data.split or options.split, run.config)
    place, averaged = whole_urls(str(run.folder)), weights.averaged(options, run.config)
    about, name = {"run": place, "step": step}, f"step {step} of {place}"
    name += _scored_on(data.path, data.split or options.split)
    return Subject(about, name, recipe, flags, imports, str(state), averaged, only)


def _scored_on(path: str, split: str) -> str:
    """Say which data are scored, where the command names them."""
    named = [*([f"split {split}"] if split else []), *([path] if path else [])]
    return f", on {' of '.join(named)}" if named else ""


def _words(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def settings(file: Path, config: dict[str, Any]) -> list[str]:
    """Return the flags for a recipe to be as a file of settings says, but for what an evaluation has no use for."""
    flags = ["--config", str(file), "--run.notice=", "--run.trackers"]
    if "ema" in config:  # one or the other is loaded as the weights
        flags += [word for name, value in vars(EMAConfig()).items() for word in (f"--ema.{name}", str(value).lower())]
    return flags


def data_of(options: "Options", config: dict[str, Any]) -> NamedSet:
    """Return the data to evaluate on, if the options name any: by their path, or as one of the run's sets.

    Raises:
        UserError: the run has no such set.
    """
    if not options.set:
        return NamedSet(options.data, options.split if options.data else "")
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
    settings = config.get("data")
    data_settings: dict[str, Any] = settings if isinstance(settings, dict) else {}
    flags = ["--data.eval-path", data] if data else []
    if data:
        flags += ["--data.eval-sets"] if data_settings.get("eval_sets") else []
        flags += [
            f"--data.{name.replace('_', '-')}=" for name in ("eval_split", "eval_masks") if data_settings.get(name)
        ]
    return [*flags, *(["--data.eval-split", split] if split else [])]
