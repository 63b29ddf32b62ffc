"""Tables: files, folders in Hub layout, and what cannot be read. Nothing here needs a network."""

import gzip
import json
import shutil
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from support.tables import load, python, refused, table, texts_of, write_card

from app import UserError
from app.data.config import TextData
from app.data.loading import open_source
from app.data.tables.columns import check_columns
from app.data.tables.labels import read_labels

pytestmark = pytest.mark.usefixtures("own_data_cache")


ROWS = [("ham", "good morning"), ("spam", 'win "cash" now'), ("ham", "see you at NA"), ("spam", "12 prizes")]


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
    train, evaluation = load(path, columns=columns, holdout=0.25)
    assert (len(train), len(evaluation)) == (3, 1)
    rows = [(row["label"], row["text"]) for part in (train, evaluation) for row in part]
    assert sorted(rows) == sorted(ROWS)


def test_several_files_patterns_and_a_file_to_evaluate_on(tmp_path):
    for name in ("a", "b", "dev"):
        (tmp_path / f"{name}.csv").write_text(f"label,text\n0,{name} first\n1,{name} second\n")
    both = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    for path in (both, str(tmp_path / "[ab].csv")):
        train, evaluation = load(path, eval_path=str(tmp_path / "dev.csv"))
        assert train["text"][:] == ["a first", "a second", "b first", "b second"]
        assert evaluation["text"][:] == ["dev first", "dev second"]


def test_data_to_evaluate_on_that_are_trained_on_are_refused(tmp_path, monkeypatch):
    """However they are named; slices apart are fine."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("label,text\n" + "".join(f"{i % 2},{name} {i}\n" for i in range(20)))
    (tmp_path / "link.csv").symlink_to(tmp_path / "a.csv")
    write_card(tmp_path / "card")
    monkeypatch.chdir(tmp_path)
    same = [("a.csv", tmp_path / "a.csv"), ("a.csv", "link.csv"), ("./a.csv", "a.csv"), (["a.csv", "b.csv"], "b.csv")]
    for path, eval_path in [*same, ("a.csv", "[a].csv"), ("builtin:stdlib", "builtin:stdlib")]:
        with refused("--data.eval-path", "trained on and evaluated", "--data.eval-split"):
            load(path, eval_path=str(eval_path))
    with refused("--data.eval-path", "rows 0 to 8 of train"):
        load("card", name="one", eval_path=str(tmp_path / "card"))
    with refused("rows 5 to 9 of train"):
        load("a.csv", split="train[:10]", eval_path="link.csv", eval_split="train[5:]")
    train, evaluation = load("a.csv", split="train[:10]", eval_path="link.csv", eval_split="train[10:]")
    assert not set(train["text"]) & set(evaluation["text"]) and len(evaluation) == 10


HEADERS = {
    "named": ("Label,Body", [f"{'spam' if i % 3 else 'ham'},text {i}" for i in range(9)], ("label", "text")),
    "numbers": ("target,body", [f"{i % 2},text {i}" for i in range(2)], ("label", "text")),
    "classes": ("v1,v2", [f"{'spam' if i % 3 else 'ham'},text {i}" for i in range(30)], ("label", "text")),
}


@pytest.mark.parametrize("case", HEADERS)
def test_columns_of_a_file_that_has_a_header_are_refused(tmp_path, case):
    """The header would become a row; the same rows without it are read, also when a class begins them."""
    header, rows, columns = HEADERS[case]
    file = tmp_path / "rows.csv"
    file.write_text("\n".join([header, *rows]) + "\n")
    with refused("--data.columns", "rows.csv", "header", header.split(",")[0], "leave out"):
        load(str(file), columns=columns)
    file.write_text("\n".join(rows) + "\n")
    parts = load(str(file), columns=columns)
    assert sum(map(len, parts)) == len(rows)


def test_first_rows_that_are_no_header(tmp_path):
    """Of a class of their own among few rows, with a number, a missing value, a class of two words, or a sentence."""
    file = tmp_path / "rows.csv"
    others = [f"{'spam' if i % 3 else 'ham'},text {i}" for i in range(30)]
    firsts = ["7,a text", ",a text", "very rare,a", "phishing,click here to win now"]
    for rows in (["rare,a text", *others[:5]], *([first, *others] for first in firsts)):
        file.write_text("\n".join(rows) + "\n")
        assert sum(map(len, load(str(file), columns=("label", "text")))) == len(rows)


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
    train, evaluation = load(path, name="small")
    assert (len(train), evaluation["text"][0]) == (5, "small validation 0")
    assert read_labels(train, evaluation, TextData()).names == ["no", "yes"]
    train, evaluation = load(path, name="big", split="train[:10%]", eval_split="test")
    assert (len(train), len(evaluation), evaluation["text"][0]) == (2, 20, "big test 0")
    for unused in ("validation", "test"):
        assert load(str(tmp_path / "small"))[1]["text"][0] == f"small {unused} 0"
        (tmp_path / "small" / f"{unused}-00000-of-00001.parquet").unlink()
    assert len(load(str(tmp_path / "small"))[1]) == 1
    with refused("big", "small", "--data.name"):
        load(path)
    with refused("huge", "big", "small", "--data.name"):
        load(path, name="huge")
    with refused("--data.eval-split dev", "no split dev", "train, validation, test"):
        load(path, name="big", eval_split="dev")


def test_names_that_look_like_patterns_and_folders_that_look_like_files(tmp_path):
    (tmp_path / "rows[1].csv").write_text("text\na\nb\n")
    assert texts_of(load(str(tmp_path / "rows[1].csv"))) == ["a", "b"]
    folder = tmp_path / "spark.parquet"
    table(text=["c", "d"]).to_parquet(folder / "part-0.parquet")
    (folder / "_SUCCESS").touch()
    for path in (str(folder), f"{folder}/"):
        assert texts_of(load(path)) == ["c", "d"]


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
        ({"a.docx": "x"}, "a.docx", {}, [".docx", "csv, tsv, json, jsonl, txt and parquet"]),
        ({"a.csv": "x,y\n1,2,3\n"}, "a.csv", {}, ["a.csv", "line 2 has 3 values", "comma in it"]),
        ({"a.csv": "x,y\n1,2\n1,2,3\n"}, "a.csv", {}, ["a.csv", "line 3 has 3 values", "have 2"]),
        ({"a.csv": "x;y\n1;a, b\n"}, "a.csv", {}, ["a.csv", "separator must be a comma", "';'"]),
        ({"a.csv": "x|y\n1|a\n1|a, b\n"}, "a.csv", {}, ["a.csv", "separator must be a comma", "'|'"]),
        ({"a.tsv": "x\ty\n1\t2\n1\t2\t3\n"}, "a.tsv", {}, ["a.tsv", "line 3 has 3 values", "tab in it"]),
        ({"a.csv": "1,2,3\n"}, "a.csv", {"columns": ["x", "y"]}, ["--data.columns has 2 names (x y)", "3 columns"]),
        ({"a.csv": "x,y\n1,2\n"}, "a.csv", {"columns": ["x", "y"]}, ["--data.columns", "leave out"]),
        ({"a.csv": "x,x\n1,2\n"}, "a.csv", {}, ["two columns named x", "--data.columns"]),
        ({"a.csv": b"x,y\ncaf\xe9,2\n"}, "a.csv", {}, ["a.csv", "UTF-8", "iconv -f latin1"]),
        ({"a.csv": "x,y\na,2\n".encode("utf-16")}, "a.csv", {}, ["a.csv", "UTF-8", "iconv -f utf16"]),
        ({"a.jsonl": "{broken\n"}, "a.jsonl", {}, ["a.jsonl", "cannot be read"]),
        ({"a.parquet": "x"}, "a.parquet", {}, ["a.parquet", "file size is 1 bytes"]),
        ({"a.jsonl": '{"x": 1}\n'}, "a.jsonl", {"columns": ["x"]}, ["--data.columns", "names of its own"]),
        ({"a.csv": "x\n1\n2\n"}, "a.csv", {"eval_split": "test"}, ["--data.eval-split test", "there are train"]),
        ({"a.csv": "x\n1\n2\n"}, "a.csv", {"split": "test"}, ["--data.split test", "there are train"]),
        ({"a.csv": "x\n1\n2\n"}, "a.csv", {"holdout": 1.5}, ["--data.holdout 1.5", "between 0 and 1"]),
        ({"a.csv": "x\n1\n"}, "a.csv", {}, ["1 row,", "--data.eval-path"]),
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
        load(path, **arguments)


def test_unknown_builtin_data_and_splits_name_those_there_are():
    with refused("builtin:sdtlib", "builtin:stdlib"):
        load("builtin:sdtlib")
    with refused("--data.eval-split test", "there are train"):
        load("builtin:stdlib", eval_split="test")
    train, evaluation = load("builtin:stdlib", split="train[:5]", eval_split="train[5:8]+train[10:11]")
    assert [len(train), len(evaluation)] == [5, 4] and train._fingerprint != evaluation._fingerprint
    whole = load("builtin:stdlib", split="train[5:11]", eval_split="train[:1]")[0]["text"]
    assert list(evaluation["text"]) == [whole[row] for row in (0, 1, 2, 5)]


@pytest.mark.parametrize("inside", [False, True])
def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch, inside):
    """With what the installed huggingface_hub really raises, as it is and inside what datasets makes of it."""

    def unreachable(*args, **kwargs):
        try:
            huggingface_hub.utils.get_session().get("http://127.0.0.1:9")
        except Exception as error:
            if inside:
                raise FileNotFoundError("Couldn't find any data file") from None
            assert type(error).__name__ == "ConnectError"
            raise

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with refused("nyu-mll/glue", "hf download nyu-mll/glue --repo-type dataset", "HF_HUB_OFFLINE=1"):
        load("nyu-mll/glue", name="sst2")


def test_offline_a_hub_set_comes_from_the_cache_or_is_refused(tmp_path, own_data_cache):
    """A warm cache is what an earlier download leaves: here a folder's, under the name of a Hub set."""
    path, _ = write(tmp_path, "hub")
    datasets.load_dataset(str(shutil.move(path, tmp_path / "spam")))
    (prepared,) = (file.parent for file in own_data_cache.glob("**/spam/default/0.0.0/*/dataset_info.json"))
    shutil.copytree(prepared, tmp_path / "warm" / "someone___spam" / "default" / "0.0.0" / prepared.name)
    code = """
from app.data.config import TableData
from app.data.loading import load_tables
from app.errors import UserError
tables = load_tables(TableData(path=("someone/spam",)))
print(len(tables.train) + len(tables.evaluation))
try:
    load_tables(TableData(path=("nyu-mll/glue",)))
except UserError as error:
    print(error)
"""
    lines = python(code, HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=str(tmp_path / "warm")).splitlines()
    assert lines[0] == "4"
    assert "hf download nyu-mll/glue" in lines[1]


def test_errors_name_the_data_that_they_are_about(tmp_path):
    """Which of the two tables, by its flag and its path."""
    good, other = tmp_path / "good.csv", tmp_path / "other.csv"
    good.write_text("text,label\n" + "a,x\nb,y\n" * 5)
    for content, words in (
        ("text,label\na,x\nb,\n", ["row 1", "no label"]),
        ("text,label\na,x\nb,z\n", ["row 1", "'z'", "no training row"]),
        ("body,class\na,x\n", ["--data.label label", "no such column", "body, class"]),
        ("text;label\na;x\n", ["--data.label label", "text;label", "comma"]),
    ):
        other.write_text(content)
        train, evaluation = load(str(good), eval_path=str(other))
        with refused(f"--data.eval-path {other}", *words):
            read_labels(train, evaluation, TextData())
    for content, words in (("", ["empty"]), ("a\n1,2\n", ["cannot be read"]), ("text\n", ["no rows"])):
        other.write_text(content)
        with refused(f"--data.eval-path {other}", *words):
            load(str(good), eval_path=str(other))
    with refused("--data.eval-path nope.csv", "no such file"):
        load(str(good), eval_path="nope.csv")
    with refused("--data.eval-split test", f"{good} has no split test", "train"):
        load(str(good), eval_split="test")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("split", ["train", "train+test"])
def test_a_column_that_is_missing_is_answered_by_what_is_there(tmp_path, kind, split):
    """Header lines are for csv and tsv files alone."""
    for name in ("train", "test"):
        data = datasets.Dataset.from_dict({"Text": ["a", "b"] * 4, "klass": ["x", "y"] * 4})
        {"jsonl": data.to_json, "parquet": data.to_parquet, "csv": data.to_csv}[kind](str(tmp_path / f"{name}.{kind}"))
    train, _ = load(tmp_path, split=split, holdout=0.5)
    word = "key" if kind == "jsonl" else "column"
    with refused(f"--data.text text: no such {word}", f"{word}s are Text, klass", "did you mean --data.text Text?"):
        check_columns(train, ["text"], "text")
    with refused(f"no such {word}", f"{word}s are Text, klass") as error:
        check_columns(train, ["annotation"], "label")
    assert ("--data.columns" in str(error.value)) == (kind == "csv") and "did you mean" not in str(error.value)


def test_a_configuration_of_what_has_none_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\n" + "a,x\nb,y\n" * 5)
    for path in (str(tmp_path / "rows.csv"), "builtin:stdlib", str(tmp_path)):
        with refused("foo", "--data.name", path):
            load(path, name="foo")
    card = tmp_path / "card"
    write_card(card)
    assert len(load(str(card), name="one", eval_path=str(tmp_path / "rows.csv"))[1]) == 10


@pytest.mark.parametrize(
    "files, told",
    [
        ({"empty.txt": ""}, "is empty"),
        ({"train.tsv": "text\tlabel\na\t1\n", "test.json": '{"text": "a"}\n'}, "several formats: name those to read"),
    ],
)
@pytest.mark.usefixtures("own_data_cache")
def test_what_datasets_says_in_its_own_words_is_said_in_ours(tmp_path, files, told):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    path = tmp_path / "empty.txt" if "empty.txt" in files else tmp_path
    with pytest.raises(UserError, match=told):
        open_source("--data.path", [str(path)])


LEFT_OUT = {
    "no split in a name": (("train.jsonl", "extra.jsonl"), "extra.jsonl would be left out: the name of train.jsonl"),
    "in another folder": (("train/a.csv", "b.csv"), "b.csv would be left out: the name of train/a.csv says its split"),
    "numbered": (("data/train-00000-of-00001.csv", "more.csv"), "more.csv would be left out"),
    "capitals": (("training-1.csv", "Train_a.csv"), "Train_a.csv would be left out"),
    "other splits": (("test.csv", "b.csv"), "b.csv would be left out: the name of test.csv says its split, test,"),
    "another format": (("a.jsonl", "b.jsonl", "c.csv"), "c.csv would be left out, as a.jsonl has another format"),
    "texts": (("train.txt", "extra.txt"), "extra.txt would be left out"),
    "a hidden folder": (("a.csv", "__old/b.csv"), "__old/b.csv would be left out"),
    "not rows": (("train.csv", "README.csv", "notes.txt", ".b.csv", "sizes.json"), ""),
    "told of": (("train.jsonl", "dataset_info.json", "license.txt"), ""),
    "all": (("train.csv", "dev.csv", "test/a.csv"), "dev.csv would be left out"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_files_of_data_that_datasets_would_leave_out_are_refused(case, tmp_path):
    names, says = LEFT_OUT[case]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text,label\na,x\n" if name.endswith("csv") else '{"text": "a", "label": "x"}\n')
    if not says:
        assert len(open_source("--data.path", [str(tmp_path)]).tables["train"]) == 1
        return
    with pytest.raises(UserError, match="pattern") as told:
        open_source("--data.path", [str(tmp_path)])
    assert says in str(told.value)
    by_pattern = f"{tmp_path}/{names[0]}"
    assert len(open_source("--data.path", [by_pattern]).tables["train"]) == 1
