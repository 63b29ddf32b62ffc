"""Law 6 on a GPU: a silent step never makes the host wait for the device; here, on a device that has no numbers."""

import json

import pytest

from launching import ROOT, launch
from laws.small import SMALL

SCRIPTS = ROOT / "tests" / "laws"
# Three micro-batches of 3 or 4 rows.
COMMON = ["--run.global-batch", 10, "--run.micro-batch", 4, "--run.steps", 6, "--run.trackers", "--run.workers", 0]
KINDS = {
    **{recipe: (recipe, []) for recipe in SMALL},
    "lm concat": ("lm", ["--data.packing", "concat"]),
    **{f"lm {kind}": ("lm", ["--attention", kind]) for kind in ("mask", "varlen")},
    "lm gpt2": ("lm", ["--scratch.shape", "gpt2"]),
    "lm checkpointed": ("lm", ["--activation-checkpointing", "true"]),
}


def commands(root, rows, *more):
    listed = []
    for name, (recipe, flags) in KINDS.items():
        flags = [*SMALL[recipe].flags(rows), *COMMON, *flags, *more, "--run.dir", root / name / "run"]
        (root / name).mkdir()
        listed.append(
            [str(ROOT / f"recipes/{recipe}.py"), [str(flag) for flag in flags], str(root / name / "out.json")]
        )
    return listed


@pytest.fixture(scope="module")
def pretended(tmp_path_factory, rows):
    """Train every recipe on the meta device; return the folder of what was found."""
    root = tmp_path_factory.mktemp("pretended")
    (root / "commands.json").write_text(json.dumps(commands(root, rows)))
    result = launch("cpu", 1, SCRIPTS / "pretending.py", root / "commands.json")
    assert result.status == 0, result.output[-6000:]
    return root


@pytest.mark.parametrize("name", KINDS)
def test_a_silent_step_reads_no_number_and_copies_none(pretended, name):
    found = json.loads((pretended / name / "out.json").read_text())
    assert found == {"steps": 3, "copies": {}}
