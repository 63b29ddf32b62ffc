"""--lora.base 4bit: what is refused, what a plan counts, and the real thing where bitsandbytes is installed."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.evaluating import as_it_is
from support.launching import ROOT, launch_many, saved_state, scores, steps
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from app import parse
from app.commands.evaluate.worker import Evaluation
from app.commands.export import command as export
from app.commands.plan import command as plan
from app.distributed.state.safe_reader import StateReader
from app.errors import UserError
from app.tasks.language import four_bits
from app.tasks.language.lora import Lora, add_adapters, check_lora, hold_base
from app.tasks.language.reference import contents_of
from app.training.loop.purpose import Exporting
from recipes import lm

RECIPE = ROOT / "recipes" / "lm.py"
SMALL = ["--data.block", 32, "--run.global-batch", 8, "--run.micro-batch", 4, "--run.trackers", "--run.log-every", 1]
PACKED = ["--lora.rank", 2, "--lora.base", "4bit", "--lora.dropout", 0.1, "--optim.lr", 2e-3]
ALONE = {"is_fsdp2": False, "split": None, "distributed_type": "NO", "compiles": False, "mixed_precision": "no"}
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def words(folder, path, *more) -> list[str]:
    return [str(word) for word in [*SMALL, "--data.path", path, "--run.dir", folder, *more]]


def train(folder, path, *more) -> dict:
    return lm.main(parse(lm.Config, words(folder, path, *more)))


@pytest.fixture(scope="module")
def base(rows, tmp_path_factory):
    """A small pretrained Llama's folder."""
    folder = tmp_path_factory.mktemp("base")
    shape = ["--scratch.layers", 2, "--scratch.width", 32, "--scratch.heads", 2, "--scratch.tokenizer", "byte"]
    train(folder, rows(40), *shape, "--run.steps", 4)
    return folder / "model"


@pytest.mark.parametrize(
    "lora, model, layout, why",
    [
        ({"rank": 0}, "m", {}, "give --lora.rank 8"),
        ({}, "", {}, "no pretrained weights to pack: give --model"),
        ({}, "m", {"is_fsdp2": True}, "FSDP .* take one process or DDP .*, or --lora.base whole"),
        ({}, "m", {"split": object()}, "tp_size or --run.slices has not been seen"),
        ({}, "m", {"distributed_type": "DEEPSPEED"}, "DeepSpeed has not been seen"),
        ({}, "m", {"compiles": True}, "torch.compile has not been seen"),
        ({}, "m", {}, "bitsandbytes is not installed: pip install bitsandbytes"),
    ],
)
def test_what_packed_weights_do_not_go_with_is_refused(lora, model, layout, why, monkeypatch):
    monkeypatch.setattr("app.tasks.pretrained.is_installed", lambda name: name != "bitsandbytes")
    with pytest.raises(UserError, match=f"--lora.base 4bit: .*{why}"):
        check_lora(Lora(**{"rank": 2, "base": "4bit", **lora}), model, SimpleNamespace(**ALONE | layout))


def test_a_model_without_linear_layers_is_refused():
    model = add_adapters(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50)), Lora(rank=2))
    with pytest.raises(UserError, match=r"this gpt2 has no linear layers .* or --lora\.base whole"):
        four_bits.hold(model, SimpleNamespace(**ALONE))


def test_a_plan_counts_packed_weights(rows, base, tmp_path, capsys):
    """Without bitsandbytes; and says which profiles are refused."""
    found = {}
    for kind in ("whole", "4bit"):
        flags = words(tmp_path / "run", rows(40), "--model", base, "--lora.rank", 2, "--lora.base", kind)
        options = plan.Options(RECIPE, ("cpu", "fsdp_cpu"), json=str(tmp_path / f"{kind}.json"))
        assert plan.main(options, flags) == (kind == "4bit")
        found[kind] = json.loads((tmp_path / f"{kind}.json").read_text())
    assert "TROUBLE: --lora.base 4bit: FSDP" in capsys.readouterr().out
    whole, packed = [each["layouts"][0] for each in found.values()]
    assert found["whole"]["parameters"] == found["4bit"]["parameters"]
    weights = load_file(base / "model.safetensors")
    numbers = sum(w.numel() for name, w in weights.items() if "_proj" in name)
    saved = whole["memory"]["weights"] - packed["memory"]["weights"]
    assert 3 * numbers < saved < 3.5 * numbers  # of 4 bytes, half a byte and scales are left, and small tables
    assert packed["peak"]["peak"] < whole["peak"]["peak"]


@pytest.mark.apart
def test_a_plan_counts_what_bitsandbytes_holds():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = nn.Linear(256, 96, bias=False)
    packed = four_bits._packed(layer, "no")
    assert isinstance(packed, bitsandbytes.nn.Linear4bit)
    held = {name: value for name, value in packed.state_dict().items() if "bitsandbytes" not in name}
    counted = four_bits.Counted(layer.to("meta"))
    assert sum(t.nbytes for t in held.values()) == sum(t.nbytes for t in (*counted.parameters(), *counted.buffers()))


@pytest.mark.apart
def test_evaluation_computes_with_the_same_weights():
    """bitsandbytes would pack them anew on CPUs that multiply in bf16."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    packed = four_bits._packed(nn.Linear(64, 128), "no").train()
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(packed(x), packed.eval()(x))
    x.requires_grad_()
    packed.train()(x).sum().backward()
    assert x.grad.abs().sum() > 0 and packed.weight.grad is None


@pytest.mark.apart
def test_any_layout_and_stops_have_the_same_bits(rows, base, tmp_path):
    pytest.importorskip("bitsandbytes")
    flags = ["--model", base, *PACKED, "--run.steps", 4, "--run.exact", "true", "--ema.decay", 0.5]
    train(tmp_path / "one", rows(40), *flags)
    train(tmp_path / "mixed", rows(40), *flags, "--run.stop-at", 2)
    (state,) = (tmp_path / "mixed" / "checkpoints").glob("step-*/state")
    kept = StateReader(state).read_entries()
    assert kept and all("lora" in name for name in kept if name.startswith(("models.", "averages.")))
    launch_many("ddp_cpu", 2, RECIPE, [words(tmp_path / name, rows(40), *flags) for name in ("two", "mixed")], tmp_path)
    for name in ("two", "mixed"):
        assert steps(tmp_path / name) == steps(tmp_path / "one")
        assert scores(tmp_path / name) == scores(tmp_path / "one")
        assert saved_state(tmp_path / name, 4) == saved_state(tmp_path / "one", 4)
    assert as_it_is(tmp_path / "one")["scores"]["eval/loss"] == scores(tmp_path / "one")[-1]["eval/loss"]


@pytest.mark.apart
def test_adapters_are_merged_into_whole_weights(rows, base, tmp_path):
    pytest.importorskip("bitsandbytes")
    run, flags = tmp_path / "run", ["--model", base, *PACKED, "--run.steps", 2]
    train(run, rows(40), *flags)
    export.main(export.Options(run, merge=True, to=str(tmp_path / "merged")))
    export.main(export.Options(run, to=str(tmp_path / "apart")))
    assert not (tmp_path / "apart" / "model.safetensors").exists()
    merged, apart = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("merged", "apart"))
    ids = torch.tensor([[256, *b"alpha beta"]])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, apart(ids).logits, atol=1e-4, rtol=1e-4)
    held = (base / "model.safetensors").read_bytes()
    weights = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    # Too little to change a number of 4 bits.
    save_file({**weights, name: weights[name] * (1 + 1e-6)}, base / "model.safetensors", metadata={"format": "pt"})
    try:
        with pytest.raises(UserError, match="whose weights were others"):
            train(run, rows(40), *flags, "--run.steps", 3)
    finally:
        (base / "model.safetensors").write_bytes(held)


def test_only_an_export_leaves_weights_whole():
    model = add_adapters(LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=50)), Lora(rank=2))
    hold_base(model, Lora(rank=2, base="4bit"), SimpleNamespace(**ALONE), Exporting().needs)
    assert all(p.is_floating_point() for p in model.parameters())
    # An evaluation computes with them, on the devices that there are.
    assert Evaluation("state", averaged=False).needs.computing


def test_a_plan_hashes_no_weights():
    """As dpo asks for, to find what its reference says."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=50))
    assert contents_of(model) == ""
