"""In bf16, FSDP2's gradients have the bits of DDP's, and it keeps no bf16 copies of layers after their use."""

import json

import pytest
from safetensors.torch import load_file
from support.launching import ROOT, filled, profile_of


@pytest.fixture(scope="module")
def cast(tmp_path_factory):
    """Launch two ranks under DDP and under FSDP2; return their folders."""
    root = tmp_path_factory.mktemp("casts")
    runs = filled(root, ROOT / "tests/laws/casting.py")
    return {n: runs(profile_of(root, f"{n}_cpu", mixed_precision="bf16"), 2)[0] for n in ("ddp", "fsdp")}


def about(folder, rank=0):
    return json.loads((folder / f"rank{rank}.json").read_text())


@pytest.mark.parametrize("step", [0, 1])
def test_gradients_are_those_of_ddp(cast, step):
    """Also for layers that are used twice, frozen, shared or computed again."""
    expected, found = (load_file(cast[name] / f"gradients-{step}.safetensors") for name in ("ddp", "fsdp"))
    assert found.keys() == expected.keys() and len(found) > 100
    assert all(gradient.abs().max() > 1e-6 for gradient in expected.values())
    assert [name for name, gradient in found.items() if not gradient.equal(expected[name])] == []
    assert [about(cast["fsdp"], rank)["loss"] for rank in (0, 1)] == [
        about(cast["ddp"], rank)["loss"] for rank in (0, 1)
    ]


def test_no_copies_stay_behind(cast):
    """DDP's graph holds bf16 copies, half the bytes of the fp32 weights; FSDP2's holds little but activations."""
    ddp, fsdp = about(cast["ddp"]), about(cast["fsdp"])
    assert ddp["held"] > 0.45 * ddp["weights"]
    assert fsdp["held"] < 0.1 * fsdp["weights"]
    assert ddp["evaluating"] > 0.4 * ddp["weights"]
    assert fsdp["evaluating"] < 0.25 * fsdp["weights"]  # the last layer, which is gathered, and the next one
