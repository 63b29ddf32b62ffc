"""Labels: classes, several of them, or numbers, as a loss wants them."""

import datasets
import numpy as np
import pytest
from support.tables import labels_of, refused, table

from app.data.tables.labels import MULTI, REGRESSION, SINGLE, problem_of

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


@pytest.mark.parametrize(
    ("values", "classes", "expected"),
    [
        (["b", "a", "b"], ("b", "a", "c"), [0, 1, 0]),
        (["b", "a"], ("B", "A"), [0, 1]),
        (["b", "B"], ("B", "b"), [1, 0]),  # which differ in nothing else
        ([4, 1], ("1", "4", "2"), [1, 0]),
        ([1, 0, 1], ("low", "high"), [1, 0, 1]),
        ([1.0, 0.0], ("low", "high"), [1, 0]),
        ([True, False], ("False", "True"), [1, 0]),
        ([["b"], ["a", "b"]], ("b", "a"), [[1, 0], [1, 1]]),
        ([[0.0, 1.0], [1.0, 0.0]], ("x", "y"), [[0, 1], [1, 0]]),
    ],
)
def test_given_classes_are_in_their_order(values, classes, expected):
    """Whatever the data have, and even if they lack some."""
    labels = labels_of(table(label=values), classes=classes)
    assert labels.names == list(classes) and labels.eval_values.tolist() == expected
    assert ("their numbers" in labels.summary()) == (classes == ("low", "high"))


@pytest.mark.parametrize(
    ("values", "classes", "said"),
    [
        (["a", "x", "y", "x"], ("a", "b"), "Such labels: x, y."),
        ([0, 2], ("low", "high"), "Such labels: 2."),
        ([["a"], ["z"]], ("a", "b"), "Such labels: z."),
        ([[0.0, 1.0]], ("a", "b", "c"), "has 2 values a row, for 3 classes"),
    ],
)
def test_labels_that_are_none_of_the_given_classes_are_named(values, classes, said):
    with refused(said):
        labels_of(table(label=values), classes=classes)


@pytest.mark.parametrize("odd", [" ham", "ham ", "ham\t", "\u00a0ham"])
@pytest.mark.parametrize("wrap", [lambda name: name, lambda name: [name, "x"]])
def test_classes_that_differ_in_blanks_are_named(odd, wrap):
    with refused("the classes ", "differ only in blanks at their ends, in row 2 ", ": write them alike"):
        labels_of(table(label=[wrap(name) for name in ("ham", "spam", odd, "spam")]))


def test_columns_of_given_classes_are_in_their_order():
    data = table(x=[1, 0], y=[0, 0])
    labels = labels_of(data, label=("x", "y"), classes=("y", "x"))
    assert labels.names == ["y", "x"] and labels.eval_values.tolist() == [[0, 1], [0, 0]]
    with refused("the classes are y, z; name these columns"):
        labels_of(data, label=("x", "y"), classes=("y", "z"))


def test_few_whole_floats_are_classes():
    """pandas writes integers as floats where some are missing; amounts have many values, or fractions."""
    for values, problem in (
        ([1.0, 0.0, 1.0], SINGLE),
        ([1.0, 0.0, -2.0], SINGLE),
        ([1.0, 0.0, 0.5], REGRESSION),
        ([float(i) for i in range(100)], REGRESSION),
        ([1.0, float("inf")], REGRESSION),
    ):
        assert problem_of([table(label=values)], ["label"], "auto") == problem
    labels = labels_of(table(label=[1.0, 0.0, 3.0]), table(label=[3, 1]))
    assert (labels.names, labels.train_values.tolist(), labels.eval_values.tolist()) == (
        ["0", "1", "3"],
        [1, 0, 2],
        [2, 1],
    )
    assert labels_of(table(label=[1.0, 0.0]), table(label=[0.5])).problem == REGRESSION
    assert labels_of(table(label=[1.0, 0.0]), problem=REGRESSION).train_values.tolist() == [1.0, 0.0]


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
        (["a", "b"], ["a", "b", "d", "e"], "auto", ["row 2", "'d'", "no training row"]),
        ([1, 2], [1, 2, 0], "auto", ["row 2", "label 0", "no training row"]),
        ([["a"], ["b"]], [["a"], [], ["a", "x"]], "auto", ["row 2", "'x'"]),
        ([1, 2], ["a", "b"], "auto", ["row 0", "'a', as a string where the training data have int64", "1, 2"]),
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
        ([{"x": 1}], None, "auto", ["--data.label label", "holds struct", "labels are"]),
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
    with refused("--data.label x", "row 1", "1.5", "--data.problem regression"):
        labels_of(table(x=[0.0, 1.5], y=[1.0, 0.0]), label=("x", "y"))
    with refused("--data.label text", "string", "not a number"):
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


@pytest.mark.parametrize(
    ("values", "other", "expected"),
    [
        ([1, 2, 12], ["2", "12", "1"], [1, 2, 0]),
        (["1", "2"], [2, 1], [1, 0]),
        (["1", "2"], [2.0, 1.0], [1, 0]),
        ([1, 2], [2.0, 1.0], [1, 0]),
        ([1.0, 2.0], ["2", "1"], [1, 0]),
        ([True, False], ["false", "true"], [0, 1]),
        ([7, 8], ["007", "8"], "'007'"),
        (["007", "8"], [7, 8], "7"),
        ([True, False], [5, 0], "5"),
        ([1, 2], [1.5, 2.0], "1.5"),
    ],
)
def test_labels_of_two_tables_are_compared_as_they_are_written(values, other, expected):
    """Not by what one type makes of the other: 007 would become 7, and 5 true."""
    train, evaluation = table(label=values), table(label=other)
    if isinstance(expected, list):
        assert labels_of(train, evaluation, problem=SINGLE).eval_values.tolist() == expected
    else:
        with refused("row 0", f"label {expected}", "no training row"):
            labels_of(train, evaluation, problem=SINGLE)
