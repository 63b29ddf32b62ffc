"""Classes of a label column, and the position of each label among them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from app.data.tables.columns import LabelColumn, is_float, is_text
from app.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

# Names in a summary.
SHOWN = 8


def coded(columns: Sequence[LabelColumn], class_names: Sequence[str]) -> tuple[list[str], list[str], list[np.ndarray]]:
    """Find the classes of columns, of which the first one is trained on.

    Args:
        class_names: of a flag or a model, if one says them.

    Returns:
        Their names, in the order of the model's outputs; what the data call them; and the position of each item among
        them, int64, by column.
    """
    classes = _as_in_data(columns, class_names) if class_names else _of_training(columns[0])
    in_data = [str(name) for name in classes.to_pylist()]
    return list(class_names) or in_data, in_data, [_codes(column, classes, class_names) for column in columns]


def _of_training(train: LabelColumn) -> "pa.Array":
    """Return the classes as an Arrow array, in the order of the model's outputs."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if train.names:
        return pa.array(train.names, pa.string())
    if is_float(train.items.type):
        uneven = np.asarray(train.items) % 1 != 0
        if uneven.any():
            row, value = train.first(uneven)
            fix = (
                "; use --data.problem regression"
                if not train.in_lists and train.flag.startswith("--data.label")
                else ""
            )
            raise UserError(f"{train.flag}: {row} has {value}, which is no class{fix}")
        train.items = train.items.cast(pa.int64())
    distinct = sorted(pc.unique(train.items).to_pylist())
    if not distinct:
        raise UserError(f"{train.flag}: no training row has a label")
    if is_text(train.items.type):
        _refuse_blanks(train, distinct)
    return pa.array(distinct, train.items.type)


def _refuse_blanks(train: LabelColumn, names: Sequence[str]) -> None:
    """Refuse classes whose names differ only in blanks at their ends, as spreadsheets have them."""
    plain: dict[str, str] = {}
    for name in names:
        other = plain.setdefault(name.strip(), name)
        if other != name:
            odd = name if name != name.strip() else other
            row, _ = train.first(np.array([value == odd for value in train.items.to_pylist()]))
            raise UserError(
                f"{train.flag}: the classes {other!r} and {name!r} differ only in blanks at their ends, in {row} for "
                "example: write them alike"
            )


def _as_in_data(columns: Sequence[LabelColumn], class_names: Sequence[str]) -> "pa.Array":
    """Return the given classes as the columns name them: by their names, or by their numbers.

    Texts may differ from the names in upper and lower case, if no two names then are the same; the columns' items
    become the names.
    """
    import pyarrow as pa

    kind = columns[0].items.type
    if is_text(kind):
        spelt = {name.casefold(): name for name in class_names}
        for column in columns if len(spelt) == len(class_names) else ():
            texts = _as_written(column.items).dictionary_encode()
            names = [spelt.get(text.casefold(), text) for text in texts.dictionary.to_pylist()]
            column.items = pa.array(names, pa.string()).take(texts.indices)
        return pa.array(class_names, pa.string())
    try:
        return pa.array(class_names, pa.string()).cast(pa.bool_() if pa.types.is_boolean(kind) else pa.int64())
    except pa.ArrowInvalid:
        return pa.array(range(len(class_names)), pa.int64())


def _codes(column: LabelColumn, classes: "pa.Array", class_names: Sequence[str] = ()) -> np.ndarray:
    """Return the position of each item among the classes, as int64."""
    import pyarrow.compute as pc

    items, kinds = column.items, (classes.type, column.items.type)
    if items.type != classes.type:
        items, classes = _as_written(items), _as_written(classes)
    codes = pc.index_in(items, value_set=classes)
    if codes.null_count:
        row, value = column.first(np.asarray(codes.is_null()))
        if class_names:
            strange = pc.unique(items.filter(codes.is_null())).to_pylist()
            raise UserError(
                f"{column.flag}: {row} has a label that is none of the {len(class_names)} classes, which are "
                f"{some(class_names)}. Such labels: {some([str(each) for each in strange])}. Leave these rows out, or "
                "name the classes as the data do with --data.classes, in the order of the model's outputs"
            )
        differ = f", as a {kinds[1]} where the training data have {kinds[0]}" if kinds[0] != kinds[1] else ""
        raise UserError(
            f"{column.flag}: {row} has the label {value!r}{differ}, which no training row has (they have "
            f"{some([str(each) for each in classes.to_pylist()])}); leave such rows out, or add training rows with it"
        )
    return np.asarray(codes).astype(np.int64)


def _as_written(values: "pa.Array") -> "pa.Array":
    """Return labels as the texts that a csv file would have for them, so that 1, 1.0 and "1" are one label.

    The text "007" is another label than the number 7.
    """
    import pyarrow as pa

    if is_float(values.type):
        numbers = np.asarray(values)
        if (numbers % 1 == 0).all() and (np.abs(numbers) < 2**53).all():
            values = values.cast(pa.int64())
    return values.cast(pa.string())


def some(names: Sequence[str]) -> str:
    """Name the first few of them."""
    shown = [name if len(name) <= 30 else f"{name[:27]}..." for name in names[:SHOWN]]
    return ", ".join(shown) + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")
