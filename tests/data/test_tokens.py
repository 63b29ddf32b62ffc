"""Tokens: trained and pretrained tokenizers, texts tokenized once, and rows padded to batches."""

import json
import pickle
import sys
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from support.tables import labels_of, python, refused, table
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, ByT5Tokenizer, pipeline

from app.checkpoints.export import save_model
from app.data.tables.labels import MULTI, REGRESSION, SINGLE
from app.data.text.encoding import identity, read_texts
from app.data.text.labeled_text import own_tokenizer, tokenize
from app.data.text.tokenizer import check_tokenizer, train_tokenizer
from app.data.text.tokens import PadCollate

pytestmark = pytest.mark.usefixtures("data_cache")


@pytest.fixture(scope="module")
def tokenizer(stdlib):
    return train_tokenizer(read_texts(stdlib[1], ["text"]), 1000, 64)


def test_tokenizer_round_trip(tokenizer, tmp_path):
    """Saved beside a BERT config, whose own tokenizer class AutoTokenizer must not take instead."""
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["def f(x):\n    return x", "Größe 漢字 \U0001f600 CamelCase __init__", "", "word " * 100]
    for arguments in ((texts,), (texts, texts[::-1])):
        encoded = tokenizer(*arguments, truncation=True)
        assert loaded(*arguments, truncation=True) == encoded
        assert max(map(len, encoded["input_ids"])) == 64
        assert tokenizer.unk_token_id not in {token for ids in encoded["input_ids"] for token in ids}
    assert loaded.decode(loaded(texts[1])["input_ids"], skip_special_tokens=True) == texts[1]
    (label,) = pipeline("text-classification", model=str(tmp_path), truncation=True)("word " * 1000)
    assert label["label"] in ("LABEL_0", "LABEL_1")


def test_a_saved_tokenizer_does_not_show_how_it_was_called_last(tokenizer, tmp_path):
    """A run that finds its data in the cache writes the same file as the run that has tokenized them."""
    alone = SimpleNamespace(distributed_type=DistributedType.NO, is_main_process=True)
    used = pickle.loads(pickle.dumps(tokenizer))
    used(["some words", "to cut"], truncation=True, max_length=4, padding="max_length")
    for name, each in (("unused", tokenizer), ("used", used)):
        save_model(alone, torch.nn.Linear(1, 1), tmp_path / name, each)
    first, second = ((tmp_path / name / "tokenizer.json").read_text() for name in ("unused", "used"))
    assert first == second
    assert json.loads(second)["truncation"] is None and json.loads(second)["padding"] is None


def test_tokenizer_marks_pairs_and_keeps_case(tokenizer):
    encoded = tokenizer("a b", "c d")
    assert tokenizer.decode(encoded["input_ids"]).replace(" ", "") == "[CLS]ab[SEP]cd[SEP]"
    first = encoded["input_ids"].index(tokenizer.sep_token_id) + 1
    assert encoded["token_type_ids"] == [0] * first + [1] * (len(encoded["input_ids"]) - first)
    assert tokenizer("Self")["input_ids"] != tokenizer("self")["input_ids"]
    assert [tokenizer.convert_tokens_to_ids(t) for t in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == list(
        range(5)
    )
    with refused("100", "too small"):
        train_tokenizer(["a"], 100, 64)


def test_pretrained_tokenizers_are_made_fit_or_refused(tokenizer):
    other = pickle.loads(pickle.dumps(tokenizer))
    other.pad_token = None
    with refused("--model", "neither a padding nor an end-of-text token"):
        check_tokenizer(other, 32)
    other.eos_token = "[SEP]"
    assert check_tokenizer(other, 32).pad_token_id == tokenizer.sep_token_id
    assert other.model_max_length == 32
    with refused("--data.max-length 512", "32 tokens"):
        check_tokenizer(other, 512)


def test_table_is_what_the_tokenizer_says(stdlib, tokenizer):
    train = stdlib[0].select(range(1500))  # more than are tokenized at once
    tokens = tokenize(train, ["text"], tokenizer, 64, np.arange(len(train)))
    texts = train["text"][:]
    expected = tokenizer(texts, truncation=True, max_length=64)["input_ids"]
    rows = tokens.__getitems__(range(len(tokens)))
    assert [row["input_ids"].tolist() for row in rows] == expected
    assert [int(row["labels"]) for row in rows] == list(range(len(tokens)))
    assert tokens.lengths.dtype == np.int32
    assert tokens.lengths.tolist() == [len(ids) for ids in expected]
    assert tokens.truncated == sum(len(ids) > 64 for ids in tokenizer(texts, verbose=False)["input_ids"]) > 0
    assert tokens[5]["input_ids"].tolist() == expected[5]
    with pytest.raises(IndexError, match="rows -1 to -1"):
        tokens[-1]


def test_pairs_and_other_token_types(tokenizer):
    data = table(a=["one", "two three"] * 700, b=["x " * 50, "y"] * 700)
    tokens = tokenize(data, ["a", "b"], tokenizer, 20)
    expected = tokenizer(data["a"][:], data["b"][:], truncation=True, max_length=20)
    assert [row["input_ids"].tolist() for row in tokens.__getitems__(range(1400))] == expected["input_ids"]
    assert [row["token_type_ids"].tolist() for row in tokens.__getitems__(range(1400))] == expected["token_type_ids"]
    assert tokens.truncated == 700
    python_one = ByT5Tokenizer()
    tokens = tokenize(table(a=["long " * 9, "short", "1234567"]), ["a"], python_one, 8)
    assert [row["input_ids"].tolist() for row in tokens.__getitems__([1, 2])] == python_one(["short", "1234567"])[
        "input_ids"
    ]
    assert tokens.truncated == 1


def test_texts_that_cannot_be_used_say_why(tokenizer):
    data = table(text=["x", None, "z"], other=["a", "b", "c"], number=[0.5, 1.5, 2.5], label=[1, 2, 3])
    for use in (
        lambda columns: tokenize(data, columns, tokenizer, 32),
        lambda columns: list(read_texts(data, columns)),
    ):
        with refused("--data.text text", "row 1", "no text"):
            use(["text"])
        with refused("--data.text txt", "text, other, number, label"):
            use(["txt"])
        with refused("--data.text number", "double"):
            use(["number"])
    with refused("--data.text text", "row 1"):
        tokenize(data.select([2, 1]), ["text"], tokenizer, 32)
    assert len(tokenize(data.select([2, 0]), ["text", "label"], tokenizer, 32)) == 2
    with refused("one text or a pair, not 3"):
        tokenize(data, ["other", "text", "label"], tokenizer, 32)
    with refused("--data.max-length 2", "no room"):
        tokenize(data, ["other"], tokenizer, 2)


SECOND_PROCESS = """
import sys
import app.data.tables.builtin, app.data.text.labeled_text
from app.data.loading import load_tables
from app.data.text.encoding import read_texts
from app.data.text.labeled_text import tokenize
from app.data.text.tokenizer import train_tokenizer
import datasets
from transformers import AutoTokenizer
def again(*arguments, **keywords):
    raise AssertionError("done again")
app.data.tables.builtin.stdlib_rows = app.data.text.labeled_text.Encoder.__call__ = again
from app.data.config import TextData
tables = load_tables(TextData())
train, evaluation = tables.train, tables.evaluation
trained = train_tokenizer(read_texts(evaluation, ["text"]), 1000, 64)
loaded = AutoTokenizer.from_pretrained(sys.argv[1])
memory = datasets.Dataset.from_dict({"text": ["in", "memory"]})
for tokenizer in (trained, loaded):
    print(*(tokenize(table, ["text"], tokenizer, 64).path for table in (train, memory)))
"""


def test_a_second_process_parses_and_tokenizes_nothing(stdlib, tokenizer, tmp_path):
    """Also with a tokenizer trained there, or saved and loaded: the same content is the same key."""
    tokenizer.save_pretrained(tmp_path)
    tables = (stdlib[0], table(text=["in", "memory"]))
    paths = [tokenize(data, ["text"], tokenizer, 64).path for data in tables]
    times = [path.stat().st_mtime_ns for path in paths]
    code = SECOND_PROCESS.replace("sys.argv[1]", repr(str(tmp_path)))
    assert python(code).splitlines() == [" ".join(map(str, paths))] * 2
    assert [path.stat().st_mtime_ns for path in paths] == times


def test_another_text_tokenizer_or_length_is_another_key(tokenizer):
    before = identity(tokenizer)
    tokenizer("calls change a tokenizer", truncation=True, max_length=3, padding="max_length")
    assert identity(tokenizer) == before
    data = table(text=["some text", "and more"], pair=["some", "other"])
    other = train_tokenizer(["quite other words, quite other merges"] * 3, 300, 64)
    left = pickle.loads(pickle.dumps(tokenizer))
    left.truncation_side = "left"
    paths = [
        tokenize(data, ["text"], tokenizer, 64).path,
        tokenize(data, ["text"], tokenizer, 5).path,
        tokenize(data, ["text"], other, 64).path,
        tokenize(data, ["text"], left, 64).path,
        tokenize(data, ["pair"], tokenizer, 64).path,
        tokenize(data, ["text", "pair"], tokenizer, 64).path,
        tokenize(data.select([1, 0]), ["text"], tokenizer, 64).path,
        tokenize(table(text=["some text", "and less"]), ["text"], tokenizer, 64).path,
    ]
    assert len(set(paths)) == len(paths)


def test_only_the_main_process_shows_progress(tokenizer, monkeypatch, capfd):
    """And only on a terminal: in a log a bar is a mess."""
    datasets.enable_progress_bars()
    try:
        tokenize(table(text=["in", "a", "log"]), ["text"], tokenizer, 64)
        assert capfd.readouterr().err == ""
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("RANK", "1")
        tokenize(table(text=["on", "rank", "one"]), ["text"], tokenizer, 64)
        assert capfd.readouterr().err == ""
        monkeypatch.setenv("RANK", "0")
        tokenize(table(text=["on", "rank", "nought"]), ["text"], tokenizer, 64)
        assert "Tokenizing" in capfd.readouterr().err
        tokenize(table(text=["on", "rank", "nought"]), ["text"], tokenizer, 64)
        assert capfd.readouterr().err == ""
    finally:
        datasets.disable_progress_bars()


@pytest.mark.long
def test_workers_get_the_path_and_not_the_tokens(stdlib, tokenizer):
    tokens = tokenize(stdlib[0], ["text"], tokenizer, 64, np.arange(len(stdlib[0])))
    sent = pickle.dumps(tokens)
    assert len(sent) < tokens.labels.nbytes + 1000
    loader = DataLoader(
        tokens,
        batch_size=32,
        sampler=range(100, 228),
        collate_fn=PadCollate.of(tokenizer),
        num_workers=1,
        multiprocessing_context="spawn",
    )
    assert torch.cat([batch["labels"] for batch in loader]).tolist() == list(range(100, 228))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("columns", [["a"], ["a", "b"]])
@pytest.mark.parametrize("multiple", [1, 8])
def test_collate_pads_as_the_tokenizer_does(tokenizer, side, columns, multiple):
    tokenizer = pickle.loads(pickle.dumps(tokenizer))
    tokenizer.padding_side = side
    data = table(a=["one", "two words", ""], b=["several words more", "x", "y"])
    rows = tokenize(data, columns, tokenizer, 32, np.array([2, 0, 1])).__getitems__([2, 0, 1])
    batch = PadCollate.of(tokenizer, multiple)(rows)
    encoded = tokenizer(*(data[name][:] for name in columns))
    expected = tokenizer.pad(
        {name: [values[i] for i in (2, 0, 1)] for name, values in encoded.items()},
        return_tensors="pt",
        pad_to_multiple_of=multiple,
    )
    assert batch.pop("labels").tolist() == [1, 2, 0]
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        assert batch[name].dtype == values.dtype
        assert torch.equal(batch[name], values), name


@pytest.mark.parametrize("problem", [SINGLE, MULTI, REGRESSION])
def test_batches_fit_the_losses_of_transformers(tokenizer, problem):
    values = {SINGLE: ["a", "b", "c"], MULTI: [["a"], ["b", "c"], []], REGRESSION: [0.5, 1.5, 2.5]}[problem]
    data = table(text=["one", "two words", "three"], label=values)
    labels = labels_of(data)
    rows = tokenize(data, ["text"], tokenizer, 32, labels.train_values).__getitems__(range(3))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        problem_type=labels.problem,
        num_labels=len(labels.names),
    )
    loss = BertForSequenceClassification(config)(**PadCollate.of(tokenizer)(rows)).loss
    assert loss.ndim == 0
    assert torch.isfinite(loss)


def test_flags_load_no_library():
    code = "import sys, app.data.config; print(*{'torch', 'datasets', 'transformers', 'numpy'} & set(sys.modules))"
    assert python(code).strip() == ""


def test_own_tokenizer_is_trained_once(stdlib, monkeypatch):
    """A second process or run finds what the first one trained, and it is the same."""
    first = own_tokenizer(stdlib[1], ["text"], 700, 64)
    monkeypatch.setattr("app.data.text.labeled_text.train_tokenizer", None)
    again = own_tokenizer(stdlib[1], ["text"], 700, 64)
    assert again.get_vocab() == first.get_vocab() and len(first) == 700
    assert again("def f(x):", "x").input_ids == first("def f(x):", "x").input_ids
    with pytest.raises(TypeError):
        own_tokenizer(stdlib[1], ["text"], 701, 64)
