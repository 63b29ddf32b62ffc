"""Tables: files, folders in Hub layout and builtin data; which rows are held out. Nothing here needs a network."""

import gzip
import json
import os
import re
import shutil
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from app.data.builtin import functions_of, stdlib_rows
from app.data.cache import using_cache
from app.data.config import TextData
from app.data.text import read_labels
from tables import load, python, refused, table

pytestmark = pytest.mark.usefixtures("data_cache")
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


@pytest.mark.parametrize("folder", [False, True])
def test_files_changed_on_disk_are_read_again(tmp_path, folder):
    file = tmp_path / "rows.csv"
    keys = []
    for words in (["one", "two"], ["three", "four"]):
        file.write_text("label,text\n" + "".join(f"{word[0]},{word}\n" for word in words))
        os.utime(file, (len(keys), len(keys)))
        parts = load(str(tmp_path if folder else file))
        assert {row["text"] for part in parts for row in part} == set(words)
        keys.append(parts[0]._fingerprint)
    assert keys[0] != keys[1]


def test_several_files_patterns_and_a_file_to_evaluate_on(tmp_path):
    for name in ("a", "b", "dev"):
        (tmp_path / f"{name}.csv").write_text(f"label,text\n0,{name} first\n1,{name} second\n")
    both = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    for path in (both, str(tmp_path / "[ab].csv")):
        train, evaluation = load(path, eval_path=str(tmp_path / "dev.csv"))
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


def test_csv_keeps_words_and_numbers_apart(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(
        "word,code,count,score,year,odd\nNA,007,1,1.5,+1999,1\nnull,12,-2,1e3,2001,nan\nNone,3,3,,2020,inf\n"
    )
    train, _ = load(str(file), holdout=0.01, eval_path=str(file))
    assert train.to_dict() == {
        "word": ["NA", "null", "None"],
        "code": ["007", "12", "3"],
        "count": [1, -2, 3],
        "score": [1.5, 1000.0, None],
        "year": ["+1999", "2001", "2020"],
        "odd": ["1", "nan", "inf"],
    }


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
        ({"a.csv": "x\n1\n2\n"}, "a.csv", {"eval_split": "test"}, ["--data.eval-split test", "there are train"]),
        ({"a.csv": "x\n1\n2\n"}, "a.csv", {"split": "test"}, ["--data.split test", "there are train"]),
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
        load(path, **arguments)


def test_unknown_builtin_data_and_splits_name_those_there_are():
    with refused("builtin:sdtlib", "builtin:stdlib"):
        load("builtin:sdtlib")
    with refused("--data.eval-split test", "there are train"):
        load("builtin:stdlib", eval_split="test")
    with refused("--data.split train[:5]", "no slices"):
        load("builtin:stdlib", split="train[:5]")


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


def test_offline_a_hub_set_comes_from_the_cache_or_is_refused(tmp_path, data_cache):
    """A warm cache is what an earlier download leaves: here a folder's, under the name of a Hub set."""
    path, _ = write(tmp_path, "hub")
    load(shutil.move(path, tmp_path / "spam"))
    (prepared,) = (file.parent for file in data_cache.glob("**/spam/default/0.0.0/*/dataset_info.json"))
    shutil.copytree(prepared, tmp_path / "warm" / "someone___spam" / "default" / "0.0.0" / prepared.name)
    code = """
from app.data.config import TableData
from app.data.sources import load_tables
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


def test_a_cache_that_cannot_be_written_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with refused("No space left", str(tmp_path), "HF_DATASETS_CACHE"), using_cache():
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("while writing") from error


def write_card(folder: Path, options: str = "") -> Path:
    """Write a folder with a card, whose two configurations hold a jsonl file each; return that of the first."""
    configs = ""
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        (folder / name / "rows.jsonl").write_text(
            "".join(f'{{"text": "{name} {i}", "label": {i % 2}}}\n' for i in range(9))
        )
        configs += f"- config_name: {name}\n  data_files: {name}/rows.jsonl\n{options}"
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n# Rows\n")
    return folder / "one" / "rows.jsonl"


def texts_of(tables) -> list[str]:
    return sorted(text for part in tables for text in part["text"])


def test_a_folder_with_a_card_is_read_again_once_it_changes(tmp_path, data_cache):
    """The cache of datasets knows neither the files' content nor the folder's parent."""
    file = write_card(tmp_path / "a" / "rows")
    other = write_card(tmp_path / "b" / "rows")
    other.write_text(other.read_text().replace("one", "another"))
    first = load(str(tmp_path / "a" / "rows"), name="one")
    second = load(str(tmp_path / "b" / "rows"), name="one")
    assert (texts_of(first)[0], texts_of(second)[0]) == ("one 0", "another 0")
    file.write_text(file.read_text().replace("one", "new"))
    third = load(str(tmp_path / "a" / "rows"), name="one")
    assert texts_of(third)[0] == "new 0"
    assert len({tables[0]._fingerprint for tables in (first, second, third)}) == 3
    again = load(str(tmp_path / "a" / "rows"), name="one")
    assert again[0]._fingerprint == third[0]._fingerprint


def test_a_file_of_another_size_is_read_again_whatever_its_time(tmp_path):
    file = tmp_path / "rows.jsonl"
    for words in (["one", "two"], ["three", "fourteen"]):
        file.write_text("".join(f'{{"text": "{word}"}}\n' for word in words))
        os.utime(file, (1, 1))
        assert texts_of(load(str(file))) == sorted(words)


def test_what_an_earlier_version_left_in_the_cache_is_removed_the_day_after(tmp_path, data_cache):
    file = tmp_path / "rows.jsonl"
    before = set(data_cache.glob("samestep/tables/*"))
    for version in range(3):
        file.write_text('{"text": "a"}\n' * (2 + version))
        load(str(file))
        (folder,) = set(data_cache.glob("samestep/tables/*")) - before
        if version == 0:
            (first,) = folder.iterdir()
            os.utime(first, (1, 1))
    assert len(list(folder.iterdir())) == 2 and not first.exists()


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_file_reads_the_same_inside_a_folder(tmp_path, kind):
    file, comma = tmp_path / f"train.{kind}", "," if kind == "csv" else "\t"
    lines = ["text,label,code", '"a, ""quoted"" one",NA,007', '"two\nlines",None,12', "null,NA,3"]
    file.write_text("".join(line.replace(",", comma) + "\n" for line in lines))
    expected = {
        "text": [f'a{comma} "quoted" one', "two\nlines", "null"],
        "label": ["NA", "None", "NA"],
        "code": ["007", "12", "3"],
    }
    for path in (file, tmp_path):
        assert load(str(path), eval_path=str(path))[0].to_dict() == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['a\t"open', "b\tplain", 'c\t"quoted"'], ['"open', '"quoted"', "plain"]),
        (['a\tthe "word"', 'b\t"all of it"', 'c\t"twice ""so"""'], ["all of it", 'the "word"', 'twice "so"']),
        (['a\t"open', 'b\tclosed"'], ['"open', 'closed"']),
        (['a\t"one', 'two"', "b\tthree"], ["one\ntwo", "three"]),
        (['a\t"so" they say', 'b\t"fine"'], ['"fine"', '"so" they say']),
    ],
)
def test_quotes_in_tsv_count_where_they_balance(tmp_path, lines, expected):
    file = tmp_path / "rows.tsv"
    file.write_text("label\ttext\n" + "".join(f"{line}\n" for line in lines))
    assert texts_of(load(str(file))) == expected
    with gzip.open(f"{file}.gz", "wt") as stream:
        stream.write(file.read_text())
    assert texts_of(load(f"{file}.gz")) == expected


def test_a_card_that_says_how_to_read_its_csv_files_is_obeyed(tmp_path):
    (tmp_path / "rows.csv").write_text("text;label\na, b;x\nc;y\n")
    (tmp_path / "README.md").write_text(
        '---\nconfigs:\n- config_name: default\n  data_files: rows.csv\n  sep: ";"\n---\n'
    )
    assert texts_of(load(str(tmp_path))) == ["a, b", "c"]


@pytest.mark.parametrize(
    "content",
    [
        {"text": ["a", "b", "c"], "label": [["x"], [], ["y", "z"]]},
        {"text": {"0": "a", "1": "b", "2": "c"}, "label": {"0": ["x"], "1": [], "2": ["y", "z"]}},
    ],
    ids=["lists", "pandas"],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_json_by_column_is_read(tmp_path, content, indent):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(content, indent=indent))
    train, _ = load(str(file), split="train[1:]", eval_path=str(file))
    assert train.to_dict() == {"text": ["b", "c"], "label": [[], ["y", "z"]]}


@pytest.mark.parametrize(
    "content",
    [
        {"data": [{"text": "a", "label": 1}, {"text": "b", "label": 0}], "version": 1},
        {"data": [{"text": "a", "label": 1}, {"text": "b", "label": 0}]},
        {"train": {"text": ["a", "b"], "label": [1, 0]}, "test": {"text": ["c"], "label": [1]}},
        {"text": ["a", "b"], "label": [1]},
    ],
)
def test_json_of_another_shape_is_refused_with_the_shape_that_is_wanted(tmp_path, content):
    (tmp_path / "rows.json").write_text(json.dumps(content))
    (tmp_path / "folder").mkdir()
    shutil.copy(tmp_path / "rows.json", tmp_path / "folder" / "train.json")
    for path in ("rows.json", "folder"):
        with refused(str(tmp_path / path), ", ".join(content), '[{"text": ..., "label": ...}, ...]'):
            load(str(tmp_path / path))


def test_names_that_look_like_patterns_and_folders_that_look_like_files(tmp_path):
    (tmp_path / "rows[1].csv").write_text("text\na\nb\n")
    assert texts_of(load(str(tmp_path / "rows[1].csv"))) == ["a", "b"]
    folder = tmp_path / "spark.parquet"
    table(text=["c", "d"]).to_parquet(folder / "part-0.parquet")
    (folder / "_SUCCESS").touch()
    for path in (str(folder), f"{folder}/"):
        assert texts_of(load(path)) == ["c", "d"]


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


def test_a_configuration_of_what_has_none_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\n" + "a,x\nb,y\n" * 5)
    for path in (str(tmp_path / "rows.csv"), "builtin:stdlib", str(tmp_path)):
        with refused("foo", "--data.name", path):
            load(path, name="foo")
    card = tmp_path / "card"
    write_card(card)
    assert len(load(str(card), name="one", eval_path=str(tmp_path / "rows.csv"))[1]) == 10
