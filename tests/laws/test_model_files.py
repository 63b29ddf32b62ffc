"""The files of a finished model do not depend on the layout that wrote them."""

import pytest
from safetensors.torch import load_file
from support.launching import ROOT, filled, hashes

from laws.writing import Shared

LAYOUTS = {"one": ("cpu", 1), "ddp3": ("ddp_cpu", 3), "fsdp2": ("fsdp_cpu", 2)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function from a layout to the folder with the models that it wrote."""
    models = filled(tmp_path_factory.mktemp("models"), ROOT / "tests/laws/writing.py")
    return lambda layout: models(*LAYOUTS[layout])[0]


@pytest.mark.parametrize("layout", ["ddp3", "fsdp2"])
def test_every_layout_writes_the_same_files(written, layout):
    """With shared weights once, in one file and in several."""
    assert hashes(written(layout)) == hashes(written("one"))


def test_shared_weights_are_written_once(written):
    whole = load_file(written("fsdp2") / "whole/model.safetensors")
    assert "model.embed_tokens.weight" in whole and "lm_head.weight" not in whole
    assert len(list((written("fsdp2") / "cut").glob("*.safetensors"))) > 2
    plain = load_file(written("fsdp2") / "plain/model.safetensors")
    assert Shared().load_state_dict(plain, strict=False) == (["out.weight"], [])


def test_a_shared_weight_that_fsdp_would_part_is_refused(written):
    """FSDP would shard its layers apart and silently train two weights."""
    text = (written("fsdp2").parent / "refused").read_text()
    assert "into.weight" in text and "out.weight" in text and "fsdp_transformer_layer_cls_to_wrap" in text


def test_the_umask_decides_who_reads_them(written):
    files = [path for path in written("one").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o640"}
