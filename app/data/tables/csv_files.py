"""Tables from csv and tsv files: their columns' names, their quotes, and which columns are numbers."""

import csv
from collections.abc import Sequence
from pathlib import Path

from app.data.cache import fingerprint, remember
from app.data.tables.reading import open_text, unreadable
from app.errors import UserError

# A longer one is what follows a quote that nothing closes.
LONGEST_QUOTED = 2**24
# Lines that tell whether the first one is a header.
LOOKED_AT = 1000


def csv_options(files: Sequence[str], columns: Sequence[str], folder: Path, flag: str) -> dict:
    """Choose how pandas reads csv: every column as text, which `with_numbers` turns into numbers where all are.

    pandas would decide chunk by chunk, turn the words NA, None and null into missing values, and take the first
    column for an index where rows are longer than the header.

    Args:
        folder: where to remember what only a look at all of the files can tell.
        flag: the one that names the files, for errors.
    """
    import datasets

    tabs = Path(files[0].lower().removesuffix(".gz")).suffix == ".tsv"
    quoted = not tabs or remember(
        folder / f"quoted-{fingerprint(*files)}.json", lambda: all(quotes_balance(file) for file in files)
    )
    options = {"sep": "\t" if tabs else ",", "quoting": csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE}
    options |= {"keep_default_na": False, "na_values": [""]}
    names = _column_names(files[0], columns, options, flag)
    for file in files[1:]:
        if (others := _column_names(file, columns, options, flag)) != names:
            raise UserError(f"{flag}: {files[0]} has columns {', '.join(names)}, but {file} {', '.join(others)}")
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return {**options, "column_names": names, "header": None if columns else 0, "features": features}


def quotes_balance(file: str) -> bool:
    """Tell whether the quotes of a tsv file are those of csv: around whole values, doubled inside them.

    They are plain characters where a value would go on behind its closing quote, where rows would not have the same
    number of values, and where each line by itself has that number although quotes would join some of them.
    """
    limit = csv.field_size_limit(LONGEST_QUOTED)
    try:
        with open_text(file, newline="") as stream:
            rows = csv.reader(stream, delimiter="\t", strict=True)
            width, joined = len(next(rows, [])), False
            for number, row in enumerate(rows, start=2):
                if row and len(row) != width:
                    return False
                joined = joined or rows.line_num > number
        if not joined:
            return True
        with open_text(file) as stream:
            return any(line.strip() and line.count("\t") != width - 1 for line in stream)
    except csv.Error:
        return False
    except UnicodeDecodeError:  # said by who reads it
        return True
    finally:
        csv.field_size_limit(limit)


def _column_names(file: str, columns: Sequence[str], options: dict, flag: str) -> list[str]:
    """Return the names of a csv file's columns: the given ones, or else those in its header line."""
    import pandas

    try:
        # Two lines: pandas raises when the second is longer than the first.
        lines = pandas.read_csv(file, header=None, nrows=2, dtype=object, **options).fillna("").to_numpy().tolist()
    except pandas.errors.EmptyDataError:
        raise UserError(f"{flag} {file} is empty") from None
    except (pandas.errors.ParserError, UnicodeDecodeError) as error:
        raise unreadable(flag, file, error) from error
    first = [name.strip() for name in lines[0]]
    if columns and len(columns) != len(first):
        raise UserError(
            f"--data.columns has {len(columns)} names ({' '.join(columns)}), but {file} {len(first)} columns"
        )
    if columns and sorted(columns) == sorted(first):
        raise UserError(f"--data.columns: the first line of {file} has these names already; leave out flag or line")
    if columns:
        _refuse_header(file, columns, options)
    names = list(columns) or [name or f"Unnamed: {i}" for i, name in enumerate(first)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        hint = "" if columns else "; if it has no header line, name its columns with --data.columns"
        raise UserError(f"{'--data.columns' if columns else file} has two columns named {', '.join(twice)}{hint}")
    return names


def _refuse_header(file: str, columns: Sequence[str], options: dict) -> None:
    """Refuse --data.columns for a file whose first line looks like a header: it would become a row."""
    import pandas

    try:
        rows = pandas.read_csv(file, header=None, nrows=LOOKED_AT, dtype=object, **options)
    except (pandas.errors.ParserError, UnicodeDecodeError):  # said by who reads all of it
        return
    first = [str(value).strip() for value in rows.iloc[0].fillna("")]
    lower = [name.lower() for name in columns]
    named = [value for value in first if value.lower() in lower]
    if named or _tells_columns(first, rows.iloc[1:]):
        why = f"has the name {named[0]}" if named else "is unlike all the others"
        raise UserError(
            f"--data.columns: the first line of {file} seems to be a header, which would become a row: it {why} "
            f"({', '.join(first)}). If it is a row, move it down: only the first line can be taken for a header. Else "
            "leave out the flag and give the names that it has, or remove the line"
        )


def _tells_columns(first: list[str], others) -> bool:
    """Tell whether a first line gives the columns' names.

    True if its fields are short and none is a number, and some column holds only numbers below it, or only a few values
    again and again (classes) of which its field is none.
    """
    if not all(first) or len(set(first)) < len(first) or any(map(_is_number, first)):
        return False
    if any(len(word.split()) > 3 for word in first):  # a text, and no name
        return False
    for word, (_, column) in zip(first, others.items(), strict=True):
        counts = column.dropna().str.strip().value_counts()
        if counts.empty or word in counts.index:
            continue
        if all(map(_is_number, counts.index)):
            return True
        if len(word.split()) == 1 and counts.min() >= 3 and counts.sum() >= 10 * len(counts):
            return True
    return False


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def with_numbers(table):
    """Turn the text columns of a table in which every value is a number into integers or floats.

    A column with leading zeros, such as 007, stays text, and so do integers not written as Python writes them.
    """
    import datasets
    from datasets.table import InMemoryTable

    arrow = table.data.table
    for position, name in enumerate(arrow.column_names):
        if (numbers := _numbers(arrow.column(position))) is not None:
            arrow = arrow.set_column(position, name, numbers)
    # Text columns stay memory-mapped. The metadata hold the old types, which datasets would believe.
    arrow = InMemoryTable(arrow.replace_schema_metadata(None))
    return datasets.Dataset(arrow, split=table.split, fingerprint=fingerprint(table._fingerprint, "with_numbers"))


def _numbers(column):
    """Return a text column as numbers; None when any value is something else, or all are missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.null_count == len(column):
        return None
    if pc.any(pc.match_substring_regex(column, r"^(\+|-?0[0-9])")).as_py():
        return None
    for kind in (pa.int64(), pa.float64()):
        try:
            numbers = pc.cast(column, kind)
        except pa.ArrowInvalid:
            continue
        same = pc.equal(pc.cast(numbers, pa.string()), column) if kind == pa.int64() else pc.is_finite(numbers)
        return numbers if pc.all(same).as_py() else None
    return None
