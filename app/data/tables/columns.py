"""Columns of a table: whether they exist, what they hold, and which of their values are missing."""

import bisect
import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from app.errors import UserError
from app.sampling.pieces import Pieces

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

ANSWERS = ("chosen", "rejected")
"""Flags of the columns of two answers, of which one is preferred."""


TEXT_PIECES = ["text", "begins", "ends"]
"""Columns of txt files that are read as plain text."""
OF_TEXTS = ("text", "label", "chosen", "rejected", "prompt", "completion", "messages")
"""Flags of columns of those recipes that have --data.txt."""
PLACE = ("file", "lines")
"""Columns that readers of sentences add for errors: the file of each one, and the lines of its tokens, from 1."""


BETWEEN = "\x1e"
"""Parts the name of a table from those of its pieces: Unicode's sign between records, which no name has."""


CHUNK = ", chunk at byte "
"""What stands in the words by which errors name a chunk of a file, whose rows have numbers of their own."""


class Piece(NamedTuple):
    """Some neighbouring rows of a table that was put together from several places."""

    start: int
    """The number of its first row in the table."""
    name: str
    """The words by which errors name it."""


def name_table(table: "Dataset", origin: str, pieces: Sequence[Piece] = ()) -> "Dataset":
    """Set the words by which errors name a table; selections of it keep them.

    Args:
        pieces: of which the table consists, if its rows have other numbers there.
    """
    # In the description, because it is all that selections keep.
    table.info.description = BETWEEN.join([origin, *(f"{start} {name}" for start, name in pieces)])
    return table


def name_of(table: "Dataset") -> str:
    """Return the words by which errors name a table, such as `--data.eval-path dev.csv`."""
    return table.info.description.partition(BETWEEN)[0] or f"split {table.split or 'train'}"


def pieces_of(table: "Dataset") -> list[Piece]:
    """Return the pieces that `name_table` was given."""
    told = (piece.split(" ", 1) for piece in table.info.description.split(BETWEEN)[1:])
    return [Piece(int(start), name) for start, name in told]


def check_columns(table: "Dataset", columns: Sequence[str], flag: str) -> None:
    """Raise a UserError if a table lacks one of the columns that --data.FLAG names."""
    which = "keys" if table.info.builder_name == "json" else "columns"
    have = f"its {which} are {', '.join(table.column_names)}"
    if not columns:
        raise UserError(f"--data.{flag} names no column of {name_of(table)}; {have}")
    for i, name in enumerate(columns):
        if name in columns[:i]:
            raise UserError(f"--data.{flag} names the column {name} twice")
        if name not in table.column_names:
            what = which.removesuffix("s")
            raise UserError(
                f"--data.{flag} {name}: no such {what} in {name_of(table)}; {have}{_hint(table, name, flag)}"
            )


def _hint(table: "Dataset", name: str, flag: str) -> str:
    """Say what may be wrong if a table lacks a column: its name, or how the table was read."""
    if table.column_names == TEXT_PIECES:
        return plain_text(flag in OF_TEXTS)
    if flag == "tags" and table.column_names == ["tokens", *PLACE]:
        return " (the file has one column: write a token and its tag in each line, with a space between)"
    if told := other_separator(table.column_names):
        return told
    lower = {column.lower(): column for column in table.column_names}
    cutoff = 0.8 if flag in ANSWERS else 0.6  # `chosen` is like `lose`, which means the opposite
    if near := difflib.get_close_matches(name.lower(), lower, n=1, cutoff=cutoff):
        return f"; did you mean --data.{flag} {lower[near[0]]}?"
    if flag == "boxes":
        return (
            " (boxes are read from COCO's json files, YOLO's data.yaml, and Pascal VOC's xml files; or from the column "
            "of a table that --data.boxes names)"
        )
    if table.info.builder_name in ("jsonl", "tar"):  # streamed
        return ""
    if "Image" in {type(feature).__name__ for feature in table.features.values()}:
        return " (in a folder of images, each class is a subfolder, or a column of a metadata.csv)"
    if table.info.builder_name in ("json", "parquet"):
        return ""
    nameless = " (if these are values, the file has no header line: name its columns with --data.columns)"
    if table.info.builder_name == "generator":  # files of sentences and parallel ones have no header in any case
        nameless = ""
    return f"; name the right one with --data.{flag}{nameless}"


def other_separator(names: Sequence[str]) -> str:
    """Say that the one name of a csv file's columns is several, parted by another sign: a clause to end a message."""
    separators = [mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]]
    if not separators:
        return ""
    return f" (in csv the separator must be a comma, here it seems to be {separators[0]!r}: convert the file)"


def plain_text(has_flag: bool) -> str:
    """Say why a .txt file has not the columns of a table; `has_flag`: the recipe has --data.txt."""
    flag = ", or give --data.txt table" if has_flag else ""
    return f" (.txt files are read as plain text, without labels: if this is a table, name it .tsv{flag})"


def check_texts(table: "Dataset", name: str, flag: str = "text") -> None:
    """Raise a UserError if the column that --data.FLAG names does not hold texts, or if a text is missing."""
    import pyarrow.types as types

    kind = table.data.schema.field(name).type
    # Integers count as texts, because a csv file does not say which of the two it means.
    if not (is_text(kind) or types.is_integer(kind)):
        raise UserError(
            f"--data.{flag} {name} of {held(table, name)}, which is no text; "
            f"its columns are {', '.join(table.column_names)}"
        )
    if table.data.column(name).null_count:  # in the whole table, of which this may be a selection
        column = table.select_columns([name]).with_format("arrow")[:].column(name)
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy())[0])
            if column.null_count == len(column):
                raise UserError(
                    f"--data.{flag} {name}: no row of {name_of(table)} has a text: its file may have no such column; "
                    "leave this file out, or give it the column"
                )
            raise UserError(
                f"--data.{flag} {name}: {row_name(table, row)} has no text; leave such rows out of the data"
            )


def held(table: "Dataset", name: str) -> str:
    """Name a table, and say what a column holds: its type, or, of several types, the first two rows that differ."""
    kind = table.data.schema.field(name).type
    if not is_mixed(kind) and not (is_list(kind) and is_mixed(kind.value_type)):
        return f"{name_of(table)} holds {kind}"
    first: tuple[int, type] | None = None
    for row, value in enumerate(table.select_columns([name])[name]):
        if value is None:
            continue
        if first is None:
            first = row, type(value)
        elif type(value) is not first[1]:
            told = [f"{_WORDS.get(each, each.__name__)} in row {at}" for at, each in (first, (row, type(value)))]
            return f"{name_of(table)} holds {' and '.join(told)} (counted from 0), and needs one type for all"
    return f"{name_of(table)} holds lists or objects that are not alike"


_WORDS = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def is_mixed(kind: "pa.DataType") -> bool:
    """Tell whether an Arrow type is the one of json, for values that have no common type."""
    import pyarrow as pa

    return isinstance(kind, pa.BaseExtensionType)


def row_name(table: "Dataset", row: int) -> str:
    """Name a row by its number in the data, counted from 0, also if the table is a selection of the data."""
    if table._indices is not None:
        row = table._indices.column(0)[row].as_py()
    pieces = pieces_of(table)
    if (number := bisect.bisect_right([piece.start for piece in pieces], row)) > 0:
        return _of_piece(row - pieces[number - 1].start, pieces[number - 1].name)
    return _of_piece(row, name_of(table))


def _of_piece(row: int, name: str) -> str:
    return f"{counted(row, within=' in the chunk' if CHUNK in name else '')} of {name}"


def amount(number: int, thing: str) -> str:
    """Say how many of something there are."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def counted(*rows: int, within: str = "") -> str:
    """Name rows by their numbers, and say from where these count; `within` ends these words."""
    return f"row{'s' * (len(rows) > 1)} {' and '.join(map(str, rows))} (counted from 0{within})"


class LabelColumn:
    """The values of a label column. If they are lists, `items` has all elements, and `counts` how many each row has."""

    def __init__(self, table: "Dataset", name: str, flag: str = "label"):
        """Read the column that --data.FLAG names; raise a UserError if a value is missing."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self.table, self.name, self.flag = table, name, f"--data.{flag} {name}"
        values = table.select_columns([name]).with_format("arrow")[:].column(name)
        self.items = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
        if pa.types.is_string_view(self.items.type):  # for which Arrow has few functions
            self.items = self.items.cast(pa.string())
        self.counts = np.ones(len(table), np.int64)
        feature = table.features[name]
        self.in_lists = is_list(self.items.type)
        if self.in_lists:
            self._refuse_missing()
            self.counts = np.asarray(pc.list_value_length(self.items), np.int64)
            self.items, feature = self.items.flatten(), feature.feature
        self.names = getattr(feature, "names", None)
        if self.names:  # a ClassLabel: -1 stands for a label that is withheld
            codes = np.asarray(self.items.fill_null(-1))
            is_labelled = (codes >= 0) & (codes < len(self.names))
            places = pa.array(np.where(is_labelled, codes, 0), mask=~is_labelled)
            self.items = pa.array(self.names, pa.string()).take(places)
        if pa.types.is_floating(self.items.type):
            self.items = pa.array(np.asarray(self.items.fill_null(np.nan)), from_pandas=True)  # NaN is missing too
        self._refuse_missing()

    def first(self, which: np.ndarray) -> tuple[str, object]:
        """Return the name of the row, or the line, of the first item that `which` marks; and the item."""
        item = int(np.flatnonzero(which)[0])
        return self._row_of(item), self.items[item].as_py()

    def spread(self, codes: np.ndarray, classes: int) -> np.ndarray:
        """Return rows of 0 and 1 for the codes of all items."""
        values = np.zeros((len(self.counts), classes), np.float32)
        values[np.repeat(np.arange(len(self.counts)), self.counts), codes] = 1
        return values

    def numbers(self) -> np.ndarray:
        """Return the items as float32."""
        if not is_number(self.items.type):
            raise UserError(f"{self.flag} of {held(self.table, self.name)}, which is not a number")
        return np.asarray(self.items).astype(np.float32)

    def _refuse_missing(self) -> None:
        if self.items.null_count:
            row = self._row_of(int(np.flatnonzero(np.asarray(self.items.is_null()))[0]))
            raise UserError(f"{self.flag}: {row} has no label; leave such rows out of the data")

    def _row_of(self, item: int) -> str:
        rows = Pieces.of(self.counts)
        row = int(rows.piece_of(item))
        if set(PLACE) <= set(self.table.column_names):
            file, lines = (self.table[row][name] for name in PLACE)
            place = item - int(rows.first[row])
            if isinstance(lines, list) and len(lines) == self.counts[row]:
                return f"line {lines[place]} of {file}"
        return row_name(self.table, row)


def is_text(kind: "pa.DataType") -> bool:
    """Tell whether an Arrow type is one of strings."""
    import pyarrow.types as types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def is_list(kind: "pa.DataType") -> bool:
    """Tell whether an Arrow type is one of lists."""
    import pyarrow.types as types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_number(kind: "pa.DataType") -> bool:
    """Tell whether an Arrow type is one of numbers, or of true and false."""
    import pyarrow.types as types

    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def is_float(kind: "pa.DataType") -> bool:
    """Tell whether an Arrow type is one of floats."""
    import pyarrow.types as types

    return types.is_floating(kind)
