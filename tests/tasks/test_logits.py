"""Losses without all logits: the values and gradients of whole logits, in less memory; laws/ compares layouts."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from app import UserError
from app.commands.plan.live_storage import LiveStorages
from app.data.corpus.blocks import token_loss
from app.data.rows import IGNORED
from app.distributed.tensor_parallel import last_layer
from app.distributed.tensor_parallel.last_layer import LastLayer
from app.distributed.tensor_parallel.layers import split_model
from app.distributed.tensor_parallel.plan import plan_of
from app.distributed.tensor_parallel.split import Split
from app.tasks.language import logits
from app.tasks.language.lora import Lora, add_adapters
from app.tasks.language.preference import answer_logits, log_probabilities
from app.tasks.language.seq2seq import predict
from app.training.scores.text import TokenAccuracy

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96}
GROUPED = {**SMALL, "num_key_value_heads": 2}
NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def make(kind, **more):
    """Build a small model without dropout."""
    torch.manual_seed(0)
    if kind == "GPT2LMHead":
        config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=96, n_positions=16, **NONE)
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "T5":
        shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 96}
        config = transformers.T5Config(**shape, decoder_start_token_id=0)
        return transformers.T5ForConditionalGeneration(config).eval()
    causal = kind not in ("Bert", "Roberta")
    settings = {**(GROUPED if causal else SMALL), **(NONE if causal else {}), **more}
    model = getattr(transformers, f"{kind}{'ForCausalLM' if causal else 'ForMaskedLM'}")
    return model(getattr(transformers, f"{kind}Config")(**settings)).eval()


MODELS = {
    "llama": lambda: make("Llama", attention_bias=True),
    "tied": lambda: make("Qwen3", head_dim=8, tie_word_embeddings=True),
    "mistral": lambda: make("Mistral"),
    "gpt2": lambda: make("GPT2LMHead"),
    "adapters": lambda: add_adapters(make("Llama"), Lora(rank=2)),
    "bert": lambda: make("Bert"),
    "roberta": lambda: make("Roberta"),
    "t5": lambda: make("T5"),
}


def chosen(model, asked="chunked", **more) -> SimpleNamespace:
    """Choose for a model, as a run without a profile does."""
    accelerator = SimpleNamespace(distributed_type="NO", compiles=False)
    facts = {}
    run = SimpleNamespace(accelerator=accelerator, note=lambda **known: facts.update(known))
    logits.choose(model, asked, run, **more)
    return facts["logits"]


def tokens(*shape):
    """Draw tokens, and targets of which some are ignored."""
    torch.manual_seed(1)
    ids, targets = torch.randint(0, 96, shape), torch.randint(0, 96, shape)
    targets[0, :3] = IGNORED
    return ids, targets


def found(model, smoothing=0.0, autocast=False):
    """Return the loss, gradients, and accuracy of a model."""
    ids, targets = tokens(3, 7)
    model.zero_grad()

    def run(share):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if model.config.is_encoder_decoder:
                return predict(model, {"input_ids": ids, "labels": targets}, share)
            with logits.told(model, targets, share):
                return model(input_ids=ids).logits, targets

    loss = token_loss(*run(smoothing), smoothing)
    loss.backward()
    accuracy = TokenAccuracy(logits.likeliest(model))
    with torch.no_grad():
        accuracy.update(*run(0.0))
    return loss.double(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, accuracy.state


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_give_the_loss_gradients_and_accuracy_of_whole_logits(name, smoothing):
    model = MODELS[name]()
    loss, gradients, accuracy = found(model, smoothing)
    assert chosen(model) == "chunked"
    ids, targets = tokens(3, 7)
    if name != "t5":
        with logits.told(model, targets):
            assert model(input_ids=ids).logits.shape == targets.shape
        assert model(input_ids=ids).logits.shape == (*targets.shape, 96), "what is not told returns logits"
    ours, others, score = found(model, smoothing)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-6) and torch.equal(score, accuracy)
    assert others.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(others[key], gradient, rtol=1e-4, atol=1e-6, msg=key)


def test_autocast_computes_chunks_in_16_bits_too():
    model = MODELS["bert"]()
    loss, gradients, _ = found(model, autocast=True)
    chosen(model)
    ours, others, _ = found(model, autocast=True)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
    for key, gradient in gradients.items():
        torch.testing.assert_close(others[key], gradient, rtol=2e-2, atol=1e-3, msg=key)


def test_slices_of_the_vocabulary_give_the_same_loss():
    model = MODELS["tied"]()
    loss, gradients, accuracy = found(model)
    chosen(model, "auto")
    split_model(model, plan_of(model, 2), Split(None, 2))
    ours, others, score = found(model)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-6) and torch.equal(score, accuracy)
    for key, gradient in gradients.items():
        torch.testing.assert_close(others[key], gradient, rtol=1e-3, atol=1e-5, msg=key)


def test_answers_have_the_same_probabilities():
    """Of dpo: prompts of other lengths, of which only the last tokens are asked for."""
    model = MODELS["llama"]()
    ids, _ = tokens(4, 9)
    places, targets = torch.tensor([1, 2, 3, 4, 7, 9, 10, 11, 15]), torch.arange(9)
    inputs = {"input_ids": ids, "logits_to_keep": 4, "places": places, "targets": targets}
    expected = log_probabilities(answer_logits(model, inputs), inputs)
    chosen(model)
    losses = answer_logits(model, inputs)
    assert losses.shape == (9,)
    torch.testing.assert_close(log_probabilities(losses, inputs), expected, rtol=1e-6, atol=0)


def test_logits_are_never_in_memory():
    """Nor their gradient, nor a copy: whole logits of this shape take 16 MB each."""
    peaks = {}
    for kind in ("whole", "chunked"):
        layer, storages = nn.Linear(16, 8192, bias=False), LiveStorages()
        if kind == "chunked":
            LastLayer(layer, "chunked")
        x, targets = torch.randn(2, 256, 16, requires_grad=True), torch.zeros(2, 256, dtype=torch.int64)
        held = LastLayer.told(layer.last_layer, targets, 0.0) if kind == "chunked" else torch.enable_grad()
        with storages:
            with held:
                predicted = layer(x)
            token_loss(predicted, targets).backward()
        peaks[kind] = max(storages.most.values())
    size = 512 * 8192 * 4
    assert peaks["whole"] > 2 * size and peaks["chunked"] < 0.5 * size


def test_auto_takes_chunks_where_logits_are_large(monkeypatch):
    model = MODELS["gpt2"]()
    ids, targets = tokens(3, 7)
    assert chosen(model, "auto") == "auto"
    with logits.told(model, targets):
        assert model(input_ids=ids).logits.shape == (3, 7, 96)
        monkeypatch.setattr(last_layer, "LARGE", 3 * 7 * 96)
        assert model(input_ids=ids).logits.shape == (3, 7)
        monkeypatch.setattr(last_layer, "LARGE", 3 * 7 * 96 + 1)
        assert model(input_ids=ids).logits.shape == (3, 7, 96)


def test_a_chunk_is_narrow_where_there_are_many_tokens():
    """And the same on one process that computes two slices as on two that compute one each."""
    assert last_layer._width(4096, 131072, 1, 1) == 8192
    assert last_layer._width(1, 96, 1, 1) == 96 and last_layer._width(1, 96, 1, 8) == 12
    assert last_layer._width(1, 96, 2, 8) == 12 and last_layer._width(1 << 30, 96, 1, 1) == 96


def test_what_cannot_be_computed_in_chunks_is_refused_by_name():
    gemma = make("Gemma2", head_dim=8)
    with pytest.raises(UserError, match="gemma2 changes logits after its last layer: use --logits whole"):
        chosen(gemma)
    assert chosen(gemma, "auto") == "whole"
    with pytest.raises(UserError, match=r"the last layer of this llama is a .*, and only Linear"):
        chosen(add_adapters(make("Llama"), Lora(rank=2, targets=("lm_head",))))
    with pytest.raises(UserError, match=r"--distill\.teacher needs logits"):
        chosen(MODELS["llama"](), needed="--distill.teacher")
    compiled = SimpleNamespace(backend="INDUCTOR", use_regional_compilation=False)
    accelerator = SimpleNamespace(distributed_type="NO", compiles=True, state=SimpleNamespace(dynamo_plugin=compiled))
    with pytest.raises(UserError, match="dynamo_use_regional_compilation"):
        logits.choose(MODELS["llama"](), "chunked", SimpleNamespace(accelerator=accelerator, note=None))
