"""Files of csv, tsv and json: the same rows however they are written, and wherever they lie."""

import gzip
import json
import shutil

import pytest
from support.tables import load, refused, texts_of

pytestmark = pytest.mark.usefixtures("data_cache")


def test_csv_keeps_words_and_numbers_apart(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(
        "word,code,count,score,year,odd\nNA,007,1,1.5,+1999,1\nnull,12,-2,1e3,2001,nan\nNone,3,3,,2020,inf\n"
    )
    train, _ = load(str(file), holdout=0.01, eval_path=str(shutil.copy(file, tmp_path / "others.csv")))
    assert train.to_dict() == {
        "word": ["NA", "null", "None"],
        "code": ["007", "12", "3"],
        "count": [1, -2, 3],
        "score": [1.5, 1000.0, None],
        "year": ["+1999", "2001", "2020"],
        "odd": ["1", "nan", "inf"],
    }


def test_csv_columns_have_one_type_in_all_splits_and_slices(tmp_path):
    for split, values in {"train": ("1", "2", "x"), "validation": ("3", "4")}.items():
        (tmp_path / f"{split}.csv").write_text("label,code\n" + "".join(f"{v},{len(v)}\n" for v in values))
    train, evaluation = load(str(tmp_path), split="train[:2]")
    assert train.to_dict() == {"label": ["1", "2"], "code": [1, 1]}
    assert evaluation.to_dict() == {"label": ["3", "4"], "code": [1, 1]}
    assert load(str(tmp_path), split="validation+train[:1]", eval_split="train[1:]")[0]["label"][:] == ["3", "4", "1"]


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
    (tmp_path / "others").mkdir()
    others = shutil.copy(file, tmp_path / "others")
    for path in (file, tmp_path / "others"):
        assert load(str(path), eval_path=str(others if path == file else file))[0].to_dict() == expected


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
    file.write_text("\n \n" + json.dumps(content, indent=indent))
    train, _ = load(str(file), split="train[1:]", eval_path=str(file), eval_split="train[:1]")
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
