"""Streamed data and a mixture, for every recipe that streams rows: two processes make the steps of one, to the bit."""

import functools

import pytest
import yaml
from support.launching import ROOT, metrics, scores, steps, train_all
from support.streamed_data import COLOURS, pairs, pictures, preferences

LAYOUTS = {"one": ("cpu", 1), "ddp2": ("ddp_cpu", 2)}
# Three micro-batches of 3 or 4 rows, of which two ranks take two turns and one; an epoch ends inside a step.
COMMON = ["--data.stream", "true", "--data.window", 2, "--run.exact", "true", "--run.trackers", "--run.epochs", 2]
COMMON += ["--run.global-batch", 10, "--run.micro-batch", 4, "--run.log-every", 1]
TINY = ["--scratch.layers", 1, "--scratch.width", 16]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data_cache):
    """Return a function from a layout to the folder of its runs, which the first call makes."""
    root = tmp_path_factory.mktemp("streamed")
    data = {kind: root / "data" / kind for kind in ("pairs", "preferences", "parquet", "tar")}
    pairs(data["pairs"], "parquet"), preferences(data["preferences"], "jsonl.zst")
    pictures(data["parquet"], "parquet"), pictures(data["tar"], "tar")
    pairs(root / "data" / "more", "jsonl", 29)
    data["mix"] = root / "data" / "mix.yaml"
    streamed = {"name": "some", "path": str(data["pairs"]), "weight": 2}
    mapped = {"name": "more", "path": str(root / "data" / "more"), "weight": 1, "stream": False, "prefix": "to: "}
    data["mix"].write_text(yaml.safe_dump({"sources": [streamed, mapped]}))
    classes = ["--data.classes", *COLOURS, "--loss.weights", 1, 0, 2.5]
    model = root / "one" / "dpo" / "model"
    cases = {
        "cls": ["cls", "parquet", *TINY, *classes, "--scratch.vocab", 300, "--data.text", "label"],
        "s2s": [
            *("s2s", "pairs", *TINY, "--scratch.heads", 2, "--scratch.vocab", 300),
            *("--data.max-source", 32, "--data.max-target", 8, "--generate.rows", 0),
        ],
        "s2s-mixed": [
            *("s2s", "mix", *TINY, "--scratch.heads", 2, "--scratch.vocab", 300, "--smoothing", 0.1),
            *("--data.max-source", 32, "--data.max-target", 8, "--generate.rows", 0),
        ],
        "dpo": [
            *("dpo", "preferences", *TINY, "--scratch.heads", 2, "--scratch.tokenizer", "byte"),
            *("--data.max-length", 64),
        ],
        "dpo-copy": ["dpo", "preferences", "--model", model, "--data.max-length", 64, "--optim.lr", 0.002],
        "img": ["img", "parquet", "--scratch.layers", 1, "--scratch.width", 8, *classes],
        "img-tar": [
            *("img", "tar", "--scratch.layers", 1, "--scratch.width", 8, "--augment.flip", 0.5),
            *("--data.image", "png", "--data.label", "cls", "--data.classes", *COLOURS),
        ],
    }

    def of(kind):
        return ["--data.mix" if kind == "mix" else "--data.path", data[kind]]

    @functools.cache
    def runs(layout):
        if layout != "one":
            runs("one")  # whose model others begin with
        commands = [
            (ROOT / "recipes" / f"{recipe}.py", [*of(kind), *flags, *COMMON, "--run.dir", root / layout / name], None)
            for name, (recipe, kind, *flags) in cases.items()
        ]
        train_all(*LAYOUTS[layout], commands, root)
        return root / layout

    return runs


@pytest.mark.parametrize("case", ["cls", "s2s", "s2s-mixed", "dpo", "dpo-copy", "img", "img-tar"])
def test_two_processes_make_the_steps_of_one(runs, case):
    one, two = (runs(layout) / case for layout in LAYOUTS)
    assert steps(one) == steps(two) and scores(one) == scores(two) and len(steps(one)) > 4
    missing = [line["missing_samples"] for line in metrics(two) if "missing_samples" in line]
    assert missing == sorted(missing) and {*missing} == ({1, 2} if "dpo" in case else set())  # one pair, in each epoch


def test_the_reference_is_the_model_before_its_training(runs):
    first, *later = steps(runs("one") / "dpo-copy")
    assert first["reward/margin"] == 0 != later[-1]["reward/margin"]


def test_sources_have_losses_of_their_own(runs):
    lines = steps(runs("one") / "s2s-mixed")
    assert all(line["loss/some"] != line["loss/more"] for line in lines if line["samples/more"])
    assert abs(lines[-1]["samples/some"] - 2 * lines[-1]["samples/more"]) <= 4
