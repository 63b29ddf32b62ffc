"""What can be split and what cannot, and how much one process then holds; tests/laws/test_tensor_parallel.py trains."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from support.launching import ROOT, launch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from app import UserError
from app.__main__ import main
from app.commands.plan.pretended_split import cuts_of
from app.distributed import supported
from app.distributed.accelerator import Accelerator
from app.distributed.tensor_parallel.between_layers import BetweenLayers
from app.distributed.tensor_parallel.layers import cuts, split_model
from app.distributed.tensor_parallel.plan import check_slices, plan_of
from app.distributed.tensor_parallel.split import Split, tree
from app.tasks.language.lora import Lora, add_adapters

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
DROPOUTS = "embd_pdrop", "attn_pdrop", "resid_pdrop"


def llama(**more):
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, **more}))


def gpt2(**more):
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**{**shape, **dict.fromkeys(DROPOUTS, 0.0), **more}))


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, num_attention_heads=4, num_key_value_heads=4, head_dim=8))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=48), r"3 attention heads .* by 2"),
        (lambda: llama(num_key_value_heads=1), r"1 heads of keys and values of this llama cannot be divided by 2"),
        (
            lambda: llama(intermediate_size=49),
            r"the width 49 of model\.layers\.0\.mlp\.gate_proj cannot be",
        ),
        (lambda: gpt2(n_head=1), r"1 attention heads of this gpt2 cannot be divided by 2"),
        (lambda: gpt2(n_inner=49), r"the width 49 of transformer\.h\.0\.mlp\.c_fc cannot be"),
        (lambda: T5ForConditionalGeneration(T5Config(d_model=8, num_layers=1, vocab_size=9)), r"no plan .* of t5"),
        (lambda: nn.Linear(2, 2), r"no plan to split the layers of Linear"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(make, words):
    with pytest.raises(UserError, match=words):
        plan_of(make(), 2)


def test_slices_that_do_not_fit_are_refused():
    for slices, processes, words in ((6, 2, "power of two"), (2, 4, "tp_size 4"), (4, 3, "tp_size 3")):
        with pytest.raises(UserError, match=words):
            check_slices(slices, processes)
    for slices, processes in ((0, 3), (4, 1), (4, 2), (4, 4)):
        check_slices(slices, processes)


def test_a_plan_names_each_layer_and_a_vocabulary_that_can_be_divided():
    model = llama()
    plan = plan_of(model, 2)
    assert plan["model.layers.1.self_attn.o_proj"] == "rowwise" and plan["model.layers.0.mlp.up_proj"] == "colwise"
    assert len(plan) == 2 * 7 + 2
    whole = {p for p in model.parameters() if p not in cuts(model, plan)}
    assert whole == {p for name, p in model.named_parameters() if "norm" in name}
    fused = gpt2()
    where = cuts(fused, plan_of(fused, 2))
    found = {
        name.removeprefix("transformer.h.1."): where.get(p) for name, p in fused.named_parameters() if ".1." in name
    }
    assert {name: dim for name, dim in found.items() if dim is not None} == {
        # Rows of the fused matrix are kept, and exchanged; the others are stored as [inputs, outputs].
        **{"attn.c_attn.weight": 0, "attn.c_proj.weight": 0},
        **{"mlp.c_fc.weight": 1, "mlp.c_fc.bias": 0, "mlp.c_proj.weight": 0},
    }
    odd = BertForMaskedLM(BertConfig(**{**SMALL, "vocab_size": 65}, num_attention_heads=4))
    assert set(plan_of(odd, 2).values()) == {"colwise", "rowwise"}


@pytest.mark.parametrize("make", [qwen3, gpt2])
def test_slices_compute_what_whole_layers_do(make):
    """On one process; gradients too, with norms of heads, whose weights all slices share, and with fused layers."""
    torch.manual_seed(0)
    whole, sliced = make(), make()
    sliced.load_state_dict(whole.state_dict())
    split_model(sliced, plan_of(sliced, 4), Split(None, 4))
    ids = torch.randint(0, 64, (2, 9))
    for model in (whole, sliced):
        model(input_ids=ids, labels=ids).loss.backward()
    for (name, ours), theirs in zip(whole.named_parameters(), sliced.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=2e-4, atol=2e-6, msg=name)
    found = [p.grad for p in sliced.parameters()]
    assert any(not torch.equal(p.grad, g) for p, g in zip(whole.parameters(), found, strict=True))


def test_processes_drop_parts_of_one_mask():
    """Two processes drop together what one drops, and all draw the same numbers afterwards."""
    ones, found, after = torch.ones(2, 4, 5, 5), [], []
    for processes, rank in ((1, 0), (2, 0), (2, 1)):
        split = Split(None, 4)
        split.processes, split.rank, split.inside = processes, rank, True
        torch.manual_seed(3)
        with BetweenLayers(split):
            found.append(nn.functional.dropout(ones[:, : 4 // processes], 0.3))
        after.append(torch.rand(()).item())
    assert torch.equal(found[0], torch.cat(found[1:], dim=1)) and 0 < (found[0] == 0).float().mean() < 1
    assert len(set(after)) == 1


def test_a_tree_has_the_sum_of_its_subtrees():
    terms = [torch.tensor(value) for value in (1e8, 1.0, -1e8, 1.0)]
    assert tree(terms) == tree([tree(terms[:2]), tree(terms[2:])]) != sum(terms[1:], terms[0])


def test_a_process_whose_others_are_not_there_exchanges_nothing():
    """As for a plan, with each way in which processes exchange numbers."""
    split, own = Split(None), torch.empty(2, 3, device="meta")
    with split.pretending(2):
        assert split.largest(own).shape == split.total([own]).shape == own.shape
        assert split.join(own).shape == (2, 6)


def test_a_mesh_of_another_size_is_refused_with_numbers(monkeypatch):
    """Under FSDP2 too, whose dimension of the mesh counts."""
    sizes = {"DP_REPLICATE": 1, "DP_SHARD": 2, "TP": 2, "CP": 1, "SP": 1}
    for name, size in sizes.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", str(size))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(UserError, match="a mesh of 4 for 6 processes: start 4 processes, or change the sizes"):
        supported.check(supported.of_environment(on_cpu=True))
    monkeypatch.setenv("WORLD_SIZE", "4")
    supported.check(supported.of_environment(on_cpu=True))


def test_fp16_and_compiling_are_refused_where_layers_are_split():
    asked = supported.Asked(2, on_cpu=False, engine="", precision="fp16", mesh=supported.Mesh(tp=2))
    with pytest.raises(UserError, match=r"fp16 under tp_size: its loss scale does not work there"):
        supported.check(asked)
    supported.check(dataclasses.replace(asked, mesh=supported.Mesh(dp_replicate=2)))
    with pytest.raises(UserError, match=r"cannot be compiled yet: take dynamo_config out of the profile"):
        Accelerator._split_layers(SimpleNamespace(compiles=True), llama())


@pytest.mark.parametrize("layer, words", [("c_attn", r"c_attn .* its adapter cannot be split"), ("c_fc", "")])
def test_adapters_on_a_fused_layer_are_refused(layer, words):
    model = add_adapters(gpt2(), Lora(rank=4, targets=(layer,)))
    if words:
        with pytest.raises(UserError, match=words):
            plan_of(model, 2)
    else:
        assert "base_model.model.transformer.h.1.mlp.c_fc.lora_B.default" in plan_of(model, 2)


def test_a_weight_that_a_module_with_a_bias_shares_is_not_split():
    model = llama()
    assert any(name.endswith("embed_tokens") for name in plan_of(model, 2))
    model.extra = nn.Linear(*reversed(model.get_input_embeddings().weight.shape))
    model.extra.weight = model.get_input_embeddings().weight
    assert not any(name.endswith("embed_tokens") for name in plan_of(model, 2))


@pytest.mark.parametrize("layer", ["embed_tokens", "lm_head"])
def test_a_shared_weight_is_split_in_all_modules_or_in_none(layer):
    """peft wraps one end of a tied model, which then is no plain layer."""
    plain, wrapped = (
        plan_of(add_adapters(llama(tie_word_embeddings=True), lora), 2)
        for lora in (Lora(), Lora(rank=2, targets=(layer,)))
    )
    assert {"embedding", "head"} <= set(plain.values())
    assert not {"embedding", "head"} & set(wrapped.values())


def test_a_plan_cuts_a_vocabulary_only_where_all_slices_can():
    model = llama(vocab_size=66, num_key_value_heads=4)
    ends = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    assert ends <= cuts_of([model], 2, 2).keys() and not ends & cuts_of([model], 2, 4).keys()
    assert len(cuts_of([model], 2, 4)) > 2 and not cuts_of([model], 1, 4)


def test_plan_counts_the_weights_of_one_process(tmp_path, rows):
    """Each process holds half of what is split, and whole norms."""
    small = ["--scratch.layers", 2, "--scratch.width", 32, "--scratch.tokenizer", "byte", "--data.path", rows(31)]
    small += ["--data.text", "text", "--data.block", 64, "--run.dir", tmp_path / "run", "--run.trackers"]
    file = tmp_path / "plan.json"
    words = ["plan", ROOT / "recipes" / "lm.py", *small, "--json", file, "--profile", "cpu", "tp_cpu"]
    assert main(list(map(str, words))) == 0
    one, two = (layout["memory"]["weights"] for layout in json.loads(file.read_text())["layouts"])
    norms = 5 * 32 * 4 + 32  # two in each layer, the last, and the frequencies of positions
    assert two - norms == (one - norms) // 2


@pytest.mark.parametrize(
    "count, more, said",
    [
        (2, ["--run.exact", "true"], "give --run.slices 2"),
        pytest.param(4, [], "a mesh of 2 for 4", marks=pytest.mark.exhaustive),  # as it is refused above
    ],
)
def test_exact_mode_needs_slices_and_a_mesh_its_processes(tmp_path, count, more, said):
    found = launch("tp_cpu", count, ROOT / "tests" / "laws" / "toy.py", "--run.dir", tmp_path / "run", *more)
    assert found.status and said in found.output, found.output
