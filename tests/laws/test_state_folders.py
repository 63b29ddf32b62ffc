"""`save_state` and `load_state` of our Accelerator, without a Run: any layout loads what any has saved, to the bit."""

import json
import re

import pytest
from support.launching import ROOT, launch, state_tensors

SCRIPT = ROOT / "tests" / "laws" / "state_folders.py"
LAYOUTS = {"one": ("cpu", 1), "ddp": ("ddp_cpu", 2), "fsdp": ("fsdp_cpu", 2), "tp": ("tp_cpu", 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with what each layout has saved, NAME, and what each has read and saved again, NAME-LAYOUT.

    A launch reads all that was saved before it; so each but the last one is started twice.
    """
    folder = tmp_path_factory.mktemp("states")
    for name in (*LAYOUTS, *reversed(list(LAYOUTS)[:-1])):
        result = launch(*LAYOUTS[name], SCRIPT, folder, name)
        assert result.status == 0, result.output[-6000:]
    return folder


@pytest.mark.parametrize("here", LAYOUTS)
@pytest.mark.parametrize("there", LAYOUTS)
def test_what_any_layout_saves_any_layout_loads(folder, there, here):
    """Weights, their averages, the optimizer's state, schedule and registered objects: the tensors and the rest."""
    saved, again = folder / there, folder / f"{there}-{here}"
    assert len(state_tensors(saved)) > 80
    assert state_tensors(again) == state_tensors(saved)
    objects, others = (json.loads((path / "state" / "objects.json").read_text()) for path in (saved, again))
    assert others == objects and there in str(objects["objects"])


def test_layouts_have_saved_different_states(folder):
    """A control: each began with weights of its own, so none of the above is equal by itself."""
    weights = [state_tensors(folder / name)["models.0.model.norm.weight"] for name in LAYOUTS]
    assert len(set(weights)) == len(LAYOUTS)


def test_nothing_else_is_left(folder):
    """No draft, and nothing in a folder but the state, the generators of each rank, and the list of files."""
    names = {*LAYOUTS, *(f"{there}-{here}" for there in LAYOUTS for here in LAYOUTS)}
    assert {path.name for path in folder.iterdir()} == names
    assert {path.name for path in (folder / "tp").iterdir()} == {"state", "random.json", "manifest.json"}
    assert len(json.loads((folder / "tp" / "random.json").read_text())["ranks"]) == 2


@pytest.mark.parametrize(
    "flag, told",
    [
        ("--gone", "load_state: .*there is no such folder"),
        ("--one-rank", r"rank 1: Seen.state_dict\(\).what is of type object"),
    ],
)
def test_what_one_rank_refuses_ends_every_rank(folder, flag, told):
    """Also where the others could go on: they do not wait for it."""
    result = launch(*LAYOUTS["ddp"], SCRIPT, folder, "ddp", flag, timeout=90)
    ours = result.output.partition("torch.distributed.elastic")[0]  # then the launcher's own report begins
    assert result.status == 1 and re.search(f"^error: {told}", ours, re.MULTILINE), result.output[-3000:]
    assert "UserError" not in result.output and ours.count("error: ") == 1, result.output
    assert not [path.name for path in folder.iterdir() if "refused" in path.name]
