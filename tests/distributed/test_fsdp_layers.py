"""app.distributed.fsdp: which layers FSDP2 shards one by one, on models as users bring them."""

import os

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from app.distributed import fsdp
from app.errors import UserError
from app.training.optim.adafactor import Adafactor
from app.training.optim.muon import Muon

BERT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
LLAMA = {**BERT, "num_key_value_heads": 2, "tie_word_embeddings": True}
DISTIL = {"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}


class Outdated(nn.Module):
    """A model whose own list names a class that it does not have."""

    _no_split_modules = ["Gone"]

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


MODELS = {
    "bert": (lambda: BertForSequenceClassification(BertConfig(**BERT)), "BertLayer"),
    "bert, tied": (lambda: BertForMaskedLM(BertConfig(**BERT)), "BertLayer"),
    "distilbert": (lambda: DistilBertForSequenceClassification(DistilBertConfig(**DISTIL)), "TransformerBlock"),
    "roberta": (lambda: RobertaForSequenceClassification(RobertaConfig(**BERT)), "RobertaLayer"),
    "llama, tied": (lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), "LlamaDecoderLayer"),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), "GPT2Block"),
    "t5": (lambda: T5ForConditionalGeneration(T5Config(**T5)), "T5Block"),
    "outdated": (Outdated, "Linear"),
    "torch's own": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 3, enable_nested_tensor=False),
        "TransformerEncoderLayer",
    ),
}


@pytest.fixture
def plugin():
    """The profile's FSDP settings, read from an environment that is put back afterwards."""
    before = dict(os.environ)
    os.environ |= {"FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    yield fsdp.read_plugin()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(("make", "layer"), MODELS.values(), ids=MODELS)
def test_the_repeated_layers_are_found(plugin, capsys, make, layer):
    model = make()
    fsdp.name_layers(plugin, set(), model)
    assert plugin.transformer_cls_names_to_wrap == [layer]
    assert capsys.readouterr().err == ""
    # accelerate 1.15 shards embeddings by themselves, and a second time is an error.
    chosen = [module for module in model.modules() if type(module).__name__ == layer]
    ends = [end for end in embeddings(model) if end is not None]
    assert len(chosen) >= 2
    assert not any(inner is end for module in chosen for inner in module.modules() for end in ends)


def embeddings(model: nn.Module) -> list:
    return [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]


@pytest.mark.parametrize(("name", "together"), [("bert, tied", True), ("bert", False), ("llama, tied", False)])
def test_embeddings_that_share_a_weight_with_another_module_stay_with_the_rest(name, together):
    """BERT's last layer has its bias in common with the module around it."""
    model = MODELS[name][0]()
    before = embeddings(model)
    with fsdp.embeddings_known(model):
        assert embeddings(model) == ([None, None] if together else before)
    assert embeddings(model) == before


def test_the_profiles_choice_goes_first(plugin):
    fsdp.name_layers(plugin, {"BertAttention", "BertPooler"}, MODELS["bert"][0]())
    assert plugin.transformer_cls_names_to_wrap == ["BertAttention", "BertPooler"]


def test_a_class_around_an_embedding_is_left_out_even_if_asked_for(plugin):
    fsdp.name_layers(plugin, {"BertModel", "BertEmbeddings", "BertLayer"}, MODELS["bert"][0]())
    assert plugin.transformer_cls_names_to_wrap == ["BertLayer"]


def test_an_unknown_class_is_refused_with_those_there_are(plugin):
    with pytest.raises(UserError) as error:
        fsdp.name_layers(plugin, {"BertLayr", "BertLayer"}, MODELS["bert"][0]())
    asked, there = str(error.value).split(": the model has no such class")
    assert "BertLayr" in asked and "BertLayer" not in asked and "BertLayer" in there


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), nn.Linear(2, 2)],
    ids=["sequential", "one layer"],
)
def test_no_layers_are_said_loudly(plugin, capsys, model):
    fsdp.name_layers(plugin, set(), model)
    assert plugin.transformer_cls_names_to_wrap == []
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ") and "fsdp_transformer_layer_cls_to_wrap" in warning


def test_another_rank_says_nothing(plugin, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    fsdp.name_layers(plugin, set(), nn.Linear(2, 2))
    assert capsys.readouterr().err == ""


def test_another_wrapping_is_left_to_accelerate():
    before = dict(os.environ)
    try:
        os.environ |= {"FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}
        plugin = fsdp.read_plugin()
        fsdp.name_layers(plugin, {"Nothing"}, nn.Linear(2, 2))
        assert plugin.transformer_cls_names_to_wrap is None
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize(("strategy", "reshard"), [("FULL_SHARD", True), ("1", True), ("SHARD_GRAD_OP", False)])
def test_an_older_profile_is_read_as_fsdp2(plugin, strategy, reshard):
    os.environ |= {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": strategy, "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE"}
    found = fsdp.read_plugin()
    assert (found.fsdp_version, found.reshard_after_forward) == (2, reshard)
    assert found.mixed_precision_policy.param_dtype is None


@pytest.mark.parametrize("asked", ["false", "true"])
def test_shards_stay_on_the_host_where_the_profile_says_so(plugin, asked):
    """Without a GPU, whose driver pins memory, in memory as it is."""
    os.environ["FSDP_OFFLOAD_PARAMS"] = asked
    found = fsdp.read_plugin()
    assert fsdp.offloads(found) == (asked == "true") and not getattr(found.cpu_offload, "pin_memory", False)


def test_an_optimizer_that_needs_whole_weights_is_refused():
    """torch 2.13's Adafactor ends its first step on shards with an internal error."""
    with pytest.raises(UserError, match="Adafactor works on whole weights"):
        fsdp.check_optimizer(torch.optim.Adafactor([nn.Parameter(torch.zeros(2, 2))]))


@pytest.mark.parametrize("kind", [Adafactor, Muon])
def test_an_optimizer_that_gathers_weights_is_refused_with_offload(kind):
    """Gathered, they would be on the GPU, and the shards on the host."""
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
    fsdp.check_optimizer(optimizer)
    with pytest.raises(UserError, match=rf"--optim\.name {kind.__name__} gathers weights .* fsdp_offload_params"):
        fsdp.check_optimizer(optimizer, on_host=True)
