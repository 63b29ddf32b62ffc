"""Data: loading tables, reading labels, tokenizing once, padding. Nothing here needs a network."""

import gzip
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import httpx
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, ByT5Tokenizer, pipeline

from app.data.builtin import functions_of, stdlib_rows
from app.data.cache import using_cache
from app.data.config import TextData
from app.data.sources import hold_out
from app.data.text import (
    PadCollate,
    _identity,
    check_tokenizer,
    load_table,
    own_tokenizer,
    read_labels,
    read_texts,
    tokenize,
    train_tokenizer,
)
from app.errors import UserError

ROWS = [("ham", "good morning"), ("spam", 'win "cash" now'), ("ham", "see you at NA"), ("spam", "12 prizes")]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Give the tests a cache of their own, and no progress bars."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder))
        patch.setenv("HF_HOME", str(folder / "home"))
        datasets.disable_progress_bars()
        yield folder
        datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def stdlib(cache):
    return load_table("builtin:stdlib")


@pytest.fixture(scope="module")
def tokenizer(stdlib):
    return train_tokenizer(read_texts(stdlib[1], ["text"]), 1000, 64)


def table(**columns):
    return datasets.Dataset.from_dict(columns)


def refused(*words):
    """Expect a UserError whose message has all the words."""
    return pytest.raises(UserError, match="(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words))


def python(code: str, **env: str) -> str:
    """Run code in a process of its own, as a session of its own would."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Tables


def write(folder: Path, kind: str) -> tuple[str, tuple[str, ...]]:
    """Write ROWS as a file or folder of a kind; return its path and the columns that it does not name."""
    file, rows = folder / f"rows.{kind}", [dict(zip(("label", "text"), row, strict=True)) for row in ROWS]
    columns = ()
    if kind.startswith("csv"):
        quoted = [f'{label},"{text.replace(chr(34), chr(34) * 2)}"\n' for label, text in ROWS]
        text = "\ufefflabel,text\n" + "".join(quoted)  # as a spreadsheet writes it
        if kind == "csv.gz":
            file.write_bytes(gzip.compress(text.encode()))
        else:
            file.write_text(text, encoding="utf-8")
    elif kind == "tsv":
        file.write_text("".join(f"{label}\t{text}\n" for label, text in ROWS))
        columns = ("label", "text")
    elif kind == "json":
        file.write_text(json.dumps(rows))
    elif kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    elif kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(file)
    elif kind == "hub":
        (file / "data").mkdir(parents=True)
        datasets.Dataset.from_list(rows).to_parquet(file / "data" / "train-00000-of-00001.parquet")
    return str(file), columns


KINDS = ["csv", "csv.gz", "tsv", "json", "jsonl", "parquet", "saved", "hub"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    path, columns = write(tmp_path, kind)
    train, evaluation = load_table(path, columns=columns, holdout=0.25)
    assert (len(train), len(evaluation)) == (3, 1)
    rows = [(row["label"], row["text"]) for part in (train, evaluation) for row in part]
    assert sorted(rows) == sorted(ROWS)


@pytest.mark.parametrize("folder", [False, True])
def test_files_changed_on_disk_are_read_again(tmp_path, folder):
    file = tmp_path / "rows.csv"
    keys = []
    for words in (["one", "two"], ["three", "four"]):
        file.write_text("label,text\n" + "".join(f"{word[0]},{word}\n" for word in words))
        os.utime(file, (len(keys), len(keys)))
        parts = load_table(str(tmp_path if folder else file))
        assert {row["text"] for part in parts for row in part} == set(words)
        keys.append(parts[0]._fingerprint)
    assert keys[0] != keys[1]


def test_several_files_patterns_and_a_file_to_evaluate_on(tmp_path):
    for name in ("a", "b", "dev"):
        (tmp_path / f"{name}.csv").write_text(f"label,text\n0,{name} first\n1,{name} second\n")
    both = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    for path in (both, str(tmp_path / "[ab].csv")):
        train, evaluation = load_table(path, eval_path=str(tmp_path / "dev.csv"))
        assert train["text"][:] == ["a first", "a second", "b first", "b second"]
        assert evaluation["text"][:] == ["dev first", "dev second"]


def test_a_hub_folder_with_configurations_and_splits(tmp_path):
    for config, size in (("big", 20), ("small", 5)):
        for split in ("train", "validation", "test"):
            rows = {"text": [f"{config} {split} {i}" for i in range(size)], "label": [i % 2 for i in range(size)]}
            features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]))
            file = tmp_path / config / f"{split}-00000-of-00001.parquet"
            datasets.Dataset.from_dict(rows, features=features).to_parquet(file)
    configs = [
        f"- config_name: {c}\n  data_files:\n"
        + "".join(f"  - split: {s}\n    path: {c}/{s}-*\n" for s in ("train", "validation", "test"))
        for c in ("big", "small")
    ]
    (tmp_path / "README.md").write_text("---\nconfigs:\n" + "".join(configs) + "---\n# Yes and no\n")
    path = str(tmp_path)
    train, evaluation = load_table(path, name="small")
    assert (len(train), evaluation["text"][0]) == (5, "small validation 0")
    assert read_labels(train, evaluation, TextData()).names == ["no", "yes"]
    train, evaluation = load_table(path, name="big", split="train[:10%]", eval_split="test")
    assert (len(train), len(evaluation), evaluation["text"][0]) == (2, 20, "big test 0")
    for unused in ("validation", "test"):
        assert load_table(str(tmp_path / "small"))[1]["text"][0] == f"small {unused} 0"
        (tmp_path / "small" / f"{unused}-00000-of-00001.parquet").unlink()
    assert len(load_table(str(tmp_path / "small"))[1]) == 1
    with refused("big", "small", "--data.name"):
        load_table(path)
    with refused("huge", "big", "small", "--data.name"):
        load_table(path, name="huge")
    with refused("no split dev", "train, validation, test", "--data.split"):
        load_table(path, name="big", eval_split="dev")


def test_csv_keeps_words_and_numbers_apart(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(
        "word,code,count,score,year,odd\nNA,007,1,1.5,+1999,1\nnull,12,-2,1e3,2001,nan\nNone,3,3,,2020,inf\n"
    )
    train, _ = load_table(str(file), holdout=0.01, eval_path=str(file))
    assert train.to_dict() == {
        "word": ["NA", "null", "None"],
        "code": ["007", "12", "3"],
        "count": [1, -2, 3],
        "score": [1.5, 1000.0, None],
        "year": ["+1999", "2001", "2020"],
        "odd": ["1", "nan", "inf"],
    }


def test_quotes_in_tsv_are_plain_characters(tmp_path):
    (tmp_path / "rows.tsv").write_text('label\ttext\na\t"open\nb\tplain\nc\t"quoted"\n')
    train, evaluation = load_table(str(tmp_path / "rows.tsv"), holdout=0.3)
    assert sorted([*train["text"], *evaluation["text"]]) == ['"open', '"quoted"', "plain"]


@pytest.mark.parametrize(
    ("files", "path", "arguments", "words"),
    [
        (dict.fromkeys("abcdefghij", "") | {"train.csv": ""}, "trian.csv", {}, ["trian.csv", "no such", "train.csv"]),
        ({"train.csv": "a"}, "no/folder/there/x.csv", {}, ["no such file", "train.csv"]),
        ({}, "x.csv", {}, ["no such file", "is empty"]),
        ({"a.csv": "a"}, "b-*.csv", {}, ["b-*.csv", "no file has such a name", "a.csv"]),
        ({"a.csv": ""}, "a.csv", {}, ["a.csv", "is empty"]),
        ({"a.csv": "label,text\n"}, "a.csv", {}, ["is empty"]),
        ({"a.jsonl": ""}, "a.jsonl", {}, ["a.jsonl", "is empty"]),
        ({"a.json": "[]"}, "a.json", {}, ["a.json", "is empty"]),
        ({"a.docx": "x"}, "a.docx", {}, [".docx", "csv, tsv, json, jsonl and parquet"]),
        ({"a.csv": "x,y\n1,2,3\n"}, "a.csv", {}, ["a.csv", "Expected 2 fields in line 2, saw 3"]),
        ({"a.csv": "x,y\n1,2\n1,2,3\n"}, "a.csv", {}, ["a.csv", "Expected 2 fields in line 3, saw 3"]),
        ({"a.csv": "1,2,3\n"}, "a.csv", {"columns": ["x", "y"]}, ["--data.columns has 2 names (x y)", "3 columns"]),
        ({"a.csv": "x,y\n1,2\n"}, "a.csv", {"columns": ["x", "y"]}, ["--data.columns", "leave out"]),
        ({"a.csv": "x,x\n1,2\n"}, "a.csv", {}, ["two columns named x", "--data.columns"]),
        ({"a.csv": b"x,y\ncaf\xe9,2\n"}, "a.csv", {}, ["a.csv", "UTF-8", "iconv"]),
        ({"a.jsonl": "{broken\n"}, "a.jsonl", {}, ["a.jsonl", "cannot be read"]),
        ({"a.parquet": "x"}, "a.parquet", {}, ["a.parquet", "file size is 1 bytes"]),
        ({"a.jsonl": '{"x": 1}\n'}, "a.jsonl", {"columns": ["x"]}, ["--data.columns", "names of its own"]),
        ({"a.csv": "x\n1\n2\n"}, "a.csv", {"eval_split": "test"}, ["no split test", "has train"]),
        ({"a.csv": "x\n1\n2\n"}, "a.csv", {"split": "test"}, ["no split test", "has train"]),
        ({"a.csv": "x\n1\n2\n"}, "a.csv", {"holdout": 1.5}, ["--data.holdout 1.5", "between 0 and 1"]),
        ({"a.csv": "x\n1\n"}, "a.csv", {}, ["1 rows", "--data.eval-path"]),
        ({"a.csv": "x\n1\n", "b.json": "[]"}, ["a.csv", "b.json"], {}, ["several formats", ".csv, .json"]),
        ({"a.csv": "x\n1\n", "b.csv": "y\n1\n"}, ["a.csv", "b.csv"], {}, ["a.csv has columns x", "b.csv y"]),
        ({"d/x.txt~": "x"}, "d", {}, ["--data.path", "data files"]),
        ({"d/e/x.csv": "x"}, "d/e/f/g", {}, ["no such file or folder", "x.csv"]),
    ],
)
def test_a_path_that_cannot_be_read_says_why(tmp_path, monkeypatch, files, path, arguments, words):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(*words):
        load_table(path, **arguments)


def test_unknown_builtin_data_and_splits_name_those_there_are():
    with refused("builtin:sdtlib", "builtin:stdlib"):
        load_table("builtin:sdtlib")
    with refused("no split test", "has train"):
        load_table("builtin:stdlib", eval_split="test")
    with refused("--data.split train[:5]", "no slices"):
        load_table("builtin:stdlib", split="train[:5]")


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch):
    def unreachable(*args, **kwargs):
        raise httpx.ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with refused("nyu-mll/glue", "hf download nyu-mll/glue --repo-type dataset", "HF_HUB_OFFLINE=1"):
        load_table("nyu-mll/glue", name="sst2")


def test_offline_a_hub_set_comes_from_the_cache_or_is_refused(tmp_path, cache):
    """A warm cache is what an earlier download leaves: here a folder's, under the name of a Hub set."""
    path, _ = write(tmp_path, "hub")
    load_table(shutil.move(path, tmp_path / "spam"))
    (prepared,) = (file.parent for file in cache.glob("spam/default/0.0.0/*/dataset_info.json"))
    shutil.copytree(prepared, tmp_path / "warm" / "someone___spam" / "default" / "0.0.0" / prepared.name)
    code = """
from app.data.sources import load_table
from app.data.sources import hold_out
from app.errors import UserError
print(sum(map(len, load_table("someone/spam"))))
try:
    load_table("nyu-mll/glue")
except UserError as error:
    print(error)
"""
    lines = python(code, HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=str(tmp_path / "warm")).splitlines()
    assert lines[0] == "4"
    assert "hf download nyu-mll/glue" in lines[1]


def test_holdout_is_disjoint_stable_and_of_the_right_size():
    data = table(n=list(range(1000)))
    train, evaluation = hold_out(data, 0.1, seed=0)
    assert len(evaluation) == 100
    assert evaluation["n"][:] == sorted(evaluation["n"])
    assert sorted([*train["n"], *evaluation["n"]]) == list(range(1000))
    # Pinned: a run that is resumed by a later version must hold out the same rows.
    assert evaluation["n"][:5] == [1, 6, 32, 44, 58]
    _, other = hold_out(data, 0.1, seed=1)
    assert len(set(other["n"]) & set(evaluation["n"])) < 30  # 10 by chance
    assert len({train._fingerprint, evaluation._fingerprint, other._fingerprint}) == 3
    assert [len(part) for part in hold_out(table(n=[1, 2, 3]), 0.01, seed=0)] == [2, 1]
    assert [len(part) for part in hold_out(table(n=[1, 2, 3]), 0.99, seed=0)] == [1, 2]


# builtin:stdlib


def test_stdlib_has_thousands_of_functions_of_twelve_packages(stdlib):
    train, evaluation = stdlib
    assert len(train) + len(evaluation) > 3000
    assert abs(len(evaluation) - 0.1 * (len(train) + len(evaluation))) <= 0.5
    assert len(set(train["label"])) == 12
    assert set(evaluation["label"]) <= set(train["label"])
    texts = [*train["text"], *evaluation["text"]]
    assert len(set(texts)) == len(texts)
    assert all(text.count("\n") >= 2 for text in texts)
    assert all(re.match(r"(async )?def ", text) for text in texts)


def test_functions_of_a_file_are_the_outermost_ones_dedented(tmp_path):
    file = tmp_path / "code.py"
    file.write_text(
        '''# coding: latin-1\n\x0cdef short():
    pass

if True:
    class A:
        @property
        def method(self):
            """Caf\xe9
left of it"""
            def inner():
                a = 1
                return a

            return inner
try:
    pass
except ImportError:
    async def last():
        a = 1
        return a
''',
        encoding="latin-1",
    )
    method = (
        'def method(self):\n    """Caf\xe9\nleft of it"""\n'
        "    def inner():\n        a = 1\n        return a\n\n    return inner"
    )
    assert list(functions_of(file)) == [method, "async def last():\n    a = 1\n    return a"]
    file.write_text("print 'python 2'\n")
    assert list(functions_of(file)) == []


def test_stdlib_takes_the_largest_packages_and_leaves_tests_out(tmp_path):
    def package(path: str, functions: int, word: str):
        file = tmp_path / path / "code.py"
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"def {word}{i}():\n    a = {i}\n    return a\n\n" for i in range(functions)))

    for i in range(14):
        package(f"p{i:02}", 20 - min(i, 11), f"f{i}_")
    package("p13/test", 99, "t")
    package("site-packages/p13", 99, "s")
    package("copy", 50, "f0_")  # comes before p00, and has 20 of its functions
    rows = list(stdlib_rows(str(tmp_path)))
    labels = [row["label"] for row in rows]
    assert sorted(set(labels)) == ["copy", *(f"p{i:02}" for i in range(1, 12))]
    assert labels == sorted(labels)
    assert labels.count("copy") == 50


# Labels


def labels_of(train, evaluation=None, label=("label",), problem="auto"):
    config = TextData(label=label, problem=problem)
    return read_labels(train, train if evaluation is None else evaluation, config)


SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
CLASS = datasets.ClassLabel(names=["z", "a", "m"])


@pytest.mark.parametrize(
    ("values", "feature", "problem", "names", "expected"),
    [
        (["b", "c", "a", "b"], None, SINGLE, ["a", "b", "c"], [1, 2, 0, 1]),
        ([4, 1, 3, 1], None, SINGLE, ["1", "3", "4"], [2, 0, 1, 0]),
        ([10, 9, -1], None, SINGLE, ["-1", "9", "10"], [2, 1, 0]),
        ([True, False], None, SINGLE, ["False", "True"], [1, 0]),
        ([2, 0, 2], CLASS, SINGLE, ["z", "a", "m"], [2, 0, 2]),
        ([1.0, 3.0], None, SINGLE, ["1", "3"], [0, 1]),
        ([1.5, -2.0], None, REGRESSION, ["label"], [1.5, -2.0]),
        ([3, 1], None, REGRESSION, ["label"], [3.0, 1.0]),
        ([["b"], [], ["a", "b"]], None, MULTI, ["a", "b"], [[0, 1], [0, 0], [1, 1]]),
        ([[7], [], [5, 7]], None, MULTI, ["5", "7"], [[0, 1], [0, 0], [1, 1]]),
        ([[0, 1], [1]], None, MULTI, ["0", "1"], [[1, 1], [0, 1]]),
        ([[2], [0, 1]], datasets.List(CLASS), MULTI, ["z", "a", "m"], [[0, 0, 1], [1, 1, 0]]),
        ([[0, 1, 1], [1, 0, 0]], None, MULTI, ["0", "1", "2"], [[0, 1, 1], [1, 0, 0]]),
        ([[0, 1], [1, 0]], None, MULTI, ["0", "1"], [[0, 1], [1, 0]]),
        ([[0], [1]], None, MULTI, ["0", "1"], [[1, 0], [0, 1]]),
        ([[0.0, 1.0], [1.0, 0.0]], None, MULTI, ["0", "1"], [[0, 1], [1, 0]]),
    ],
)
def test_labels_of_every_kind(values, feature, problem, names, expected):
    data = table(label=values)
    if feature is not None:
        data = data.cast_column("label", feature)
    plain = {float: REGRESSION, list: MULTI}.get(type(values[0]), SINGLE)
    labels = labels_of(data, problem="auto" if problem == plain else problem)
    assert (labels.problem, labels.names) == (problem, names)
    assert labels.train_values.tolist() == labels.eval_values.tolist() == expected
    assert labels.train_values.dtype == (np.int64 if problem == SINGLE else np.float32)


def test_several_label_columns():
    data = table(a=[0, 1, 1], b=[True, False, True], c=[0.0, 0.5, 1.0])
    labels = labels_of(data, label=("b", "a"))
    assert (labels.problem, labels.names) == (MULTI, ["b", "a"])
    assert labels.eval_values.tolist() == [[1, 0], [0, 1], [1, 1]]
    labels = labels_of(data, label=("a", "c"), problem=REGRESSION)
    assert labels.train_values.tolist() == [[0, 0], [1, 0.5], [1, 1]]
    assert labels.train_values.dtype == np.float32


@pytest.mark.parametrize(
    ("values", "other", "problem", "words"),
    [
        (["a", "b"], ["a", "b", "d", "e"], "auto", ["row 2", "evaluation", "'d'", "no training row"]),
        ([1, 2], [1, 2, 0], "auto", ["row 2", "evaluation", "0"]),
        ([["a"], ["b"]], [["a"], [], ["a", "x"]], "auto", ["row 2", "'x'"]),
        ([1, 2], ["a", "b"], "auto", ["int64 in the training data", "string in the evaluation"]),
        (["a", None, "b"], None, "auto", ["row 1", "no label"]),
        ([0.5, float("nan")], None, "auto", ["row 1", "no label"]),
        ([0.5, float("inf")], None, "auto", ["row 1", "inf"]),
        ([["a"], ["b", None]], None, "auto", ["row 1", "no label"]),
        ([["a"], [], None], None, "auto", ["row 2", "no label"]),
        (["a", "a"], None, "auto", ["all training rows have the label a", "two"]),
        ([[], []], None, "auto", ["--data.label label"]),
        ([0.5, 1.0], None, SINGLE, ["row 0", "0.5", "--data.problem regression"]),
        (["a", "b"], None, REGRESSION, ["--data.problem regression", "string", SINGLE]),
        ([1, 2], None, MULTI, ["--data.problem multi", "int64", "single_label_classification or regression"]),
        ([{"x": 1}], None, "auto", ["--data.label label holds struct", "labels are"]),
        ([[0.5, 0.5]], None, "auto", ["lists of double", "0 and 1"]),
        ([[0, 1, 1], [0, 0, 1]], [[0, 1, 1], [1]], "auto", ["row 1", "1 values", "3"]),
    ],
)
def test_labels_that_cannot_be_used_say_why(values, other, problem, words):
    with refused(*words):
        labels_of(table(label=values), None if other is None else table(label=other), problem=problem)


def test_label_columns_that_cannot_be_used_say_why():
    data = table(text=["x", "y"], good=[0, 1], bad=[0, 2])
    with refused("--data.label label", "no such column", "text, good, bad", "--data.columns"):
        labels_of(data)
    with refused("--data.label bad", "row 1", "2"):
        labels_of(data, label=("good", "bad"))
    with refused("--data.label text", "string", "no number"):
        labels_of(data, label=("good", "text"))
    with refused("--data.label names no column"):
        labels_of(data, label=())
    with refused("column good twice"):
        labels_of(data, label=("good", "good"))
    hidden = table(label=[0, 1, -1]).cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    with refused("row 2", "no label"):
        labels_of(hidden)


def test_rows_are_named_as_the_whole_table_counts_them():
    values = ["a", "b"] * 20 + ["rare"]
    train, evaluation = (table(label=values).select(rows) for rows in (range(40), [3, 40]))
    with refused("row 40", "'rare'"):
        labels_of(train, evaluation)


# Tokens


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
import app.data.builtin, app.data.text
from app.data.text import load_table, read_texts, tokenize, train_tokenizer
import datasets
from transformers import AutoTokenizer
def again(*arguments, **keywords):
    raise AssertionError("done again")
app.data.builtin.stdlib_rows = app.data.text._encode = again
train, evaluation = load_table("builtin:stdlib")
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
    before = _identity(tokenizer)
    tokenizer("calls change a tokenizer", truncation=True, max_length=3, padding="max_length")
    assert _identity(tokenizer) == before
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


def test_a_cache_that_cannot_be_written_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with refused("No space left", str(tmp_path), "HF_DATASETS_CACHE"), using_cache():
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("while writing") from error


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
    monkeypatch.setattr("app.data.text.train_tokenizer", None)
    again = own_tokenizer(stdlib[1], ["text"], 700, 64)
    assert again.get_vocab() == first.get_vocab() and len(first) == 700
    assert again("def f(x):", "x").input_ids == first("def f(x):", "x").input_ids
    with pytest.raises(TypeError):
        own_tokenizer(stdlib[1], ["text"], 701, 64)
