"""Attention inside documents: the same numbers by every kind, and none of them across a document's end."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from app import UserError
from app.data.text.tokenizer import byte_tokenizer
from app.tasks.from_scratch import LanguageScratch, decoder
from app.tasks.language import attention, attention_functions
from app.tasks.language.attention import Attention, choose, document_mask, model_inputs, starts_of

SIZE, LENGTHS = 24, [[5, 1, 18], [24], [7, 7, 10]]


def build(shape="llama", **more):
    torch.manual_seed(0)
    size = LanguageScratch(layers=2, width=32, heads=4, kv_heads=2, shape=shape, **more)
    return decoder(size, byte_tokenizer(SIZE), SIZE)


def rows(seed=0):
    generator = np.random.default_rng(seed)
    found = []
    for lengths in LENGTHS:
        tokens, places = generator.integers(0, 200, (2, SIZE)), [np.arange(n) for n in lengths]
        found.append({"input_ids": tokens[0], "targets": tokens[1], "position_ids": np.concatenate(places)})
    return found


def using(kind, model, packing="documents", device="cpu", halves=False):
    """Have a model use a kind of attention, and return it with what run.json would say."""
    said = {}
    accelerator = SimpleNamespace(mixed_precision="bf16" if halves else "no", device=torch.device(device))
    run = SimpleNamespace(accelerator=accelerator, config=SimpleNamespace(exact=False), note=said.update)
    run.for_other_device = False
    return Attention.of(model, kind, packing, run), said["attention"]


def logits(model, kind):
    inputs = model_inputs(kind.collate(rows()))
    inputs.pop("targets")
    return model(**inputs).logits


def alone(model):
    """Return the logits of every document by itself."""
    found = []
    for row, lengths in zip(rows(), LENGTHS, strict=True):
        pieces = torch.from_numpy(row["input_ids"]).split(lengths)
        found.append(torch.cat([model(input_ids=piece[None], use_cache=False).logits[0] for piece in pieces]))
    return torch.stack(found)


def one_by_one(query, key, value, starts, starts_k, longest, longest_k, *, scale, window_size, enable_gqa=False):
    """Do what torch's varlen_attn does, with sdpa, document by document."""
    assert starts is starts_k
    assert window_size == (-1, 0)
    assert starts.dtype == torch.int32
    assert max(starts.diff()) <= longest == longest_k
    found = torch.empty_like(query)
    for low, high in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        q, k, v = (each[low:high].transpose(0, 1)[None] for each in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True, enable_gqa=enable_gqa)
        found[low:high] = out[0].transpose(0, 1)
    return found


@pytest.fixture
def varlen_here(monkeypatch):
    """Give a function that puts a stand-in in the place of the GPU's kernel, of torch 2.13 or 2.11."""

    def use(grouped=True):
        monkeypatch.setattr(attention_functions, "varlen_attention", lambda: (one_by_one, grouped))
        monkeypatch.setattr(attention, "_lacks", lambda *known: "")

    return use


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["model", "mask", "varlen", "varlen without groups", "flex"])
def test_documents_are_as_if_alone(varlen_here, kind, shape):
    varlen_here(grouped=kind != "varlen without groups")
    model = build(shape).eval()
    expected = alone(model)
    with torch.no_grad():  # flex has no backward pass on a CPU
        found = logits(model, using(kind.split()[0], model)[0])
    assert torch.allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("kind", ["mask", "varlen"])
def test_gradients_are_those_of_transformers_own_way(varlen_here, kind):
    varlen_here()
    gradients = []
    for each in ("model", kind):
        model = build()
        logits(model, using(each, model)[0]).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*gradients, strict=True))
    if kind == "mask":
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_one_stream_needs_no_mask_and_has_the_bits_that_it_had():
    model, other = build(), build()
    kind, said = using("auto", other, "concat", device="meta")
    assert (kind.kind, said) == ("causal", "causal")
    tokens = torch.from_numpy(np.stack([row["input_ids"] for row in rows()]))
    both = [each(input_ids=tokens, use_cache=False).logits for each in (model, other)]
    assert torch.equal(*both)
    texts = [each.eval().generate(tokens[:1, :4], max_new_tokens=8, do_sample=False) for each in (model, other)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("kind", ["varlen", "flex"])
def test_text_is_written_as_ever(varlen_here, kind):
    varlen_here()
    model, other = build().eval(), build().eval()
    using(kind, other)
    start = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(*(each.generate(start, max_new_tokens=8, do_sample=False) for each in (model, other)))


def test_the_finished_model_does_not_tell(varlen_here, tmp_path):
    varlen_here()
    model = build()
    using("varlen", model)
    model.save_pretrained(tmp_path)
    assert "samestep" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"


def test_a_model_that_keeps_documents_from_its_attention_is_noticed(varlen_here):
    varlen_here()
    model = build()
    kind, _ = using("varlen", model)
    inputs = model_inputs(kind.collate(rows()))
    with pytest.raises(RuntimeError, match="--attention model"):
        model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"])


def test_starts_are_those_of_documents_and_of_blocks():
    positions = torch.tensor([[0, 1, 2, 0], [5, 6, 0, 1]])  # the second block goes on with a document
    found = starts_of(positions)
    assert found.dtype == torch.int32
    assert found.tolist() == [0, 3, 4, 6] + [8] * 12
    many = starts_of(torch.zeros(3, 40, dtype=torch.int64))
    assert many.tolist() == [*range(120)] + [120] * 8
    assert document_mask(torch.tensor([[1, 1, 2]])).tolist() == [
        [[[True, False, False], [True, True, False], [False, False, True]]]
    ]


def test_what_is_chosen():
    """One mask on a CPU; on a GPU what needs none, where it can be had."""
    model, dropping = build(), build(dropout=0.1)
    assert choose(model, "auto", "documents", "cpu", True, False) == "mask"
    assert choose(model, "auto", "concat", "cpu", True, False) == "model"
    assert choose(model, "auto", "concat", "cuda", False, True) == "causal"
    assert choose(dropping, "auto", "documents", "cuda", True, False) == "mask"
    assert choose(model, "auto", "documents", "cuda", False, False) == "mask"  # fp32
    assert choose(model, "auto", "documents", "cuda", True, True) == "mask"  # exact
    assert choose(model, "flex", "documents", "cuda", False, False) == "flex"
    assert choose(model, "model", "documents", "cuda", True, False) == "model"


def test_varlen_is_chosen_where_it_can_be_had(monkeypatch):
    monkeypatch.setattr(attention_functions, "varlen_attention", lambda: (one_by_one, True))
    assert choose(build(), "auto", "documents", "cuda", True, False) == "varlen"
    wide = build()
    wide.config.head_dim = 260
    assert choose(wide, "auto", "documents", "cuda", True, False) == "mask"


def test_a_model_that_keeps_documents_from_its_attention_gets_a_mask(monkeypatch):
    """Nemotron's layers take what is known of documents and do not hand it on."""
    from transformers import NemotronConfig, NemotronForCausalLM

    monkeypatch.setattr(attention_functions, "varlen_attention", lambda: (one_by_one, True))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = NemotronForCausalLM(NemotronConfig(vocab_size=300, **shape, **heads))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert choose(model, "auto", "documents", "cuda", True, False) == "mask"
    with pytest.raises(UserError, match=r"does not pass .* use --attention mask"):
        choose(model, "flex", "documents", "cuda", True, False)
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_that_masks_without_positions_has_one_mask_on_every_device():
    """OPT takes position_ids, and makes its mask without them."""
    from transformers import OPTConfig, OPTForCausalLM

    shape = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.0}
    model = OPTForCausalLM(OPTConfig(vocab_size=300, word_embed_proj_dim=32, max_position_embeddings=64, **shape))
    kind, _ = using("auto", model.eval())
    with torch.no_grad():
        assert (logits(model, kind) - alone(model)).abs().max() < 1e-5


def test_layers_that_see_less_keep_transformers_masks():
    model = build()
    model.config.sliding_window = 8
    assert choose(model, "auto", "documents", "cuda", True, False) == "model"
    with pytest.raises(UserError, match="do not see all earlier tokens"):
        choose(model, "mask", "documents", "cuda", True, False)


@pytest.mark.parametrize(
    ("asked", "more", "why"),
    [
        ("varlen", {"device": "cpu"}, "needs a GPU"),
        ("varlen", {"halves": False}, "mixed_precision bf16"),
        ("varlen", {"exact": True}, "--run.exact uses sdpa"),
        ("flex", {"exact": True}, "--run.exact uses sdpa"),
        ("flash", {}, "must be one of auto, model, mask, varlen, flex"),
    ],
)
def test_what_cannot_be_had_is_refused(asked, more, why):
    with pytest.raises(UserError, match=why):
        choose(build(), asked, "documents", **{"device": "cuda", "halves": True, "exact": False, **more})


def test_dropout_is_refused_where_there_would_be_none():
    with pytest.raises(UserError, match="no dropout"):
        choose(build(dropout=0.1), "flex", "documents", "cuda", True, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: flash attention runs on nothing else")
@pytest.mark.parametrize("kind", ["varlen", "flex", "mask"])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_every_kind_agrees_with_transformers_own_way(kind, compiled):
    found = []
    for each in ("model", kind):
        model = build().cuda()
        chosen, said = using(each, model, device="cuda", halves=True)
        assert said.startswith(each)
        inputs = {name: tensor.cuda() for name, tensor in chosen.collate(rows()).items()}
        passes = torch.compile(model) if compiled else model
        with torch.autocast("cuda", torch.bfloat16):
            inputs = model_inputs(inputs)
            inputs.pop("targets")
            out = passes(**inputs).logits.float()
        out.square().mean().backward()
        found.append((out, [p.grad for p in model.parameters()]))
    assert torch.allclose(found[0][0], found[1][0], atol=2e-2)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert (a - b).norm() <= 0.05 * b.norm() + 1e-6
