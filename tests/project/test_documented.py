"""Every command for a recipe that stands in a document runs, and those for its run behind it: in small, on the CPU.

Commands keep their own flags, but for sizes. What they name (`book.txt`, `photos/`, `bert-base-cased`) is there as a
small stand-in. Launches and profiles are tested elsewhere; here each command is one process.
"""

import importlib
import json
import shutil
from pathlib import Path

import pytest
from support.launching import ROOT
from support.supplies import lay_out
from support.typed_commands import APP, RECIPES, named

from app.__main__ import main as command
from app.launching.flags import parse
from app.rundir import history

pytestmark = pytest.mark.long
# Of 17 samples or so: the last step is short, as a reader's own is.
SHORT = "--run.steps 0 --run.epochs 0.0036"
SMALL = "--run.steps 2 --run.save-every 1 --run.global-batch 8 --run.micro-batch 2 --run.threads 1 --run.trackers"
SMALLER = {
    "cls": "--scratch.layers 1 --scratch.width 32 --scratch.vocab 300 --data.max-length 32",
    "lm": "--scratch.layers 1 --scratch.width 32 --scratch.heads 4 --data.block 32",
    "tag": "--scratch.layers 1 --scratch.width 32 --scratch.vocab 300 --data.max-length 32",
    "dpo": "--scratch.layers 1 --scratch.width 32 --scratch.heads 2 --data.max-length 64",
    "s2s": "--scratch.layers 1 --scratch.width 32 --scratch.vocab 300 --data.max-source 32 --data.max-target 8 "
    "--generate.rows 2",
    "img": "--scratch.layers 1 --scratch.width 8",
    "det": "--scratch.width 8 --data.size 32",
    "graph": "--scratch.width 8",
    "gan": "--width 8 --samples 8",
    "seg": "--scratch.channels 4 8 --data.patches-per-image 1",
}
# What takes long to read, or wants a GPU, and what is taken instead.
INSTEAD = {
    "--optim.updates": "--optim.updates plain",  # others need bf16, which these launches do not have
    "--run.stop-at": "--run.stop-at 1",
    "--run.sync-bn": "--run.sync-bn false",
    "--data.dims": "--data.patch 32",
    "--data.patches-per-image": "--data.patch 32 --data.names road sky --data.values 7 23",
}


def each(commands: list[tuple[str, list[str]]]) -> list[list[str]]:
    """List commands once, whatever documents they stand in."""
    return list({" ".join(words): words for _, words in commands}.values())


@pytest.fixture(scope="module")
def place(data_cache, tmp_path_factory):
    """Work where all is that the commands name."""
    folder = tmp_path_factory.mktemp("documented")
    lay_out(folder)
    for name in ("accelerate_configs", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.mark.parametrize("document", list(dict.fromkeys(document for document, _ in RECIPES)))
def test_recipes(document, place, capfd):
    """A document's commands, one after the other: none may find the run of another where it wants its own."""
    shutil.rmtree("runs", ignore_errors=True)
    for words in (words for name, words in RECIPES if name == document):
        train(words)
    assert "Traceback" not in capfd.readouterr().err


def train(words: list[str], length: str = "") -> None:
    """Run a command for a recipe in this process; length is of other flags than SMALL's."""
    at = next(i for i, word in enumerate(words) if word.startswith("recipes/"))
    recipe = importlib.import_module(words[at].removesuffix(".py").replace("/", "."))
    name, flags = Path(words[at]).stem, words[at + 1 :]
    if "--help" in flags:
        with pytest.raises(SystemExit, match="0"):
            parse(recipe.Config, flags)
        return
    folder = Path(flags[flags.index("--run.dir") + 1]) if "--run.dir" in flags else Path("runs", name)
    here = Path("runs", folder.name)
    small = [*SMALL.split(), *SMALLER[name].split(), "--run.dir", str(here)]
    if name == "lm" and "--data.path" not in flags:
        small += ["--data.path", "book.txt", "--scratch.tokenizer", "byte"]
    for flag, instead in INSTEAD.items():
        small += instead.split() if flag in flags else []
    recipe.main(parse(recipe.Config, [*flags, *small, *length.split()]))
    stopped = "--run.stop-at" in flags
    assert history.read(here).status == ("preempted" if stopped else "finished")


@pytest.fixture(scope="module")
def ended(place):
    """Give the folder of a run whose last step was short."""
    shutil.rmtree("runs/cls", ignore_errors=True)
    train(["recipes/cls.py"], SHORT)
    lines = [json.loads(line) for line in Path("runs/cls/metrics.jsonl").read_text().splitlines()]
    assert max(line.get("samples", 0) for line in lines) % 8
    return Path("runs/cls").rename("ended")


# Those that launch processes, or look at a disk of several machines or at a store, have tests of their own.
ELSEWHERE = ("/shared/", "s3://")
INSPECTING = [
    (document, words)
    for document, words in APP
    if words[0] in ("plan", "runs", "watch", "plot", "export") and not any(w.startswith(ELSEWHERE) for w in words)
]


@pytest.mark.parametrize("words", each(INSPECTING), ids=named)
def test_commands(words, place, ended, monkeypatch):
    for word in words:
        if word.startswith("runs/"):
            shutil.rmtree(word, ignore_errors=True)
            train(["recipes/cls.py", "--run.dir", word])
    words = ["2" if before == "--step" else word for before, word in zip(["", *words], words, strict=False)]
    if words[0] == "plan":  # by then a reader's run has ended
        shutil.rmtree("runs/cls", ignore_errors=True)
        shutil.copytree(ended, "runs/cls")
        recipe = Path(words[1]).stem
        # A plan of a larger model says how its own batch is spread.
        words += [*SMALLER[recipe].split(), *(f"{SMALL} {SHORT}".split() if recipe == "cls" else [])]
    if "--push" in words:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        words += ["--dry-run"]
    assert command(words) == 0
