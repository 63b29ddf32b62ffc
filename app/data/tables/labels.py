"""Labels of a table, as the numbers that a loss takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from app.data.tables.classes import coded, some
from app.data.tables.columns import (
    LabelColumn,
    check_columns,
    held,
    is_float,
    is_list,
    is_number,
    is_text,
    row_name,
)
from app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"

# Whole-number floats count as classes if there are at most this many distinct values.
FEW = 20
NOTHING = np.zeros(0)


class LabelFlags(Protocol):
    """The flags of --data that say what the labels are, as in app.data.config.TextData."""

    @property
    def label(self) -> tuple[str, ...]: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def problem(self) -> str: ...


@dataclass
class Labels:
    """What the labels of a training and an evaluation table mean, and their values."""

    problem: str
    """single_label_classification, multi_label_classification or regression, as transformers calls it."""
    names: list[str]
    """A name for each output of the model: the classes, or the columns of a regression."""
    train_values: np.ndarray
    """int64 [rows] for a single label; float32 [rows, classes] for several; float32 [rows] for a regression, or
    [rows, columns] where it has several."""
    eval_values: np.ndarray
    whole_floats: bool = False
    """The classes are whole numbers that are stored as floats."""
    other_values: dict[str, np.ndarray] = field(default_factory=dict)
    """Those of further evaluation tables, by name."""
    numbered: bool = False
    """The data have the numbers of the given classes, counted from 0."""
    streamed: bool = False
    """The values to train on are known only when they are read; `train_values` are those of some rows."""

    @property
    def sets(self) -> dict[str, np.ndarray]:
        """Return the values of all evaluation tables; the first one has no name."""
        return {"": self.eval_values, **self.other_values}

    @property
    def known_values(self) -> np.ndarray | None:
        """Return the values of all rows to train on; None if they are known only when they are read."""
        return None if self.streamed else self.train_values

    def summary(self) -> str:
        """Say in a few words what is predicted."""
        if self.problem == REGRESSION:
            columns = self.train_values.reshape(len(self.train_values), -1).T
            ranges = [f"{n} from {v.min():g} to {v.max():g}" for n, v in zip(self.names, columns, strict=True)]
            return f"regression: {some(ranges)}{' in the rows looked at' if self.streamed else ''}"
        kind = "labels, any number in a row" if self.problem == MULTI else "classes"
        if self.whole_floats:
            kind += ", whole numbers (--data.problem regression predicts amounts)"
        kind += " (in the data, their numbers from 0)" if self.numbered else ""
        return f"{len(self.names):,} {kind}: {some(self.names)}"


def read_labels(
    train: "Dataset", evaluation: "Dataset", config: LabelFlags, others: "dict[str, Dataset] | None" = None
) -> Labels:
    """Read the label columns of the tables to train and to evaluate on.

    The classes are those of the flag, else of the training table: in the order of its ClassLabel if it has one, else
    sorted.

    Args:
        others: further tables to evaluate on, by name.

    Raises:
        UserError: a label is missing, is of no type for labels, or is none of the classes.
    """
    columns, tables = tuple(config.label), (train, evaluation, *(others or {}).values())
    for table in tables:
        check_columns(table, columns, "label")
    problem = problem_of(tables, columns, config.problem)
    read = _numbers if problem == REGRESSION or len(columns) > 1 else _of_classes
    labels, values = read(tables, columns, problem, config.classes)
    labels.train_values, labels.eval_values, *rest = values
    labels.other_values = dict(zip(others or {}, rest, strict=True))
    return labels


def streamed_classes(learnt: "Dataset", config: LabelFlags) -> tuple[str, ...]:
    """Return the classes of streamed labels, as --data.classes or their ClassLabel says them; none of amounts.

    Args:
        learnt: some of the rows. Not all classes may be among them.

    Raises:
        UserError: a flag is needed that says what they mean.
    """
    check_columns(learnt, config.label, "label")
    name = config.label[0]
    kind = learnt.data.schema.field(name).type
    if is_float(kind) and config.problem == "auto":
        raise UserError(
            f"--data.label {name}: streamed data hold {kind}, amounts or classes: say which, with --data.problem "
            "regression or --data.problem single_label_classification"
        )
    feature = learnt.features[name]
    classes = config.classes or tuple(getattr(getattr(feature, "feature", feature), "names", ()))
    if len(config.label) == 1 and config.problem != REGRESSION and not classes:
        raise UserError(
            f"--data.label {name}: the classes of streamed data are not known before all rows are read: name them "
            "with --data.classes, in the order of the model's outputs"
        )
    return classes


def _numbers(
    tables: "Sequence[Dataset]", columns: tuple[str, ...], problem: str, classes: tuple[str, ...]
) -> tuple[Labels, list[np.ndarray]]:
    """Read columns of amounts, or several columns of 0 and 1."""
    if problem == MULTI and classes:
        if sorted(classes) != sorted(columns):
            raise UserError(f"--data.label {' '.join(columns)}: the classes are {some(classes)}; name these columns")
        columns = classes
    read = _floats if problem == REGRESSION else _flags
    values = [np.stack([read(LabelColumn(table, name)) for name in columns], axis=1) for table in tables]
    if problem == REGRESSION and len(columns) == 1:
        values = [column[:, 0] for column in values]
    return Labels(problem, list(columns), NOTHING, NOTHING), values


def _of_classes(
    tables: "Sequence[Dataset]", columns: tuple[str, ...], problem: str, classes: tuple[str, ...]
) -> tuple[Labels, list[np.ndarray]]:
    """Read a column of classes, or of lists of them."""
    lists = [LabelColumn(table, columns[0]) for table in tables]
    if problem == MULTI and (width := _vector_width(lists[0])):
        if classes and len(classes) != width:
            raise UserError(f"--data.label {columns[0]} has {width} values a row, for {len(classes)} classes")
        names = list(classes) or [str(i) for i in range(width)]
        return Labels(problem, names, NOTHING, NOTHING), [_vectors(column, width) for column in lists]
    whole = is_float(lists[0].items.type)
    names, in_data, codes = coded(lists, classes)
    labels = Labels(problem, names, NOTHING, NOTHING, whole and not classes)
    labels.numbered = names != in_data
    if problem == MULTI:
        return labels, [column.spread(items, len(names)) for column, items in zip(lists, codes, strict=True)]
    if not classes and len(np.unique(codes[0])) < 2:
        raise UserError(
            f"--data.label {columns[0]}: all training rows have the label {names[codes[0][0]]}; a classifier needs two"
        )
    return labels, codes


def only_of_their_class(table: "Dataset", out: np.ndarray, config: LabelFlags) -> np.ndarray:
    """Mark the first row of every class that no row outside the mask `out` has: a classifier must be trained on it."""
    stay = np.zeros(len(table), bool)
    check_columns(table, config.label, "label")
    if len(config.label) > 1 or problem_of((table,), tuple(config.label), config.problem) == REGRESSION:
        return stay
    column = LabelColumn(table, config.label[0])
    rows = np.repeat(np.arange(len(table)), column.counts)
    encoded = column.items.dictionary_encode()
    codes, trained = np.asarray(encoded.indices), np.zeros(len(encoded.dictionary), bool)
    trained[codes[~out[rows]]] = True
    lone, first = np.unique(np.where(trained[codes], -1, codes), return_index=True)
    stay[rows[first[lone >= 0]]] = True
    return stay


def problem_of(tables: "Sequence[Dataset]", columns: Sequence[str], wanted: str) -> str:
    """Return the problem that the columns' types stand for, or the wanted one if the columns can be read as that."""
    train = tables[0]
    kind = train.data.schema.field(columns[0]).type
    possible: tuple[str, ...]
    if len(columns) > 1:
        possible = (MULTI, REGRESSION)
    elif is_list(kind):
        possible = (MULTI,)
    elif is_text(kind) or hasattr(train.features[columns[0]], "names"):
        possible = (SINGLE,)
    elif is_number(kind):
        amounts = is_float(kind) and not all(_few_whole(table, columns[0]) for table in tables)
        possible = (REGRESSION, SINGLE) if amounts else (SINGLE, REGRESSION)
    else:
        raise UserError(
            f"--data.label {columns[0]} of {held(train, columns[0])}: labels are integers, strings, floats or "
            f"lists of them; its columns are {', '.join(train.column_names)}"
        )
    if wanted == "auto":
        return possible[0]
    if wanted not in possible:
        what = f"{len(columns)} columns" if len(columns) > 1 else str(kind)
        fits = " or ".join(possible)
        raise UserError(f"--data.problem {wanted}: --data.label {' '.join(columns)} is {what}, which is for {fits}")
    return wanted


def _few_whole(table: "Dataset", name: str) -> bool:
    """Tell whether a column has only a few whole numbers: pandas writes integers as floats if some are missing."""
    import pyarrow.compute as pc

    if not is_number(table.data.schema.field(name).type):
        return True  # it has no other numbers; what it holds instead is reported where it is read
    values = np.asarray(pc.unique(table.select_columns([name]).with_format("arrow")[:].column(name)).drop_null())
    return len(values) <= FEW and bool((np.isfinite(values) & (np.floor(values) == values)).all())


def _vector_width(column: LabelColumn) -> int:
    """Return the length of the rows' vectors of 0 and 1, or 0 if their lists name classes instead.

    Lists of one length, two or more, that hold only 0 and 1 are vectors: as lists of classes, all would name the same
    two classes. Lists of floats can only be vectors.
    """
    kind, width = column.items.type, int(column.counts.max(initial=0))
    if column.names or not is_number(kind):
        return 0
    vectors = bool(width) and (column.counts == width).all() and np.isin(column.items, (0, 1)).all()
    if is_float(kind) and not vectors:
        raise UserError(
            f"--data.label {column.name}: lists of {kind} must be vectors of 0 and 1, all of one length; name "
            "classes by integers or strings"
        )
    return width if vectors and (width > 1 or is_float(kind)) else 0


def _vectors(column: LabelColumn, width: int) -> np.ndarray:
    if (wrong := column.counts != width).any():
        row = int(np.flatnonzero(wrong)[0])
        raise UserError(
            f"--data.label {column.name}: {row_name(column.table, row)} has {column.counts[row]} values, but "
            f"the others have {width}"
        )
    return _flags(column).reshape(-1, width)


def _flags(column: LabelColumn) -> np.ndarray:
    values = column.numbers()
    if (wrong := (values != 0) & (values != 1)).any():
        row, value = column.first(wrong)
        raise UserError(
            f"--data.label {column.name}: {row} has {value}, neither 0 nor 1; for numbers to "
            "predict give --data.problem regression"
        )
    return values


def _floats(column: LabelColumn) -> np.ndarray:
    values = column.numbers()
    if not np.isfinite(values).all():
        row, value = column.first(~np.isfinite(values))
        raise UserError(f"--data.label {column.name}: {row} has {value}, which no model can predict")
    return values
