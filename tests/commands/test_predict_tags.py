"""python -m app predict with a tagger: the model's own numbers, in the order of the data, for any lengths."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from transformers import BertConfig, BertForTokenClassification

from app import UserError
from app.__main__ import main as app
from app.commands.predict import tables, tags
from app.data.text.tokenizer import PIECES, train_tokenizer
from app.tasks.pretrained import head_of

pytestmark = pytest.mark.usefixtures("data_cache")
NAMES = ["O", "B-a", "I-a"]
ROWS = [
    (["alpha", "beta", "."], "first"),
    ([], "second"),
    (["x" * 40, "\n", "gammagamma"], "third"),
    (["long", "words"] * 20, "fourth"),
    (["end"], "fifth"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a tagger with random weights that takes 16 sub-words."""
    folder = tmp_path_factory.mktemp("tagger")
    tokenizer = train_tokenizer(["alpha beta gamma long words end ."] * 9, 300, 16, PIECES)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    torch.manual_seed(0)
    size |= {"vocab_size": len(tokenizer), "max_position_embeddings": 16}
    config = BertConfig(initializer_range=1.0, **size, **head_of(NAMES))
    BertForTokenClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def predict(model, folder, *words, name="a.jsonl"):
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"tokens": row, "id": own, "tags": row}) + "\n" for row, own in ROWS))
    file = folder / name
    assert app(["predict", str(model), str(data), "--to", str(file), *words]) == 0
    if name.endswith("parquet"):
        return pq.read_table(file).to_pylist()
    return [json.loads(line) for line in file.read_text().splitlines()]


def alone(model, row):
    """What the model says of the tokens of one short row: the tag's share of each token's first sub-word."""
    tagger = tags.Tagger(str(model))
    found = tagger.tokenizer(row, is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        shares = tagger.model(**found).logits.softmax(-1)[0]
    places = {}
    for place, word in enumerate(found.word_ids()):
        places.setdefault(word, place)
    return [shares[places[word]].tolist() for word in range(len(row))]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_line_for_each_row(model, tmp_path, name, monkeypatch):
    monkeypatch.setattr(tables, "AT_ONCE", 2)
    lines = predict(model, tmp_path, "--keep", "id", "--batch", "2", name=name)
    assert [line["row"] for line in lines] == list(range(len(ROWS)))
    assert [(line["tokens"], line["id"]) for line in lines] == ROWS
    for place in (0, 4):
        shares = alone(model, ROWS[place][0])
        assert lines[place]["probability"] == pytest.approx([max(share) for share in shares], rel=1e-4)
        assert lines[place]["prediction"] == [NAMES[share.index(max(share))] for share in shares]
    assert lines[2]["prediction"][1] is None and lines[2]["probability"][1] is None  # the tokenizer drops a line end
    assert None not in lines[3]["prediction"] and len(lines[3]["prediction"]) == 40  # longer than the model takes


def test_a_line_for_each_token(model, tmp_path):
    by_row = predict(model, tmp_path, "--batch", "3")
    lines = predict(model, tmp_path, "--each", "token", "--keep", "tags", "id", name="b.jsonl")
    tokens = [(row, place, token) for row, (own, _) in enumerate(ROWS) for place, token in enumerate(own)]
    assert [(line["row"], line["place"], line["token"]) for line in lines] == tokens
    assert [(line["tags"], line["id"]) for line in lines] == [(token, ROWS[row][1]) for row, _, token in tokens]
    for line in lines:
        assert line["prediction"] == by_row[line["row"]]["prediction"][line["place"]]
        shares = {name: line[f"p/{name}"] for name in NAMES}
        if line["prediction"]:
            assert sum(shares.values()) == pytest.approx(1) and max(shares, key=shares.get) == line["prediction"]


def test_a_token_of_a_long_row_is_tagged_where_it_is_inside_a_window(model):
    """A token that two windows share has its tag from the one whose ends are further away."""
    tagger = tags.Tagger(str(model))
    row = ["alpha", "beta", "."] * 12  # a sub-word each; the first window has 14 of them, of which 4 are in the second
    found = tagger._tagged([row], 4)[0].shares
    first = tagger.tokenizer(row[:14], is_split_into_words=True, return_tensors="pt")
    assert first["input_ids"].shape == (1, 16)
    with torch.no_grad():
        shares = tagger.model(**first).logits.softmax(-1)[0, 1:].numpy()
    same = [found[place] == pytest.approx(shares[place], rel=1e-4) for place in range(14)]
    assert same == [True] * 12 + [False] * 2


def test_texts_are_cut_into_words_and_signs(model, tmp_path):
    data = tmp_path / "texts.csv"
    data.write_text('text,n\n"alpha, beta!",1\n')
    assert app(["predict", str(model), str(data), "--to", str(tmp_path / "a.jsonl")]) == 0
    assert json.loads((tmp_path / "a.jsonl").read_text())["tokens"] == ["alpha", ",", "beta", "!"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keep", "tokens"], "--keep tokens: the table has a column of its own"),
        (["--text", "tokens", "id"], "a tagger takes one column"),
        (["--text", "none"], "--text none: the data have no such column"),
        (["--overlay"], "--overlay is for segmentation and object-detection"),
    ],
)
def test_what_a_tagger_does_not_take(model, tmp_path, words, said):
    with pytest.raises(UserError, match=said):
        predict(model, tmp_path, *words)


def test_a_missing_token_is_named(model, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"tokens": ["a"]}\n{"tokens": ["a", null]}\n')
    with pytest.raises(UserError, match=r"--text tokens: row 1 .* lacks a token"):
        app(["predict", str(model), str(data), "--to", str(tmp_path / "a.jsonl")])
    assert not (tmp_path / "a.jsonl").exists()
