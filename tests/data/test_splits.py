"""Splits: which rows are trained on and which are for evaluation; never the same ones."""

import json

import datasets
import pytest
from PIL import Image
from support.tables import load, refused, table

from app.data.config import ClassData, CorpusData, TextData
from app.data.corpus import corpus
from app.data.images import labeled_images
from app.data.tables.splits import hold_out
from app.data.text.labeled_text import describe, load_labelled, own_tokenizer, tokenize

pytestmark = pytest.mark.usefixtures("data_cache")


def test_holdout_is_disjoint_stable_and_of_the_right_size():
    data = table(n=list(range(1000)))
    train, evaluation, _ = hold_out(data, 0.1, seed=0)
    assert len(evaluation) == 100
    assert evaluation["n"][:] == sorted(evaluation["n"])
    assert sorted([*train["n"], *evaluation["n"]]) == list(range(1000))
    # Pinned: a run that is resumed by a later version must hold out the same rows.
    assert evaluation["n"][:5] == [1, 6, 32, 44, 58]
    _, other, _ = hold_out(data, 0.1, seed=1)
    assert len(set(other["n"]) & set(evaluation["n"])) < 30  # 10 by chance
    assert len({train._fingerprint, evaluation._fingerprint, other._fingerprint}) == 3
    assert [len(part) for part in hold_out(table(n=[1, 2, 3]), 0.01, seed=0)[:2]] == [2, 1]
    assert [len(part) for part in hold_out(table(n=[1, 2, 3]), 0.99, seed=0)[:2]] == [1, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give a folder with splits of 10 rows each; the texts say which row it is."""
    folder = tmp_path_factory.mktemp("splits")
    for split in ("train", "validation", "test"):
        lines = [json.dumps({"text": f"{split} {i}", "label": i % 2}) + "\n" for i in range(10)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return str(folder)


@pytest.mark.parametrize(
    ("split", "others"),
    [
        ("train", "validation"),
        ("train+validation", "test"),
        ("validation[:50%] + train", "test"),
        ("train[:3]+test", "validation"),
        ("validation", "test"),
    ],
)
def test_no_split_that_is_trained_on_is_evaluated_on(folder, split, others):
    train, evaluation = load(folder, split=split)
    assert not {*train["text"]} & {*evaluation["text"]}
    assert {text.split()[0] for text in evaluation["text"]} == {others}


def test_where_every_split_is_trained_on_rows_are_held_out(folder):
    train, evaluation = load(folder, split="train+validation+test")
    assert (len(train), len(evaluation)) == (27, 3)
    assert not {*train["text"]} & {*evaluation["text"]}


@pytest.mark.parametrize(
    ("split", "eval_split"),
    [
        ("train", "train"),
        ("train+validation", "validation"),
        ("train[:6]", "train[5:]"),
        ("train", "test+train[-1:]"),
        ("train[:60%]", "train[50%:]"),
    ],
)
def test_a_split_to_evaluate_on_that_is_trained_on_is_refused(folder, split, eval_split):
    with refused(f"--data.eval-split {eval_split}", f"--data.split {split}", "rows"):
        load(folder, split=split, eval_split=eval_split)


@pytest.mark.parametrize(
    ("split", "eval_split"), [("train[:6]", "train[6:]"), ("train[:60%]", "validation+train[60%:]")]
)
def test_slices_apart_of_one_split_are_fine(folder, split, eval_split):
    train, evaluation = load(folder, split=split, eval_split=eval_split)
    assert len(train) == 6 and not {*train["text"]} & {*evaluation["text"]}


def test_slices_that_are_none_say_why(folder):
    for split in ("train[:0]", "train[", "train[a:b]", "train[:200%]", "foo"):
        with refused(f"--data.split {split}"):
            load(folder, split=split)


def split_rows(tmp_path, labels, **flags):
    """Write rows with these labels, and split them."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {i}", "label": label}) + "\n" for i, label in enumerate(labels)))
    tables, _ = load_labelled(TextData(path=(str(file),), **flags))
    return tables.train, tables.evaluation


@pytest.mark.parametrize("kind", ["single", "lists"])
def test_the_only_rows_of_a_class_are_trained_on(tmp_path, kind):
    """The held-out rows are those that they would be, without the first of each class that training would lack."""
    labels = [f"rare {i}" if i in (5, 8, 50) else "ab"[i % 2] for i in range(100)]
    labels[44] = labels[8]  # both rows of this class are drawn
    values = labels if kind == "single" else [[label, "c"] for label in labels]
    drawn = split_rows(tmp_path, [0, 1] * 50, holdout=0.5)[1]["text"][:]
    assert {"row 5", "row 8", "row 44", "row 50"} <= {*drawn}
    train, evaluation = split_rows(tmp_path, values, holdout=0.5)
    assert evaluation["text"][:] == [text for text in drawn if text not in ("row 5", "row 8", "row 50")]
    assert len(train) + len(evaluation) == 100 and not {*train["text"]} & {*evaluation["text"]}


def test_where_every_row_is_needed_for_training_there_is_nothing_to_hold_out(tmp_path):
    with refused("--data.holdout 0.1", "--data.eval-path"):
        split_rows(tmp_path, ["a", "b"])
    assert len(split_rows(tmp_path, [0.5, 1.5])[1]) == 1


TAKEN = "evaluated on validation, not on test (--data.eval-split chooses)"
NO_LABEL = "test has no label and is left out"


def write_glue(folder, names, extension="tsv"):
    """Write splits as GLUE has them: of the test split, the labels are withheld and rows are numbered."""
    folder.mkdir(exist_ok=True)
    for name, count in names.items():
        texts = [f'{name} {i} is "so' for i in range(count)]
        rows = [{"sentence": text, "label": i % 2} for i, text in enumerate(texts)]
        if name == "test":
            rows = [{"index": i, "sentence": text} for i, text in enumerate(texts)]
        file = folder / f"{name}.{extension}"
        if extension == "tsv":
            lines = ["\t".join(map(str, row)) for row in [[*rows[0]], *(row.values() for row in rows)]]
            file.write_text("\n".join(lines) + "\n")
        elif extension == "jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            datasets.Dataset.from_list(rows).to_parquet(str(file))
    return folder


@pytest.mark.parametrize("extension", ["tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("name", ["dev", "valid", "validation", "val"])
def test_a_split_without_labels_is_left_out(tmp_path, extension, name):
    folder = write_glue(tmp_path / "SST-2", {"train": 20, name: 5, "test": 7}, extension)
    config = TextData(path=(str(folder),), text=("sentence",))
    tables, labels = load_labelled(config)
    assert (len(tables.train), len(tables.evaluation), tables.held_out) == (20, 5, False)
    assert tables.evaluation["sentence"][0] == f'{name} 0 is "so' and labels.eval_values.tolist() == [0, 1, 0, 1, 0]
    assert tables.note == NO_LABEL
    tokenizer = own_tokenizer(tables.train, config.text, 300, 16)
    train, held = (tokenize(table, config.text, tokenizer, 16) for table in (tables.train, tables.evaluation))
    assert describe(tables, labels, train, {"": held}, 16).splitlines()[-1] == NO_LABEL
    with refused("--data.label label", "split test", "index, sentence"):
        load_labelled(TextData(path=(str(folder),), text=("sentence",), eval_split="test"))


@pytest.mark.parametrize("extension", ["tsv", "jsonl", "parquet"])
def test_where_only_the_test_split_is_there_and_lacks_labels_rows_are_held_out(tmp_path, extension):
    folder = write_glue(tmp_path / "glue", {"training": 20, "test": 7}, extension)
    tables, _ = load_labelled(TextData(path=(str(folder),), text=("sentence",)))
    assert (len(tables.train), len(tables.evaluation), tables.held_out, tables.note) == (18, 2, True, NO_LABEL)


def test_a_split_that_has_more_columns_is_read_too(tmp_path):
    """As the dev split of MNLI, which has the label of each annotator. A column has one type in all splits."""
    (tmp_path / "train.csv").write_text("text,label\n" + "a,1\nb,2\n" * 5)
    (tmp_path / "dev.csv").write_text("text,first,label\n" + "c,1,x\nd,2,2\n")
    train, evaluation = load(tmp_path)
    assert (len(train), len(evaluation)) == (10, 2)
    assert evaluation["first"][:] == [1, 2] and evaluation["label"][:] == ["x", "2"] and train["label"][0] == "1"


def test_the_split_that_is_taken_is_named_where_there_are_several(folder):
    config = TextData(path=(folder,))
    assert load_labelled(config)[0].note == TAKEN
    for flags in ({"eval_split": "test"}, {"split": "train+test"}):
        assert load_labelled(TextData(path=(folder,), **flags))[0].note == ""
    assert corpus.load(CorpusData(path=(folder,))).note == TAKEN
    other = load_labelled(TextData(path=(folder,), split="test", eval_path=folder))
    assert other[0].note == TAKEN


@pytest.mark.parametrize("names", [("train", "val"), ("training", "valid"), ("train", "dev")])
def test_images_without_classes_are_left_out(tmp_path, names):
    for split in (*names, "test"):
        for kind in ("cat", "dog") if split != "test" else ("",):
            (tmp_path / split / kind).mkdir(parents=True)
            for i in range(4):
                Image.new("L", (8, 8), i).save(tmp_path / split / kind / f"{i}.png")
    tables, labels = labeled_images.load_labelled(ClassData(path=(str(tmp_path),)))
    assert (len(tables.train), len(tables.evaluation), labels.names) == (8, 8, ["cat", "dog"])
    assert tables.note == NO_LABEL


def test_every_way_of_reading_prefers_the_same_split(tmp_path):
    """That of validation, of which data sets of the Hub have labels more often than of test."""
    rows = [{"text": f"{split} {i}", "label": i % 2} for split in ("test", "val", "train") for i in range(4)]
    for number, split in enumerate(("test", "val", "train")):
        part = rows[4 * number : 4 * number + 4]
        datasets.Dataset.from_list(part).to_parquet(tmp_path / f"{split}.parquet")
    for stream in ("true", "false"):
        for more in ({}, {"eval_path": str(tmp_path)}):
            config = TextData(path=(str(tmp_path),), classes=("x", "y"), stream=stream, **more)
            assert load_labelled(config)[0].evaluation["text"][0] == "val 0"
