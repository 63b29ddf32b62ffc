"""Masked language modelling and token dropout: what is masked, how much of it, and what a model sees."""

import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForMaskedLM, pipeline

from app import UserError, parse
from app.data.config import Masking
from app.data.corpus.blocks import IGNORED, Blocks
from app.data.corpus.masking import LONGEST, MaskedBlocks, Masker, check_masking, lengths_of
from app.data.text.token_dropout import TokenDropout
from app.data.text.tokenizer import byte_tokenizer, train_tokenizer, with_mask
from app.tasks.language.attention import model_inputs
from app.tasks.language.both_ways import BothWays
from app.tasks.language.loading import load_language_model
from app.training.scores.text import TokenAccuracy
from recipes import lm

SIZE, BEGIN, END, MASK = 48, 256, 257, 258


class Texts:
    """Documents of random bytes, as Documents has them; of some, the first half is a prompt."""

    def __init__(self, lengths, prompts=False):
        random = np.random.default_rng(0)
        self.ids, self.starts, self.known = [], set(), []
        for length in lengths:
            self.starts.add(len(self.ids))
            self.ids += [*random.integers(0, 200, length - 1).tolist(), END]
            self.known += [not prompts or i >= length // 2 for i in range(length)]
        self.all_supervised, self.fingerprint = not prompts, "texts"

    def __len__(self):
        return len(self.ids)

    def tokens(self, low, high):
        return np.array(self.ids[low:high])

    def supervised(self, low, high):
        return np.array(self.known[low:high])

    def begins(self, low, high):
        return np.array([i in self.starts for i in range(low, high)])


LENGTHS = [5, 1, 130, 2, 60, 60, 300, 1, 1, 90]
KINDS = list(itertools.product([True, False], [False, True]))  # documents apart; with prompts


def masker_of(**settings):
    return Masker(Masking(**{"rate": 0.15, **settings}), with_mask(byte_tokenizer(SIZE)))


def blocks_of(apart=True, prompts=False, lengths=LENGTHS, **settings):
    return MaskedBlocks(Blocks(Texts(lengths, prompts), SIZE, BEGIN, apart), masker_of(**settings))


def seed(number):
    return np.random.Generator(np.random.Philox(key=number))


@pytest.mark.parametrize(("apart", "prompts"), KINDS)
@pytest.mark.parametrize("span", [1.0, 3.8])
@pytest.mark.parametrize("rate", [0.001, 0.15, 0.9])
def test_exactly_so_many_tokens_are_masked_as_the_weights_say(apart, prompts, span, rate):
    found = blocks_of(apart, prompts, rate=rate, span=span)
    for index, weight in enumerate(found.weights.tolist()):
        before = found[index]
        after = found.masker(before, seed(index))
        there = after["targets"] != IGNORED
        assert np.count_nonzero(there) == weight >= 1
        assert np.array_equal(after["targets"][there], before["input_ids"][there])
        assert np.array_equal(after["input_ids"][~there], before["input_ids"][~there])
        assert not there[before["position_ids"] == 0].any()
        assert BEGIN not in after["targets"]


@pytest.mark.parametrize(("apart", "prompts"), KINDS)
def test_every_supervised_token_can_be_masked(apart, prompts):
    """But not a block's first input, what marks documents, and a prompt."""
    found, texts = blocks_of(apart, prompts, rate=0.999), Texts(LENGTHS, prompts)
    wanted = [
        token
        for place, (token, known) in enumerate(zip(texts.ids, texts.known, strict=True))
        if known and (place + 1) % SIZE and place + 1 < len(texts) and (not apart or place + 1 not in texts.starts)
    ]
    rows = [found.masker(found[i], seed(i)) for i in range(len(found))]
    assert [token for row in rows for token in row["targets"].tolist() if token != IGNORED] == wanted


def test_spans_are_contiguous_and_end_with_their_document():
    masker = masker_of(rate=0.3, span=3.0, keep=0.0, random=0.0)
    whole = {"input_ids": np.arange(2000) % 200, "targets": np.arange(1, 2001) % 200, "position_ids": np.arange(2000)}
    lengths = []
    for number in range(30):
        there = masker(whole, seed(number))["targets"] != IGNORED
        edges = np.flatnonzero(np.diff(np.concatenate([[0], there, [0]])))
        lengths += np.diff(edges)[::2].tolist()
    # Spans that touch look like one.
    assert 3 < np.mean(lengths) < 3 / 0.7 + 0.3
    assert min(lengths) == 1 and max(lengths) >= LONGEST
    single = masker_of(rate=0.1, span=1.0)(whole, seed(0))["targets"] != IGNORED
    assert np.count_nonzero(single[1:] & single[:-1]) < 60  # by chance about 20


def test_lengths_of_spans():
    assert lengths_of(1.0).tolist() == [1.0] + [0.0] * (LONGEST - 1)
    for mean in (1.5, 3.0, 3.8, 5.0):
        assert lengths_of(mean) @ np.arange(1, LONGEST + 1) == pytest.approx(mean)
    assert lengths_of(3.8)[1:] / lengths_of(3.8)[:-1] == pytest.approx(0.8, abs=1e-3), "SpanBERT's"


@pytest.mark.parametrize("span", [1.0, 3.0])
def test_shares_of_masks_random_tokens_and_kept_ones(span):
    masker = masker_of(span=span, keep=0.2, random=0.3)
    places = np.arange(100_000)
    row = {"input_ids": np.full(len(places), 7), "targets": np.full(len(places), 7), "position_ids": places}
    found = masker(row, seed(0))
    tokens = found["input_ids"][found["targets"] != IGNORED]
    assert len(tokens) == round(0.15 * (len(places) - 1))
    assert np.mean(tokens == MASK) == pytest.approx(0.5, abs=0.02)
    assert np.mean(tokens == 7) == pytest.approx(0.2, abs=0.02)
    assert set(np.unique(tokens)) == {*range(256), MASK}, "random tokens are no special ones"


def test_masks_follow_from_the_generator_and_those_of_an_evaluation_from_the_block():
    found = blocks_of()
    rows = [found.masker(found[1], seed(number))["targets"].tolist() for number in (3, 3, 4)]
    assert rows[0] == rows[1] != rows[2]
    fixed, other = (MaskedBlocks(found.blocks, found.masker, number) for number in (0, 1))
    assert fixed[1]["targets"].tolist() == fixed[1]["targets"].tolist() != other[1]["targets"].tolist()
    again = pickle.loads(pickle.dumps(fixed.masker))
    assert again(found[1], seed(3))["targets"].tolist() == rows[0]


def test_what_fills_up_the_last_block_is_apart():
    row = blocks_of(apart=False, lengths=[SIZE + 9])[1]
    assert row["position_ids"].tolist() == [*range(9), *range(SIZE - 9)]
    # A block with nothing to mask is left out: one token, before which no other stands.
    assert len(blocks_of(apart=False, lengths=[SIZE + 1])) == 1
    with pytest.raises(UserError, match="nothing to mask"):
        blocks_of(lengths=[1] * 9)


@pytest.mark.parametrize("masked", [True, False])
def test_token_dropout_leaves_special_tokens(masked):
    tokenizer = with_mask(byte_tokenizer(SIZE)) if masked else byte_tokenizer(SIZE)
    ids = np.array([BEGIN, *[7] * 10_000, END, END])
    found = TokenDropout(0.25, tokenizer)({"input_ids": ids, "labels": 3}, seed(0))
    tokens = found["input_ids"]
    assert found["labels"] == 3 and tokens[0] == BEGIN and tokens[-2:].tolist() == [END, END]
    assert np.mean(tokens != 7) == pytest.approx(0.25, abs=0.02)
    assert set(tokens[tokens != 7][1:-2]) == ({MASK} if masked else set(range(256)) - {7})
    assert TokenDropout.of(0.0, tokenizer) is None


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--mask.rate 1", "below 1"),
        ("--mask.rate -0.1", "at least 0"),
        ("--mask.span 6", "from 1 .* to 5"),
        ("--mask.keep 0.6 --mask.random 0.5", "more than all"),
        ("--mask.rate 0.15 --token-dropout 0.1", "one of the two"),
        ("--mask.rate 0.15 --sample x", "leave it out with --mask.rate"),
        ("--mask.rate 0.15 --scratch.shape gpt2", "leave it out or give bert"),
        ("--scratch.shape bert", "give --mask.rate 0.15"),
        ("--mask.span 3", "does nothing without --mask.rate"),
        ("--token-dropout 1", "below 1"),
    ],
)
def test_what_cannot_be_is_refused_before_data_are_read(flags, why, tmp_path):
    with pytest.raises(UserError, match=why):
        lm.main(parse(lm.Config, [*flags.split(), "--run.dir", str(tmp_path), "--data.path", str(tmp_path / "none")]))
    assert check_masking(Masking(rate=0.15, span=3.8), 0.0, "") is None


def test_the_share_of_masked_tokens_that_are_found():
    metric = TokenAccuracy()
    targets = torch.tensor([[1, IGNORED, 2], [IGNORED, 0, 1]])
    metric.update(functional.one_hot(torch.tensor([[1, 1, 0], [0, 0, 2]]), 3).float(), targets)
    assert metric.alone() == {"accuracy": 0.5}


def test_a_tokenizer_without_a_mask_token_is_refused():
    with pytest.raises(UserError, match="has no mask token; give a model that has one"):
        Masker(Masking(rate=0.15), byte_tokenizer(SIZE))
    assert Masker.of(Masking(), byte_tokenizer(SIZE)) is None


SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def encoder(kind, **more):
    from transformers import AutoConfig

    torch.manual_seed(0)
    names = {"distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}}.get(kind, SHAPE)
    config = AutoConfig.for_model(kind, vocab_size=300, max_position_embeddings=64, pad_token_id=1, **names, **more)
    return AutoModelForMaskedLM.from_config(config).eval()


def with_attention(model, asked="auto", packing="documents"):
    return BothWays.of(model, asked, packing, SimpleNamespace(note=lambda **facts: None))


FULL = {"layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(
    ("kind", "more"), [("bert", {}), ("roberta", {}), ("distilbert", {}), ("electra", {}), ("modernbert", FULL)]
)
@pytest.mark.parametrize("packing", ["documents", "concat"])
def test_documents_are_as_if_alone(kind, more, packing):
    """With one stream, this is about what fills up the last block."""
    model, lengths = encoder(kind, **more), [9, 12]
    blocks = MaskedBlocks(Blocks(Texts(lengths), SIZE, BEGIN, packing == "documents"), masker_of(), seed=0)
    inputs = model_inputs(with_attention(model, packing=packing).collate([blocks[0]]))
    targets, ids = inputs.pop("targets"), torch.from_numpy(blocks[0]["input_ids"])
    parts = ids.split([*lengths, SIZE - sum(lengths)])[:2] if packing == "documents" else [ids[: sum(lengths)]]
    with torch.no_grad():
        together = model(**inputs).logits[0, : sum(lengths)]
        alone = torch.cat([model(input_ids=part[None]).logits[0] for part in parts])
    assert torch.allclose(together, alone, atol=2e-6)
    assert (targets != IGNORED).sum() == blocks.weights[0]


def test_models_that_do_not_take_a_mask_of_documents_are_refused():
    with pytest.raises(UserError, match=r"see near tokens only.*use --data\.packing concat"):
        with_attention(encoder("modernbert"))
    with pytest.raises(UserError, match=r"takes no mask .* use --data\.packing concat"):
        with_attention(encoder("bert", attn_implementation="eager"))
    for asked, why in (("varlen", "leave it out with --mask.rate"), ("model", "does not keep documents apart")):
        with pytest.raises(UserError, match=why):
            with_attention(encoder("bert"), asked)
    assert with_attention(encoder("modernbert"), packing="concat").collate


SMALL = ["--scratch.layers", 1, "--scratch.width", 32, "--scratch.heads", 2, "--scratch.tokenizer", "byte"]
SMALL += ["--data.block", 32, "--run.global-batch", 8, "--run.micro-batch", 4, "--run.trackers", "--run.log-every", 1]
SMALL += ["--run.steps", 2, "--mask.rate", 0.15, "--sample-length", 8]


def train(folder, path, *more) -> dict:
    return lm.main(parse(lm.Config, [str(word) for word in (*SMALL, "--data.path", path, "--run.dir", folder, *more)]))


def test_pipelines_fill_in_what_a_finished_model_was_trained_for(rows, tmp_path, capsys):
    """From scratch, trained on, and with adapters."""
    first, path = tmp_path / "first", rows(40)
    found = train(first, path)
    assert set(found) == {"eval/accuracy", "eval/loss", "eval/perplexity", "eval/tokens"}
    said = capsys.readouterr().out
    assert "  masked:\n  | <|begin_of_text|>" in said and "  filled in:\n  | " in said
    assert 'pipeline("fill-mask"' in said
    again = train(tmp_path / "again", path, "--model", first / "model", "--run.eval-first", "true")
    assert again["eval/tokens"] == found["eval/tokens"]
    train(tmp_path / "lora", path, "--model", first / "model", "--lora.rank", 2)
    assert (tmp_path / "lora" / "model" / "adapter_config.json").exists()
    for name in ("first", "again", "lora"):
        fill = pipeline("fill-mask", str(tmp_path / name / "model"))
        assert fill.tokenizer("a")["input_ids"] == [BEGIN, ord("a")], "as training begins documents"
        assert len(fill(f"alpha {fill.tokenizer.mask_token}eta")) == 5
    with pytest.raises(UserError, match=r"sees the tokens on both sides.*--mask\.rate"):
        load_language_model(str(first / "model"), False)


def test_berts_marks_begin_and_end_documents(rows, tmp_path):
    """A tokenizer with [CLS] and [SEP], and without tokens for the beginning and the end of a text."""
    model = encoder("bert")
    tokenizer = train_tokenizer(["alpha beta gamma"] * 9, 270, 64)
    assert tokenizer.eos_token_id is None is tokenizer.bos_token_id
    model.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    train(tmp_path / "run", rows(40), "--model", tmp_path / "bert")
    with pytest.raises(UserError, match="sees the tokens on both sides"):
        train(tmp_path / "next", rows(40), "--model", tmp_path / "bert", "--mask.rate", 0)
