"""Evaluate a run's model on any data, without training: scores, a report by class, the confusion matrix, calibration.

    python -m app evaluate runs/cls
    python -m app evaluate runs/cls new.jsonl --best
    python -m app evaluate runs/cls --split test --profile ddp_cpu:3 --json scores.json

The recipe kept in the run folder builds the model and scores it, as in training, on any layout; every sample counts
once. Its training data must still be where the run found them, because classes follow from them. The run folder is only
read. Flags that are not named below go to the recipe, such as --data.text.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from app.config import EMAConfig
from app.errors import UserError

if TYPE_CHECKING:
    from app.rundir.history import History

WORKER = Path(__file__).with_name("worker.py")
MOST = 12  # pairs of classes that are named


@dataclass
class Options:
    """What to evaluate, on which data, and on which processes."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    data: Annotated[str, tyro.conf.Positional] = ""
    """Data to evaluate on: anything that --data.eval-path takes. Default: those of the run."""
    split: str = ""
    """Split to evaluate on, as --data.eval-split."""
    step: int = 0
    """Step of the checkpoint; 0: the newest one."""
    best: bool = False
    """Evaluate the checkpoint with the best value of the run's --run.best."""
    weights: Literal["auto", "plain", "ema"] = "auto"
    """plain: the weights themselves. ema: their average, of a run with --ema. auto: the weights that the run itself
    scored; with --best, those that have the best score."""
    profile: str = "cpu"
    """Profile to compute under; FILE:3 starts 3 processes, whatever the file says."""
    json: str = ""
    """Also write all numbers to this file."""


def main(options: Options, flags: list[str]) -> int:
    """Evaluate, print the scores, and return the exit status.

    Args:
        flags: of the recipe.

    Raises:
        UserError: there is no such run or checkpoint, or no recipe.
    """
    from app.checkpoints.store import CheckpointStore
    from app.commands import weights
    from app.commands.output import write_json
    from app.launching import profiles
    from app.rundir import history

    if options.run.name == "model" and (options.run.parent / "run.json").exists():
        raise UserError(f"{options.run} is the finished model of a run: evaluate the run, {options.run.parent}")
    run = history.read(options.run)
    profile = profiles.read(options.profile)
    checkpoints = CheckpointStore(run.folder / "checkpoints", 0, 1, best=run.asked_best)
    step = weights.one_step(options, checkpoints)
    state, _ = checkpoints.at(step)
    with tempfile.TemporaryDirectory() as scratch:
        job, result = Path(scratch, "job.json"), Path(scratch, "result.json")
        about = {"state": str(state), "averaged": weights.averaged(options, run.config), "result": str(result)}
        job.write_text(json.dumps(about))
        status = _launch(profile, run, job, [*_data_flags(options), *flags])
        if status or not result.exists():
            return status or 1
        found = json.loads(result.read_text())
    _show(found, f"step {step} of {run.folder}")
    write_json(options.json, {"run": str(run.folder), "step": step, **found})
    if options.json:
        print(f"\nall numbers: {options.json}")
    return 0


def _data_flags(options: Options) -> list[str]:
    return [
        *(["--data.eval-path", options.data] if options.data else []),
        *(["--data.eval-split", options.split] if options.split else []),
    ]


def _launch(profile: Any, run: "History", job: Path, flags: list[str]) -> int:
    """Run the recipe on the profile's processes, with its loop entered once to evaluate; return the exit status."""
    from app.launching.launcher import environment, launcher_words

    recipe = run.folder / "recipe.py"
    if not recipe.is_file():
        raise UserError(
            f"{recipe} is missing, and it builds the model. A run from a notebook has no recipe: put it into a file"
        )
    config = ["--config", str(run.folder / "config.yaml"), "--run.trackers"]
    if "ema" in run.config:  # one or the other is loaded as the weights
        config += [word for name, value in vars(EMAConfig()).items() for word in (f"--ema.{name}", str(value).lower())]
    imports = str(run.info.get("recipe_folder", ""))
    words = launcher_words(profile.file, profile.processes, WORKER, str(job), str(recipe), imports, *config, *flags)
    sys.stdout.flush()
    return subprocess.run(words, env=environment()).returncode


def _show(found: dict[str, Any], what: str) -> None:
    """Print scores, and for classes a report of each, the commonest confusions, and how far probabilities are right."""
    from app.commands.output import table

    print(f"\n{what}: " + ", ".join(f"{name} {_short(value)}" for name, value in found["scores"].items()))
    classes = found.get("classes")
    if not classes:
        return
    rows = [
        [name, *(_short(row[key]) for key in ("precision", "recall", "f1", "samples"))] for name, row in classes.items()
    ]
    print("\n" + table(("class", "precision", "recall", "f1", "samples"), rows, right=[1, 2, 3, 4]))
    names, matrix = list(classes), found["confusion"]
    pairs = [(matrix[i][j], names[i], names[j]) for i in range(len(names)) for j in range(len(names)) if i != j]
    wrong = sorted((pair for pair in pairs if pair[0]), key=lambda pair: -pair[0])
    if wrong:
        told = [[int(count), true, taken] for count, true, taken in wrong[:MOST]]
        print("\n" + table(("samples", "of class", "taken for"), told, right=[0]))
    if "calibration" in found:
        error = found["calibration"]["error"]
        print(
            f"\nexpected calibration error {error:.4f}: probabilities differ from the share that is right by this much"
        )


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
