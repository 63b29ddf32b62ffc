"""Labels of a table, as the numbers that a loss wants."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.data.tables.columns import LabelColumn, check_columns, is_list, is_number, is_text, name_of, row_name
from app.errors import UserError

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"


# Whole floats with at most so many values are classes.
FEW = 20
# Names that a summary shows.
SHOWN = 8


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

    def summary(self) -> str:
        """Say in a few words what is predicted."""
        if self.problem == REGRESSION:
            columns = self.train_values.reshape(len(self.train_values), -1).T
            ranges = [f"{n} from {v.min():g} to {v.max():g}" for n, v in zip(self.names, columns, strict=True)]
            return f"regression: {_some(ranges)}"
        kind = "labels, any number of them a row" if self.problem == MULTI else "classes"
        if self.whole_floats:
            kind += ", whole numbers (--data.problem regression predicts amounts)"
        return f"{len(self.names):,} {kind}: {_some(self.names)}"


def read_labels(train, evaluation, config) -> Labels:
    """Read the label columns of two `datasets.Dataset`s; config has `label` and `problem` (see TextData).

    Classes are those of the training table: in the order of a ClassLabel where there is one, else sorted. A label that
    is missing, or that only the evaluation table has, is a UserError.
    """
    columns, tables = tuple(config.label), (train, evaluation)
    for table in tables:
        check_columns(table, columns, "label")
    problem = problem_of(tables, columns, config.problem)
    if problem == REGRESSION or len(columns) > 1:
        read = _floats if problem == REGRESSION else _flags
        values = [np.stack([read(LabelColumn(table, name)) for name in columns], axis=1) for table in tables]
        if problem == REGRESSION and len(columns) == 1:
            values = [column[:, 0] for column in values]
        return Labels(problem, list(columns), *values)

    lists = [LabelColumn(table, columns[0]) for table in tables]
    if problem == MULTI and (width := _vector_width(lists[0])):
        return Labels(problem, [str(i) for i in range(width)], *(_vectors(column, width) for column in lists))
    whole = _is_float(lists[0].items.type)
    classes = _classes(lists[0])
    names = [str(name) for name in classes.to_pylist()]
    codes = [_codes(column, classes) for column in lists]
    if problem == MULTI:
        rows = [column.spread(items, len(names)) for column, items in zip(lists, codes, strict=True)]
        return Labels(problem, names, *rows)
    if len(np.unique(codes[0])) < 2:
        raise UserError(
            f"--data.label {columns[0]}: all training rows have the label {names[codes[0][0]]}; a classifier needs two"
        )
    return Labels(problem, names, *codes, whole)


def _some(names: Sequence[str]) -> str:
    shown = [name if len(name) <= 30 else f"{name[:27]}..." for name in names[:SHOWN]]
    return ", ".join(shown) + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


def only_of_their_class(table, out: np.ndarray, config) -> np.ndarray:
    """Mark the first row of every class that only rows in the mask `out` have: a classifier must be trained on it."""
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


def problem_of(tables: Sequence, columns: Sequence[str], wanted: str) -> str:
    """Return the problem that the columns' types stand for, or the wanted one when they can be read as that."""
    train = tables[0]
    kind = train.data.schema.field(columns[0]).type
    if len(columns) > 1:
        possible = (MULTI, REGRESSION)
    elif is_list(kind):
        possible = (MULTI,)
    elif is_text(kind) or hasattr(train.features[columns[0]], "names"):
        possible = (SINGLE,)
    elif is_number(kind):
        amounts = _is_float(kind) and not all(_few_whole(table, columns[0]) for table in tables)
        possible = (REGRESSION, SINGLE) if amounts else (SINGLE, REGRESSION)
    else:
        raise UserError(
            f"--data.label {columns[0]} of {name_of(train)} holds {kind}: labels are integers, strings, floats or "
            f"lists of them; {', '.join(train.column_names)} are there"
        )
    if wanted == "auto":
        return possible[0]
    if wanted not in possible:
        what = f"{len(columns)} columns" if len(columns) > 1 else str(kind)
        fits = " or ".join(possible)
        raise UserError(f"--data.problem {wanted}: --data.label {' '.join(columns)} is {what}, which is for {fits}")
    return wanted


def _few_whole(table, name: str) -> bool:
    """Tell whether a column of numbers has but few whole ones: pandas writes integers as floats where some miss."""
    import pyarrow.compute as pc

    if not is_number(table.data.schema.field(name).type):
        return True  # no other number either; what it is instead is said where it is read
    values = np.asarray(pc.unique(table.select_columns([name]).with_format("arrow")[:].column(name)).drop_null())
    return len(values) <= FEW and bool((np.isfinite(values) & (np.floor(values) == values)).all())


def _classes(train: LabelColumn):
    """Return the classes as an Arrow array, in the order of the model's outputs."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if train.names:
        return pa.array(train.names, pa.string())
    if _is_float(train.items.type):
        uneven = np.asarray(train.items) % 1 != 0
        if uneven.any():
            row, value = train.first(uneven)
            raise UserError(f"--data.label {train.name}: {row} has {value}, no class; use --data.problem regression")
        train.items = train.items.cast(pa.int64())
    distinct = sorted(pc.unique(train.items).to_pylist())
    if not distinct:
        raise UserError(f"--data.label {train.name}: no training row has a label")
    return pa.array(distinct, train.items.type)


def _codes(column: LabelColumn, classes) -> np.ndarray:
    """Return the position of each item among the classes, as int64."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        items = column.items.cast(classes.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UserError(
            f"--data.label {column.name} is {classes.type} in the training data, {column.items.type} in the evaluation "
            "data: give both the same labels"
        ) from None
    codes = pc.index_in(items, value_set=classes)
    if codes.null_count:
        row, value = column.first(np.asarray(codes.is_null()))
        raise UserError(
            f"--data.label {column.name}: {row} has the label {value!r}, which no training row has; leave such "
            "rows out, or add training rows with it"
        )
    return np.asarray(codes).astype(np.int64)


def _vector_width(column: LabelColumn) -> int:
    """Return the length of the rows' vectors of 0 and 1, or 0 when their lists name classes instead.

    Rows of one length, two or more, that hold but 0 and 1 are vectors: as lists of classes they would all name the
    same two. Lists of floats can be nothing else.
    """
    kind, width = column.items.type, int(column.counts.max(initial=0))
    if column.names or not is_number(kind):
        return 0
    vectors = bool(width) and (column.counts == width).all() and np.isin(column.items, (0, 1)).all()
    if _is_float(kind) and not vectors:
        raise UserError(
            f"--data.label {column.name}: lists of {kind} must be vectors of 0 and 1, all of one length; name classes "
            "by integers or strings"
        )
    return width if vectors and (width > 1 or _is_float(kind)) else 0


def _vectors(column: LabelColumn, width: int) -> np.ndarray:
    if (wrong := column.counts != width).any():
        row = int(np.flatnonzero(wrong)[0])
        raise UserError(
            f"--data.label {column.name}: {row_name(column.table, row)} has {column.counts[row]} values, others {width}"
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


def _is_float(kind) -> bool:
    import pyarrow.types as types

    return types.is_floating(kind)
