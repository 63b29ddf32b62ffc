"""Begin a recipe of your own: copy one that comes with Samestep, with a test that trains it.

    samestep new cls my_recipe.py
    samestep new lm experiments/poems.py

Writes the recipe, and next to it test_NAME.py, which pytest runs in half a minute: it trains the recipe on a few rows,
stops it, resumes it, and compares the losses with those of a run that was not stopped. Change the recipe, and run the
test again. Nothing that exists is replaced.
"""

import re
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import tyro

import app
from app.errors import UserError, did_you_mean
from app.launching import program, shipped

_LANGUAGE = "--scratch.layers 1 --scratch.width 32 --scratch.heads 2"
SMALL = {
    "cls": "--scratch.layers 1 --scratch.width 32 --scratch.vocab 300 --data.max-length 64",
    "det": "--scratch.width 8 --data.size 32 --data.split train[:64]",
    "dpo": f"{_LANGUAGE} --scratch.tokenizer byte --data.max-length 256 --data.split train[:64]",
    "gan": "--width 8 --samples 16 --data.split train[:64]",
    "graph": "--scratch.width 8 --data.fanout 3 2",
    "img": "--scratch.layers 1 --scratch.width 8 --data.split train[:64]",
    "lm": f"{_LANGUAGE} --scratch.kv-heads 1 --scratch.tokenizer byte --data.block 64 --data.split train[:64]",
    "s2s": f"{_LANGUAGE} --scratch.vocab 300 --generate.rows 4 --generate.samples 0 --data.split train[:64]",
    "seg": "--data.patch 32 --data.patches-per-image 1 --scratch.channels 4 8",
    "tag": "--scratch.layers 1 --scratch.width 32 --scratch.vocab 300 --data.split train[:64]",
}
"""Flags with which a recipe trains for some seconds, on its own data."""
TEST = '''"""{name} trains, and a run that was stopped goes on as if it had not been."""

import json
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).with_name("{name}")
# Flags that make it small: change them with the recipe.
SMALL = """
{flags}
--run.steps 4 --run.global-batch 8 --run.micro-batch 4 --run.log-every 1 --run.trackers
"""


def losses(folder, *flags):
    """Train until --run.steps or --run.stop-at, and return the losses of each step of the run."""
    program = [sys.executable, "-P", "-m", "app", "launch", "cpu"]
    words = [*program, RECIPE, *SMALL.split(), *flags, "--run.dir", folder]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "ids" in line]  # the others are of evaluations
    return {{line["step"]: [line[key] for key in line if key.split("/")[0] == "loss"] for line in steps}}


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path):
    whole = losses(tmp_path / "whole")
    assert list(whole) == [1, 2, 3, 4]
    assert losses(tmp_path / "stopped", "--run.stop-at", 2) == {{step: whole[step] for step in (1, 2)}}
    assert losses(tmp_path / "stopped") == whole
'''


@dataclass
class Options:
    """The recipe to copy, and the file to write."""

    recipe: Annotated[str, tyro.conf.Positional]
    """Name of the recipe: cls, det, dpo, gan, graph, img, lm, s2s, seg or tag."""
    file: Annotated[str, tyro.conf.Positional]
    """File to write, which ends with .py."""


def main(options: Options) -> int:
    """Write the recipe and its test, and return the exit status.

    Raises:
        UserError: there is no such recipe, the name cannot be a recipe's, a file exists, or one cannot be written.
    """
    source, file = shipped.folder("recipes") / f"{options.recipe}.py", Path(options.file)
    if options.recipe not in SMALL or not source.is_file():
        names = ", ".join(SMALL)
        raise UserError(
            f"{options.recipe}: there is no such recipe; there are {names}{did_you_mean(options.recipe, SMALL)}"
        )
    _check_name(file)
    test = file.with_name(f"test_{file.name}")
    for place in (file, test):
        if place.exists():
            raise UserError(f"{place} exists already: choose another name, or move it away")
    recipe = as_own(source.read_text(encoding="utf-8"), options.recipe, file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(recipe, encoding="utf-8")
        test.write_text(TEST.format(name=file.name, flags=SMALL[options.recipe]), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written: {error.strerror}") from None
    print(f"{file}: a copy of the recipe {options.recipe}\n{test}: its test\n")
    print(f"train it   {program.typed('launch')} {file}\ntest it    python -m pytest {test}")
    return 0


def _check_name(file: Path) -> None:
    """Refuse a recipe that could not be run or tested where it is, because of its name or what lies next to it.

    Python looks for what a recipe imports in the recipe's folder first.

    Raises:
        UserError: it names the file and what to choose instead.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*\.py", file.name) or iskeyword(file.stem):
        raise UserError(f"{file}: the name of a recipe is that of a module of Python, such as my_recipe.py")
    if file.stem == "conftest" or re.fullmatch(r"test_.*|.*_test", file.stem):
        raise UserError(f"{file}: pytest would take this recipe for one of its own files: name it my_recipe.py")
    if file.stem == "app" or _is_module(file.stem, file.parent):
        raise UserError(f"{file}: it would hide the module {file.stem} from all that imports it: name it my_recipe.py")
    beside = file.with_name("app")
    if beside.is_dir() and not beside.samefile(Path(app.__file__).parent):
        raise UserError(
            f"{file}: the folder {beside} would hide the package app, which recipes import: choose another folder, "
            f"such as {file.parent / 'recipes' / file.name}"
        )


def _is_module(name: str, folder: Path) -> bool:
    """Tell whether Python or an installed package has a module of this name; what lies here, or in `folder`, is none.

    Args:
        folder: where a module of this name is about to be written.
    """
    ours = {Path.cwd(), folder.resolve()}
    return name in sys.stdlib_module_names or bool(
        PathFinder.find_spec(name, [place for place in sys.path if Path(place).resolve() not in ours])
    )


def as_own(recipe: str, name: str, file: Path) -> str:
    """Return a recipe's text as that of another file, whose commands name that file, and profiles without theirs."""
    recipe = re.sub(r"accelerate launch( --config_file accelerate_configs/(\w+)\.yaml)?", _launch, recipe)
    return recipe.replace(f"recipes/{name}.py", file.as_posix())


def _launch(command: re.Match) -> str:
    return f"samestep launch {command[2]}" if command[2] else "samestep launch"
