"""Law 6 on a GPU: a silent step never makes the host wait for the device.

Without a GPU, torch's meta device is used, whose tensors have no values; on a GPU, torch raises at a wait.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import yaml
from support.launching import PROFILES, ROOT, launch

from laws.small import SMALL

SCRIPTS = ROOT / "tests" / "laws"
# Three micro-batches of 3 or 4 rows.
COMMON = ["--run.global-batch", 10, "--run.micro-batch", 4, "--run.steps", 6, "--run.trackers", "--run.workers", 0]
COMMON += ["--run.eval-every", 100, "--run.save-every", 100]
NEEDS = {"seg": "monai"}
KINDS = {
    **{recipe: (recipe, []) for recipe in SMALL if importlib.util.find_spec(NEEDS.get(recipe, "torch"))},
    "dpo": ("dpo", ["--loss.reference", "none"]),  # which is read from numbers
    "lm concat": ("lm", ["--data.packing", "concat"]),
    **{f"lm {kind}": ("lm", ["--attention", kind, "--scratch.dropout", 0]) for kind in ("mask", "varlen")},
    "lm no dropout": ("lm", ["--scratch.dropout", 0]),
    "lm gpt2": ("lm", ["--scratch.shape", "gpt2"]),
    **{f"lm {how}": ("lm", ["--activation-checkpointing", how]) for how in ("block", "ops")},
}
OFFLOAD = {"lm offload": ("lm", ["--activation-checkpointing", "offload"])}  # the meta device has no host


def commands(root, rows, kinds, *more):
    listed = []
    for name, (recipe, flags) in kinds.items():
        flags = [*SMALL[recipe].flags(rows), *COMMON, *flags, *more, "--run.dir", root / name / "run"]
        (root / name).mkdir()
        listed.append(
            [str(ROOT / f"recipes/{recipe}.py"), [str(flag) for flag in flags], str(root / name / "out.json")]
        )
    return listed


@pytest.fixture(scope="module")
def pretended(tmp_path_factory, rows):
    """Train every recipe on the meta device; return the folder of results."""
    root = tmp_path_factory.mktemp("pretended")
    (root / "commands.json").write_text(json.dumps(commands(root, rows, KINDS)))
    result = launch("cpu", 1, SCRIPTS / "pretending.py", root / "commands.json")
    assert result.status == 0, result.output[-6000:]
    return root


@pytest.mark.parametrize("name", KINDS)
def test_a_silent_step_reads_no_number_and_copies_none(pretended, name):
    found = json.loads((pretended / name / "out.json").read_text())
    assert found == {"steps": 3, "copies": {}}


@pytest.fixture(scope="module", params=["as it is", "compiled"])
def waited(request, tmp_path_factory, rows):
    """Train every recipe on a GPU, where no silent step may wait; return the folder of results."""
    root = tmp_path_factory.mktemp("waited")
    settings = yaml.safe_load((PROFILES / "gpu.yaml").read_text())
    listed = commands(root, rows, KINDS | OFFLOAD, "--run.log-every", 100)
    if request.param == "compiled":
        settings["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
        listed = [each for each in listed if "recipes/lm.py" in each[0] or "recipes/cls.py" in each[0]]
    (root / "gpu.yaml").write_text(yaml.safe_dump(settings))
    (root / "commands.json").write_text(json.dumps(listed))
    result = launch(root / "gpu.yaml", 1, SCRIPTS / "waiting.py", root / "commands.json", timeout=580)
    assert result.status == 0, result.output[-6000:]
    return root, listed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: elsewhere nothing waits for one")
def test_on_a_gpu_no_silent_step_waits(waited):
    root, listed = waited
    assert listed
    for _, flags, out in listed:
        assert json.loads(Path(out).read_text()) == [3, 4, 5], flags
    lm = json.loads((root / "lm no dropout" / "run" / "run.json").read_text())
    assert lm["attention"] == "varlen"
