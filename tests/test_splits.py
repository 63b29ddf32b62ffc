"""Splits: which rows are trained on and which are for evaluation; never the same ones."""

import json

import pytest

from app.data.config import TextData
from app.data.tables.splits import hold_out
from app.data.text.labeled_text import load_labelled
from tables import load, refused, table

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
