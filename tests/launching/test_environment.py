"""What is around the process is not as usual: a clear line or no problem, and never a traceback."""

import json
import sys

import pytest
from support.launching import ROOT, metrics, run

from app import parse
from laws.many import load

RECIPE = ROOT / "recipes" / "cls.py"
QUICK = ["--run.trackers", "--run.steps", 2, "--run.global-batch", 4, "--run.micro-batch", 2, "--scratch.width", 32]
QUICK += ["--scratch.heads", 2, "--scratch.vocab", 300, "--data.max-length", 32]
LABELS = "\u00e9\u00e4"
ASCII = {"PYTHONIOENCODING": "ascii"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Give a folder with letters that not every terminal has, and labelled texts in it that have them too."""
    folder = tmp_path_factory.mktemp("run") / "caf\u00e9"
    folder.mkdir()
    rows = "".join(f"text {i} \u00fc,{LABELS[i % 2]}\n" for i in range(40))
    (folder / "rows.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    (folder / "file").touch()
    return folder


def start(place, name, env, head=(), tail="", without=()):
    """Train a few steps in an environment; `tail` is what the shell does with the output."""
    words = [*map(str, head or [sys.executable]), str(RECIPE), *map(str, QUICK)]
    words += ["--data.path", str(place / "rows.csv"), "--run.dir", str(place / name)]
    unset = [part for word in without for part in ("-u", word)]
    command = ["env", *unset, *(f"{key}={value}" for key, value in env.items()), *words]
    return run(["bash", "-c", '"$@" ' + tail, "bash", *command])


LAUNCH = [sys.executable, "-m", "app", "launch"]
TWO = [*LAUNCH, "ddp_cpu:2"]
# The environment, what starts the recipe, what the shell does with its output, and variables that are not set.
FINE = {
    "no threads, no TMPDIR": ({"OMP_NUM_THREADS": "", "TMPDIR": "/no/such", **ASCII}, TWO, "", ()),
    "HOME that cannot be written, no stdout": ({"HOME": "/proc/nothing"}, (), ">&-", ()),
    "no stderr": ({}, (), "2>&-", ()),
    "a list of threads, POSIX, no HOME, no output": (
        {"OMP_NUM_THREADS": "2,1", "LC_ALL": "POSIX"},
        LAUNCH,
        ">&- 2>&-",
        ("HOME",),
    ),
}


# `make laws` has one of the two streams that are closed.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name == "no stderr" else []) for name in FINE]
)
def test_a_run_goes_on(place, name):
    env, head, tail, without = FINE[name]
    folder = name.replace(" ", "-").replace(",", "")
    result = start(place, folder, env, head, tail, without)
    assert result.status == 0 and "Traceback" not in result.output, result.output
    assert len(metrics(place / folder)) >= 1


REFUSED = {
    "threads that are a word": ({"OMP_NUM_THREADS": "many"}, TWO, (), "OMP_NUM_THREADS=many"),
    "a file for the cache": ({"HF_DATASETS_CACHE": "{place}/file"}, (), (), "HF_DATASETS_CACHE"),
    "a cache that cannot be made": ({"HF_DATASETS_CACHE": "/proc/nothing"}, (), (), "HF_DATASETS_CACHE"),
    "a cache in no HOME": ({"HOME": "/proc/nothing"}, (), ("HF_DATASETS_CACHE", "HF_HOME"), "HF_DATASETS_CACHE"),
    "a rank that is left over": (
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        (),
        (),
        "no MASTER_ADDR, MASTER_PORT",
    ),
    "the ranks of a cluster": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        (),
        (),
        "no LOCAL_RANK: start the recipe with accelerate launch",
    ),
    "names that are no letters": (
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        (),
        (),
        "PYTHONUTF8=1",
    ),
}


# `make laws` has those that are refused in the place of another one.
LIKE_OTHERS = ("a cache that cannot be made", "a rank that is left over")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name in LIKE_OTHERS else []) for name in REFUSED]
)
def test_a_run_is_refused_in_one_line(place, name):
    env, head, without, said = REFUSED[name]
    env = {key: value.format(place=place) for key, value in env.items()}
    result = start(place, "refused", env, head, without=without)
    errors = [line for line in result.output.splitlines() if line.startswith("error:") and "rank " not in line]
    assert result.status == 2 and len(errors) == 1 and said in errors[0], result.output
    assert "Traceback" not in result.output and not (place / "refused").exists()


@pytest.fixture(scope="module")
def trained(place, data_cache):
    recipe = load(RECIPE)
    words = [*QUICK, "--data.path", place / "rows.csv", "--run.dir", place / "trained"]
    recipe.main(parse(recipe.Config, list(map(str, words))))
    return place / "trained"


COMMANDS = {
    "runs": ["{place}"],
    "plot": ["{run}"],
    "evaluate": ["{run}"],
    "predict": ["{run}", "{place}/rows.csv", "--to", "{place}/out.jsonl"],
    "plan": [str(RECIPE), *map(str, QUICK), "--data.path", "{place}/rows.csv"],
    "prove": [
        *(str(RECIPE), "--profiles", "cpu", "ddp_cpu:2", "--steps", "2", "--report", "{place}/report"),
        *(*map(str, QUICK[1:]), "--data.path", "{place}/rows.csv"),
    ],
}


IN_TURN = """
import json, sys
from app.__main__ import run
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        run()
    except SystemExit as end:
        print("gave", words[0], end.code)
"""


# `make laws` has `prove`, which launches.
@pytest.mark.parametrize(
    "names", [[name for name in COMMANDS if name != "prove"], pytest.param(["prove"], marks=pytest.mark.exhaustive)]
)
def test_commands_print_what_the_terminal_cannot_show(place, trained, names):
    """One after the other, in one process."""
    commands = [[name, *(word.format(place=place, run=trained) for word in COMMANDS[name])] for name in names]
    words = [sys.executable, "-c", IN_TURN, json.dumps(commands)]
    result = run(words, env={**ASCII, "OMP_NUM_THREADS": "", "PYTHONPATH": str(ROOT)})
    assert result.status == 0 and "Traceback" not in result.output, result.output
    assert all(f"gave {name} 0" in result.output for name in names), result.output
