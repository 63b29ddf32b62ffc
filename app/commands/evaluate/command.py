"""Evaluate a run or a finished model on any data, without training: scores, a report by class, confusions, calibration.

    python -m app evaluate runs/cls
    python -m app evaluate runs/cls new.jsonl --best
    python -m app evaluate runs/cls --split test --profile ddp_cpu:3 --json scores.json
    python -m app evaluate models/sentiment reviews.csv --data.text title --data.label stars

A recipe builds the model and scores it, as in training, on any layout; every sample counts once. Of a run, it is the
recipe kept in its folder, and the training data must still be where the run found them, because classes follow from
them. A finished model (a run's model/, an export, any folder that save_pretrained wrote, or a Hub id) is scored as it
is, by the recipe that trained it or one for its task; its own classes count, and no other data than those to evaluate
on are needed. Nothing is written there. Flags that are not named below go to the recipe, such as --data.text.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from app.commands import weights
from app.errors import printable

if TYPE_CHECKING:
    from app.commands.evaluate.subject import Subject

WORKER = Path(__file__).with_name("worker.py")
PACKAGE = Path(__file__).parents[3]  # the folder of `app`
MOST = 12  # pairs of classes that are named


@dataclass
class Options(weights.Options):
    """What to evaluate, on which data, and on which processes."""

    run: Annotated[Path, tyro.conf.Positional]
    """The folder of a run or of a model, or a model's Hub id."""
    data: Annotated[str, tyro.conf.Positional] = ""
    """Data to evaluate on: anything that --data.eval-path takes. Default: those of the run."""
    split: str = ""
    """Split to evaluate on, as --data.eval-split."""
    set: str = ""
    """Evaluate on this one of the run's --data.eval-sets. Default: on all sets of the run, if no data are given."""
    recipe: str = ""
    """Recipe that scores a finished model. Default: the one that trained it, else recipes/cls.py, lm.py or img.py, by
    its task."""
    profile: str = "cpu"
    """Profile to compute under; FILE:3 starts 3 processes, whatever the file says."""
    json: str = ""
    """Also write all numbers to this file."""


def main(options: Options, flags: list[str]) -> int:
    """Evaluate, print the scores, and return the exit status.

    Args:
        flags: of the recipe.

    Raises:
        UserError: there is no such run, model or checkpoint, or no recipe for it.
    """
    from app.commands.evaluate import models, subject
    from app.commands.output import write_json
    from app.launching import profiles
    from app.rundir import history

    profiles.read(options.profile).check()  # for its error, before anything else
    if models.is_model(options.run):
        chosen = models.of_model(options, flags)
    else:
        chosen = subject.of_run(options, history.read(options.run))
    with tempfile.TemporaryDirectory() as scratch:
        job, result = Path(scratch, "job.json"), Path(scratch, "result.json")
        about = {
            "state": chosen.state,
            "averaged": chosen.averaged,
            "only": chosen.only,
            "result": str(result),
        }
        job.write_text(json.dumps(about))
        status = _launch(options.profile, chosen, job, flags)
        if status or not result.exists():
            return status or 1
        numbers = json.loads(result.read_text())
    _show(numbers, chosen.name)
    write_json(options.json, {**chosen.about, **numbers})
    if options.json:
        print(f"\nall numbers: {options.json}")
    return 0


def _launch(profile: str, chosen: "Subject", job: Path, flags: list[str]) -> int:
    """Run the recipe on the profile's processes, with its loop entered once to evaluate; return the exit status."""
    words = [str(job), str(chosen.recipe), chosen.imports, *chosen.flags, *flags]
    sys.stdout.flush()
    # -P and the path: the working folder may have an `app` of somebody else.
    paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-P", "-m", "app", "launch", profile, str(WORKER), *words]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}).returncode


def _show(result: dict[str, Any], what: str) -> None:
    """Print scores, a report of each class or type of entity, and where there are classes, what is confused."""
    from app.rundir.logger import with_meaning

    print(f"\n{printable(what)}:")
    for head in dict.fromkeys(name.partition("/")[0] for name in result["scores"]):  # a line for each set
        of_set = {name: value for name, value in result["scores"].items() if name.startswith(f"{head}/")}
        means = result["meanings"]
        told = (f"{name} {with_meaning(_short(value), means.get(name))}" for name, value in of_set.items())
        print("  " + printable(", ".join(told)))
    for fault in result["warnings"]:
        print(printable(f"  warning: {fault}"))
    if "entities" in result:
        _show_each("entity", "support", result["entities"])
    if "classes" in result:
        _show_each("class", "samples", result["classes"])
        _show_confusions(list(result["classes"]), result["confusion"])
    if "calibration" in result:
        error = result["calibration"]["error"]
        print(
            f"\nexpected calibration error {error:.4f}: probabilities differ from the share that is right by this much"
        )


def _show_each(what: str, amount: str, scores_by_name: dict[str, dict[str, Any]]) -> None:
    """Print precision, recall and F1 by name."""
    from app.commands.output import table

    columns = ("precision", "recall", "f1", amount)
    rows = [[name, *(_short(row[key]) for key in columns)] for name, row in scores_by_name.items()]
    print("\n" + table((what, *columns), rows, right=[1, 2, 3, 4]))


def _show_confusions(names: list[str], matrix: list[list[float]]) -> None:
    """Print the pairs of classes that are taken for each other most often."""
    from app.commands.output import table

    pairs = [(matrix[i][j], names[i], names[j]) for i in range(len(names)) for j in range(len(names)) if i != j]
    wrong = sorted((pair for pair in pairs if pair[0]), key=lambda pair: -pair[0])
    if wrong:
        told = [[int(count), true, taken] for count, true, taken in wrong[:MOST]]
        print("\n" + table(("samples", "of class", "taken for"), told, right=[0]))


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
