"""What our Accelerator saves without a Run any layout loads, to the bit; and all write the same finished models."""

import functools
import json
import re

import pytest
from safetensors.torch import load_file
from support.launching import ROOT, hashes, launch, state_tensors

from laws import state_folders
from laws.writing import Shared

SCRIPT = ROOT / "tests" / "laws" / "state_folders.py"
LAYOUTS = {"one": ("cpu", 1), "tp": ("tp_cpu", 2), "fsdp": ("fsdp_cpu", 2), "ddp": ("ddp_cpu", 3)}
# Each layout reads what those before it have saved, and its own; one process reads all. `make laws` has the others.
PAIRS = [(there, here) for there in LAYOUTS for here in LAYOUTS]
EARLY = [(there, here) for there, here in PAIRS if here == "one" or [*LAYOUTS].index(there) <= [*LAYOUTS].index(here)]
WORDS = {"one": ["models"], "tp": [], "fsdp": ["models"], "ddp": ["models", "refused"]}


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    """Return a folder with the states that each layout has saved, NAME, and has read and saved again, NAME-LAYOUT.

    And with the models that each has written; and what the last launch, which is refused something, has printed.
    """
    root = tmp_path_factory.mktemp("states")
    (root / "states").mkdir()
    state_folders.main(root, "one", *WORDS["one"])
    for name in list(LAYOUTS)[1:]:
        result = launch(*LAYOUTS[name], SCRIPT, root, name, *WORDS[name])
        assert result.status == int("refused" in WORDS[name]), result.output[-6000:]
    state_folders.main(root, "one")
    return root, result.output


@pytest.fixture(scope="module")
def again(passed):
    """Return a function from a layout to its folder of states; it is launched to read what was saved after its own."""

    @functools.cache
    def again(name):
        result = launch(*LAYOUTS[name], SCRIPT, passed[0], name)
        assert result.status == 0, result.output[-6000:]
        return passed[0] / "states"

    return again


def same_state(folder, there, here):
    """Compare what one layout saved with what another one read and saved again: the tensors and the rest."""
    saved, again = folder / there, folder / f"{there}-{here}"
    assert len(state_tensors(saved)) > 80
    assert state_tensors(again) == state_tensors(saved)
    objects, others = (json.loads((path / "state" / "objects.json").read_text()) for path in (saved, again))
    assert others == objects and there in str(objects["objects"])


@pytest.mark.parametrize(("there", "here"), EARLY)
def test_what_any_layout_saves_any_layout_loads(passed, there, here):
    """Weights, their averages, the optimizer's state, schedule and registered objects."""
    same_state(passed[0] / "states", there, here)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("there", "here"), [pair for pair in PAIRS if pair not in EARLY])
def test_what_was_saved_later_is_loaded_too(again, there, here):
    same_state(again(here), there, here)


def test_layouts_have_saved_different_states(passed):
    """A control: each began with weights of its own, so none of the above is equal by itself."""
    weights = [state_tensors(passed[0] / "states" / name)["models.0.model.norm.weight"] for name in LAYOUTS]
    assert len(set(weights)) == len(LAYOUTS)


def test_nothing_else_is_left(passed):
    """No draft, and nothing in a folder but the state, the generators of each rank, and the list of files."""
    folder = passed[0] / "states"
    assert {path.name for path in folder.iterdir()} >= {*LAYOUTS, *("-".join(pair) for pair in EARLY)}
    assert {path.name for path in folder.iterdir()} <= {*LAYOUTS, *("-".join(pair) for pair in PAIRS)}
    assert {path.name for path in (folder / "tp").iterdir()} == {"state", "random.json", "manifest.json"}
    assert len(json.loads((folder / "tp" / "random.json").read_text())["ranks"]) == 2


def test_a_folder_that_is_not_there_is_refused_on_every_rank(passed):
    for rank in range(LAYOUTS["ddp"][1]):
        told = (passed[0] / f"gone-{rank}").read_text()
        assert re.search("^load_state: .*there is no such folder", told)


def test_what_one_rank_refuses_ends_every_rank(passed):
    """Also where the others could go on: they do not wait for it."""
    ours = passed[1].partition("torch.distributed.elastic")[0]  # then the launcher's own report begins
    assert re.search(r"^error: rank 2: Seen.state_dict\(\).what is of type object", ours, re.MULTILINE), passed[1][
        -3000:
    ]
    assert "UserError" not in passed[1] and ours.count("error: ") == 1, passed[1]
    assert not (passed[0] / "states" / "refused").exists()


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_every_layout_writes_the_same_models(passed, layout):
    """With shared weights once, in one file and in several."""
    assert hashes(passed[0] / "models" / layout) == hashes(passed[0] / "models" / "one") != {}


def test_shared_weights_are_written_once(passed):
    folder = passed[0] / "models" / "fsdp"
    whole = load_file(folder / "whole" / "model.safetensors")
    assert "model.embed_tokens.weight" in whole and "lm_head.weight" not in whole
    assert len(list((folder / "cut").glob("*.safetensors"))) > 2
    plain = load_file(folder / "plain" / "model.safetensors")
    assert Shared().load_state_dict(plain, strict=False) == (["out.weight"], [])


def test_a_shared_weight_that_fsdp_would_part_is_refused(passed):
    """FSDP would shard its layers apart and silently train two weights."""
    text = (passed[0] / "models" / "fsdp-refused").read_text()
    assert "into.weight" in text and "out.weight" in text and "fsdp_transformer_layer_cls_to_wrap" in text


def test_the_umask_decides_who_reads_them(passed):
    for layout in ("one", "ddp"):
        files = [path for path in (passed[0] / "models" / layout).rglob("*") if path.is_file()]
        assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o640"}
