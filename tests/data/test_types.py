"""Columns of files that other programs write: each value is what the file says, for every recipe that reads tables."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from support.tables import labels_of, load, refused

from app.data.config import PairData
from app.data.graphs import readers
from app.data.loading import open_source
from app.data.tables.columns import check_texts
from app.data.text.pair_text import load_pairs
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("data_cache")
MANY = 3000
"""Rows that are more than a reader takes at once."""


def records(file, rows):
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def read(file, split="train"):
    return open_source("--data.path", [str(file)]).tables[split]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["2024-01-01", "2024-01-02 10:00:00"], ["2024-01-01", "2024-01-02 10:00:00"]),
        ([None] * MANY + ["word"], [None] * MANY + ["word"]),
        ([1] * MANY + ["word"], ["1"] * MANY + ["word"]),
        (["007", 7, 1.5], ["007", "7", "1.5"]),
        ([1] * MANY + [1.5], [1.0] * MANY + [1.5]),
        ([2**63, 1], ["9223372036854775808", "1"]),
        ([0.1234567890123456789, 1.0], [0.1234567890123456789, 1.0]),
        ([["O", 1], ["B"]], [["O", "1"], ["B"]]),
        ([[], ["B"]], [[], ["B"]]),
    ],
    ids=[
        "dates",
        "empty first",
        "numbers first",
        "digits",
        "floats later",
        "long",
        "digits of floats",
        "lists",
        "none",
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_a_column_of_json_is_what_all_of_its_values_are(tmp_path, form, values, expected):
    rows = [{"text": "a", "label": value} for value in values]
    file = records(tmp_path / "rows.jsonl", rows)
    if form == "json":
        file = tmp_path / "rows.json"
        file.write_text(json.dumps(rows, indent=1))
    assert read(file)["label"][:] == expected


def test_a_column_has_one_kind_in_all_splits(tmp_path):
    records(tmp_path / "train.jsonl", [{"text": "a", "label": 1}, {"text": "b", "label": 2}])
    records(tmp_path / "validation.jsonl", [{"text": "2024-01-01", "label": "2"}, {"text": 5, "label": "1"}])
    train, evaluation = load(str(tmp_path))
    assert labels_of(train, evaluation).eval_values.tolist() == [1, 0]
    assert evaluation["text"][:] == ["2024-01-01", "5"]


def test_values_of_no_common_kind_are_named_by_their_rows(tmp_path):
    file = records(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": "b"}, {"text": ["c"]}])
    with refused("--data.text text", str(file), "a text in row 0 and a list in row 2") as error:
        check_texts(_named(file), "text")
    assert "extension" not in str(error.value)
    file = records(tmp_path / "labels.jsonl", [{"text": "a", "label": 1}, {"text": "b", "label": True}])
    with refused("--data.label label", "a number in row 0 and true or false in row 1"):
        labels_of(_named(file))


def _named(file):
    return open_source("--data.path", [str(file)])["train"]


def test_a_record_that_cannot_be_read_is_named_by_its_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    for line, said in (('{"text": "b', "line 3"), ("[1]", "line 3"), ('{"text": "\\ud800"}', "line 3")):
        file.write_text('{"text": "a"}\n{"text": "a"}\n' + line + "\n")
        with refused(str(file), "cannot be read", said):
            read(file)


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_texts_of_parquet_are_texts_in_any_form(tmp_path, kind):
    words = pa.array(["b", "a", "b"])
    column = words.dictionary_encode() if kind == "dictionary" else words.cast(getattr(pa, kind)())
    parquet.write_table(
        pa.table({"text": column, "label": column, "tags": pa.array([["x"]] * 3)}), tmp_path / "a.parquet"
    )
    table = _named(tmp_path / "a.parquet")
    check_texts(table, "text")
    assert labels_of(table).train_values.tolist() == [1, 0, 1] and table["text"][:] == ["b", "a", "b"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (pa.nulls(2), pa.array(["a"]), [None, None, "a"]),
        (pa.array(["a"]), pa.nulls(1), ["a", None]),
        (pa.array([1], pa.int8()), pa.array([300]), [1, 300]),
        (pa.array([1]), pa.array(["a"]), ["1", "a"]),
        (pa.array(["a"]).dictionary_encode(), pa.array(["b"], pa.large_string()), ["a", "b"]),
        (pa.array([True]), pa.array(["a"]), "the column label holds bool"),
    ],
)
def test_parquet_files_of_a_split_may_differ_in_their_types(tmp_path, one, other, expected):
    for number, column in enumerate((one, other)):
        parquet.write_table(pa.table({"label": column}), tmp_path / f"train-{number:05}-of-00002.parquet")
    if isinstance(expected, str):
        with refused(expected, "train-00000", "train-00001", "one type"):
            read(tmp_path)
    else:
        assert read(tmp_path)["label"][:] == expected


def test_features_that_a_parquet_file_names_are_kept(tmp_path):
    features = datasets.Features({"label": datasets.ClassLabel(names=["red", "green"])})
    datasets.Dataset.from_dict({"label": [1, 0]}, features=features).to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet").features == features


@pytest.mark.parametrize(
    ("ids", "ends", "same"),
    [
        (["1", "2", "x"], [("1", "2"), ("2", "1")], True),
        (["007", "12"], [("007", "12")], True),
        (["7", "12"], [("007", "12")], False),
        (["007", "12"], [("7", "12")], False),
        (["1", "2"], [("1.0", "2.0")], True),
        (["1.0", "2.0"], [("1", "2")], True),
        (["1e3", "2"], [("1000", "2")], False),
    ],
)
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_ids_of_nodes_and_of_edges_are_compared_as_they_are_written(tmp_path, form, ids, ends, same):
    nodes, edges = tmp_path / "nodes.csv", tmp_path / f"edges.{form}"
    nodes.write_text("id,label,x\n" + "".join(f"{each},{i % 2},{i}\n" for i, each in enumerate(ids)))
    if form == "csv":
        edges.write_text("source,target\n" + "".join(f"{a},{b}\n" for a, b in ends))
    else:
        records(edges, [{"source": a, "target": b} for a, b in ends])
    if same:
        graph = readers.read("--data.path", str(edges), str(nodes), undirected=False)
        places = {each if each == "x" else float(each): place for place, each in enumerate(ids)}
        expected = sorted((places[float(b)], places[float(a)]) for a, b in ends)
        assert graph.indices.tolist() == [source for _, source in expected]
    else:
        with pytest.raises(UserError, match=r"has the source .* has no such node"):
            readers.read("--data.path", str(edges), str(nodes), undirected=False)


def test_numbers_of_edges_in_json_are_the_ids_of_a_csv_table(tmp_path):
    (tmp_path / "nodes.csv").write_text("id,label,x\n5,0,1\n6,1,2\n")
    file = records(tmp_path / "edges.jsonl", [{"source": 5, "target": 6.0}])
    graph = readers.read("--data.path", str(file), str(tmp_path / "nodes.csv"), undirected=False)
    assert np.asarray(graph.indices).tolist() == [0]


def lines(folder, **counts):
    for name, count in counts.items():
        split, _, language = name.partition("_")
        (folder / f"{split}.{language}").write_text("".join(f"{language} {i}\n" for i in range(count)))
    return folder


def pairs(folder, **flags):
    return load_pairs(PairData(path=(str(folder),), source="de", target="en", **flags))


def test_parallel_files_are_compared_where_they_are_used(tmp_path):
    """Neither another language nor another split stops a run; what it uses is named."""
    lines(tmp_path, train_de=8, train_en=8, train_fr=5, val_de=3, val_en=3, test_de=3, test_en=4)
    tables = pairs(tmp_path)
    assert (len(tables.train), len(tables.evaluation)) == (8, 3)
    assert tables.train[7]["de"] == "de 7" and tables.train[7]["en"] == "en 7"
    with refused("test.de has 3", "test.en has 4", "belong together"):
        pairs(tmp_path, eval_split="test")
    lines(tmp_path, val_en=2)
    with refused("val.de has 3", "val.en has 2"):
        pairs(tmp_path)
    lines(tmp_path, val_en=3, train_en=7)
    with refused("train.de has 8", "train.en has 7"):
        pairs(tmp_path)


def test_a_single_line_of_jsonl_is_a_record(tmp_path):
    """Its fields may be lists; in a .json file such an object has a list for each column."""
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}], "tags": ["b"]}\n')
    table = open_source("--data.path", [str(tmp_path / "a.jsonl")]).tables["train"]
    assert table.to_list() == [{"messages": [{"role": "user", "content": "x"}], "tags": ["b"]}]
    (tmp_path / "a.json").write_text('{"text": ["a", "b"], "label": [1, 2]}')
    assert len(open_source("--data.path", [str(tmp_path / "a.json")]).tables["train"]) == 2
