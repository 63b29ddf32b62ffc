"""Pairs of texts: read from any format, refused by file and row, padded and written as transformers does."""

import gzip
import inspect
import json
import shutil
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import torch
from support.launching import ROOT, scores
from support.tables import refused
from torch.distributed.fsdp._fully_shard import _fsdp_state
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq
from transformers.trainer_pt_utils import LabelSmoother

from app.__main__ import main as command
from app.data.config import PairData
from app.data.corpus.blocks import token_loss
from app.data.tables.builtin_code import split
from app.data.text import pair_text
from app.launching.flags import parse
from app.tasks.language import seq2seq, seq2seq_generation
from app.tasks.language.seq2seq_generation import Generate
from app.training.scores import text as text_scores
from laws.many import load
from laws.small import SMALL

pytestmark = pytest.mark.usefixtures("own_data_cache")
# Signs that end no line, though Python may split there, and quotes.
PAIRS = [(f"{'ein Haus, ' * (i % 4)}\r\u2028 Nr. {i}", f'{"a house, " * (i % 4)} "no." {i}') for i in range(12)]
NAMES = {"source": "de", "target": "en"}


def write(folder, kind, pairs=PAIRS):
    """Write pairs in a format; return what --data.path takes."""
    rows = [dict(zip(("de", "en"), pair, strict=True)) for pair in pairs]
    if kind in ("jsonl", "translation"):
        rows = rows if kind == "jsonl" else [{"translation": row} for row in rows]
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return [folder / "rows.jsonl"]
    for column in ("de", "en"):
        lines = "".join(f"{row[column]}\n" for row in rows).encode()
        file = folder / f"train.tok.{column}"
        if kind == "gz":
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(lines))
        else:
            file.write_bytes(lines)
    whole = {"both": ["train.tok.de", "train.tok.en"], "one": ["train.tok.en"], "name": ["train.tok"]}
    return [folder / name for name in {**whole, "gz": ["train.tok.de.gz"], "pattern": ["train.*"]}.get(kind, [""])]


def read(path, **flags):
    return pair_text.load_pairs(PairData(path=tuple(map(str, path)), **{**NAMES, "holdout": 0.25, **flags}))


def pairs_of(*tables):
    return sorted((row["de"], row["en"]) for table in tables for row in table)


@pytest.mark.parametrize("kind", ["jsonl", "translation", "both", "one", "name", "pattern", "gz", "folder"])
def test_every_format_gives_the_same_pairs(tmp_path, kind):
    tables = read(write(tmp_path, kind))
    assert pairs_of(tables.train, tables.evaluation) == sorted(PAIRS) and len(tables.evaluation) == 3


def test_a_folder_has_splits_and_another_file_is_named_by_one_of_its_columns(tmp_path):
    write(tmp_path, "both")
    for column in ("de", "en"):
        shutil.copy(tmp_path / f"train.tok.{column}", tmp_path / f"val.{column}")
    (tmp_path / "training-notes.md").write_text("no column")
    for tables in (read([tmp_path]), read([tmp_path / "train.tok"], eval_path=str(tmp_path / "val.de"))):
        assert pairs_of(tables.train) == pairs_of(tables.evaluation) == sorted(PAIRS)
    with refused("would be both trained on and evaluated on"):
        read([tmp_path / "train.tok"], eval_path=str(tmp_path / "train.tok.de"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda folder: (folder / "train.tok.en").write_text("1\n2\n"),
            ["train.tok.de has 12", "train.tok.en has 2"],
        ),
        (lambda folder: (folder / "train.tok.de").unlink(), ["train.tok.en", "no other file named train.tok.*"]),
        (lambda folder: (folder / "train.tok.en").rename(folder / "train.tok.fr"), ["no such column", "are de, fr"]),
    ],
)
def test_files_that_do_not_belong_together(tmp_path, change, said):
    path = [tmp_path / "train.tok"]
    write(tmp_path, "both")
    change(tmp_path)
    with refused(*said):
        read([tmp_path / "train.tok.en"] if not (tmp_path / "train.tok.de").exists() else path)


@pytest.mark.parametrize(
    ("pairs", "flags", "said"),
    [
        ([("a", "b"), ("a", " ")], {}, ["--data.target en: row ", "(counted from 0)", "is empty; leave such rows out"]),
        ([("", "b")], {}, ["--data.source de: row ", "is empty"]),
        ([("a", None)], {}, ["--data.target en", "has no text"]),
        ([], {"source": "en"}, ["are both en"]),
        ([], {"max_target": 1}, ["--data.max-target 1 leaves no room"]),
        ([], {"pad_to_multiple_of": 5}, ["must divide --data.max-source 96"]),
        ([], {"source": "text"}, ["--data.source text: no such key", "are de, en"]),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, pairs, flags, said):
    with refused(*said):
        tables = read(write(tmp_path, "jsonl", [*PAIRS, *pairs * 3]), **flags)
        config = PairData(**{**NAMES, **flags})
        tokenizer = pair_text.own_tokenizer(tables.train, config, 300)
        for table in tables.sets.values():
            pair_text.tokenize(table, config, tokenizer)
            pair_text.tokenize(tables.train, config, tokenizer)


def test_text_files_without_columns_in_their_names_are_explained(tmp_path):
    (tmp_path / "de.txt").write_text("a\n")
    with refused("de.txt", "train.de and train.en", "--data.source de"):
        read([tmp_path / "de.txt"])


@pytest.fixture(params=["t5", "bart"])
def parts(request, tmp_path):
    """A model of each shape in float64, its rows and tokenizer."""
    config = PairData(**NAMES, prefix="to English: ", max_source=16, max_target=9)
    tables = read(write(tmp_path, "jsonl"))
    tokenizer = pair_text.own_tokenizer(tables.train, config, 300)
    rows = pair_text.tokenize(tables.train, config, tokenizer)
    torch.manual_seed(0)
    size = seq2seq.PairScratch(shape=request.param, layers=1, width=16, heads=2, dropout=0)
    model = seq2seq.new_model(size, tokenizer, config, seq2seq_generation.Generate()).double().eval()
    return SimpleNamespace(config=config, rows=rows, tokenizer=tokenizer, model=model, table=tables.train)


def test_batches_and_losses_are_those_of_transformers(parts):
    """With the model's own shift, weighted by the tokens of targets, and smoothed as by Trainer."""
    rows, tokenizer, model = parts.rows, parts.tokenizer, parts.model
    collate = pair_text.PairCollate(tokenizer)
    ids = list(range(len(rows)))
    found = collate([rows[i] for i in ids])
    texts = [parts.table[i] for i in ids]
    given = {"truncation": True, "return_attention_mask": True}
    encoded = [
        {
            **tokenizer(f"to English: {text['de']}", max_length=16, **given),
            "labels": tokenizer(text_target=text["en"], max_length=9, **given)["input_ids"],
        }
        for text in texts
    ]
    expected = DataCollatorForSeq2Seq(tokenizer, model)(encoded)
    before = expected.pop("decoder_input_ids")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels=found["labels"]), before)
    assert rows.weights.tolist() == (expected["labels"] != -100).sum(1).tolist()
    assert rows.lengths.tolist() == [len(row["input_ids"]) + len(row["labels"]) for row in encoded]
    assert rows.sources.truncated and rows.targets.truncated
    logits, targets = seq2seq.predict(model, found)
    output = model(**expected)
    torch.testing.assert_close(token_loss(logits, targets).double(), output.loss, rtol=1e-5, atol=0)
    smoothed = LabelSmoother(0.3)(output, found["labels"])
    torch.testing.assert_close(token_loss(logits, targets, 0.3).double(), smoothed, rtol=1e-5, atol=0)


def test_written_texts_do_not_depend_on_the_rows_next_to_them(parts):
    """Each row once, in order, as the model writes it by itself; by beams too."""
    rows, tokenizer, model = parts.rows, parts.tokenizer, parts.model
    collate = pair_text.PairCollate(tokenizer)
    optimizer, batch = torch.optim.Adam(model.parameters(), lr=0.02), collate([rows[i] for i in range(len(rows))])
    for _ in range(60):  # so that it writes different texts
        token_loss(*seq2seq.predict(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    some = pair_text.Evenly(rows, 7)
    assert some.numbers[0] == 0 and some.numbers[-1] > 6 and len(set(some.numbers.tolist())) == 7
    assert [text["target"] for text in some.texts()] == [parts.table[int(i)]["en"] for i in some.numbers]

    def evaluation(model, data, collate, lengths):
        for ids, weight in (([4, 2, 6], 3.0), ([0, 5], 2.0), ([1, 3], 2.0), ([1, 2], 0.0)):
            yield SimpleNamespace(ids=np.array(ids), inputs=collate(data.__getitems__(ids)), weight=weight)

    run = SimpleNamespace(evaluation=evaluation)
    with torch.no_grad():
        for beams in (1, 3):
            found = seq2seq_generation.written(run, model, some, collate, tokenizer, 6, beams)
            for place, number in enumerate(some.numbers):
                ids = torch.from_numpy(rows[number]["input_ids"].astype(np.int64))[None]
                alone = model.generate(ids, max_new_tokens=6, num_beams=beams)
                assert found[place] == tokenizer.decode(alone[0], skip_special_tokens=True).strip()
            assert len(set(found)) > 1


def test_scores_are_sacrebleus_and_are_left_out_without_it(monkeypatch):
    written, truth = ["a house .", "the cat", "x"], ["a house .", "the cat sat there", "y z"]
    found = text_scores.text_scores(written, truth)
    assert found["same"] == pytest.approx(1 / 3) and not text_scores.missing()
    spaced = [f" {text}\n" for text in truth]
    assert text_scores.text_scores(written, spaced)["same"] == text_scores.text_scores(spaced, written)["same"] == 1 / 3
    assert found["chrf"] == sacrebleu.corpus_chrf(written, [truth]).score
    assert found["bleu"] == sacrebleu.corpus_bleu(written, [truth]).score
    monkeypatch.setattr(text_scores, "is_installed", lambda name: False)
    assert text_scores.text_scores(written, truth).keys() == {"same"}
    assert "pip install sacrebleu" in text_scores.missing()


def test_lines_are_split_into_words_and_signs():
    found = split("def of(self, *args):  # so\n    at = self.path(\n        args[0], 1.5\n    )\n\n    return at\n")
    assert found == [
        {"source": "def of self args", "target": "def of ( self , * args ) :"},
        {"source": "at self path args 0 1.5", "target": "at = self . path ( args [ 0 ] , 1.5 )"},
    ]
    for line in ("g(a, b, 'c')", "g(b)", "yield from a", f"g(a{', b' * 11})"):  # a string, short, no signs, long
        assert len(split(f"def f(a):\n    {line}\n")) == 1
    assert len(split(f"def f(a):\n    g(a{', b' * 10})\n")) == 2
    assert split("def f(\n") == []


def test_a_run_its_scores_and_what_its_model_writes(rows, tmp_path, capsys):
    """Twice the same, evaluated again, and the same texts from `predict` by the saved model's own settings."""
    recipe = load(ROOT / "recipes" / "s2s.py")
    words = [*SMALL["s2s"].flags(rows), "--run.steps", 2, "--run.trackers", "--generate.samples", 1]
    words += ["--run.threads", 1, "--data.prefix", "def ", "--run.dir", tmp_path / "run", "--optim.lr", 0.02]
    recipe.main(parse(recipe.Config, list(map(str, words))))
    shown = capsys.readouterr().out
    assert "  written:\n  |" in shown and "  target:\n  | " in shown
    logged = scores(tmp_path / "run")[-1]
    assert {"eval/chrf", "eval/bleu", "eval/same", "eval/loss", "eval/tokens"} <= logged.keys()
    model = tmp_path / "run" / "model"
    network, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    assert network.generation_config.max_new_tokens == 8
    (tmp_path / "new.jsonl").write_text("".join(json.dumps({"source": f"return {i}"}) + "\n" for i in range(5)))
    assert (
        command(["predict", str(tmp_path / "run"), str(tmp_path / "new.jsonl"), "--to", str(tmp_path / "w.jsonl")]) == 0
    )
    (tmp_path / "other.jsonl").write_text('{"text": "return"}\n')
    with refused("the data have no column source, the run's --data.source; they have text: name one with --text"):
        command(["predict", str(tmp_path / "run"), str(tmp_path / "other.jsonl"), "--to", str(tmp_path / "o.jsonl")])
    found = [json.loads(line) for line in (tmp_path / "w.jsonl").read_text().splitlines()]
    assert [line["row"] for line in found] == list(range(5))
    read = tokenizer([f"def return {i}" for i in range(5)], return_tensors="pt", padding=True)
    expected = tokenizer.batch_decode(network.generate(**read), skip_special_tokens=True)
    assert [line["prediction"] for line in found] == [text.strip() for text in expected]


def test_t5_returns_views_that_are_only_read():
    """So FSDP2's warning of them says nothing here; other layers' does."""
    message = "FSDP2-wrapped module ({cls}) returned a view tensor"
    assert message in inspect.getsource(_fsdp_state)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        seq2seq.will_write(SimpleNamespace(generation_config=SimpleNamespace()), PairData(), Generate())
        for kind in ("FSDPT5Block", "FSDPMT5Block", "FSDPMine"):
            warnings.warn(message.format(cls=kind), stacklevel=1)
    assert ["FSDPMine" in str(each.message) for each in said] == [True]


def test_a_model_without_encoder_is_refused(rows, tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_embd=8, n_layer=1, n_head=1).save_pretrained(tmp_path)
    with refused("has no encoder and decoder", "recipes/lm.py"):
        seq2seq.load_pretrained(str(tmp_path))
