"""Tables from csv and tsv files, which pandas reads for datasets: names of columns, quotes, and which are numbers.

Left alone, pandas chooses the type of a column chunk by chunk, so that 007 and 12 become text in one chunk and numbers
in another; it reads the words NA, None and null as missing values, and takes the first column for an index where rows
are longer than the header. So every column is read as text, and becomes numbers where all of its values are numbers.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.data.cache import remember
from app.data.reading import DAMAGE, is_number, open_text, reading, unreadable
from app.data.tables.columns import other_separator
from app.data.tables.files import extension
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    import pandas
    import pyarrow
    from datasets import Dataset

LONGEST_QUOTED = 2**24
"""Characters of a quoted value; a longer one is what follows a quote that nothing closes."""
AT_ONCE = 2**20
"""Characters of a file that are read together where only their being read counts."""
ROWS_AT_ONCE = 10_000
HEADER_ROWS = 1000
"""Rows that show whether the first line is a header."""


def csv_groups(
    files: dict[str, list[str]], columns: Sequence[str], folder: Path, flag: str
) -> list[tuple[dict[str, list[str]], dict]]:
    """Group splits with the same columns, and choose the options with which datasets reads each group of csv files.

    Args:
        files: of each split.
        columns: names of the columns of files without a header line.
        folder: where to remember what only a look at all of the files can tell.
        flag: the one that names the files, for errors.
    """
    import datasets

    every = [file for names in files.values() for file in names]
    remember(folder / f"read-{key_of(*every)}.json", lambda: _read_through(flag, every))
    options = {"sep": ",", "quoting": csv.QUOTE_MINIMAL, "keep_default_na": False, "na_values": [""]}
    if has_tabs(flag, every[0]):
        answer_file = folder / f"quoted-{key_of(*every)}.json"
        quoted = remember(answer_file, lambda: all(map(quotes_balance, every)))
        options |= {"sep": "\t", "quoting": csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE}
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for split, (first, *others) in files.items():
        names = _column_names(first, columns, options, flag)
        for file in others:
            if (other_names := _column_names(file, columns, options, flag)) != names:
                raise UserError(f"{flag}: {first} has columns {', '.join(names)}, but {file} {', '.join(other_names)}")
        groups.setdefault(tuple(names), {})[split] = files[split]
    options |= {"header": None if columns else 0}
    return [
        (
            group,
            {
                **options,
                "column_names": list(names),
                "features": datasets.Features({name: datasets.Value("string") for name in names}),
            },
        )
        for names, group in groups.items()
    ]


def _read_through(flag: str, files: Sequence[str]) -> list[str]:
    """Refuse the first file that is damaged or no text, which pandas would not name, and perhaps not see."""
    for file in files:
        with reading(flag, file), open_text(file) as stream:
            while stream.read(AT_ONCE):
                pass
    return list(files)


def damaged(flag: str, files: Sequence[str], options: dict) -> UserError | None:
    """Return the error of the first file that pandas cannot read with options of `csv_groups`, by itself."""
    import pandas

    for file in files:
        try:
            for _ in pandas.read_csv(file, chunksize=ROWS_AT_ONCE, dtype=object, **_for_pandas(options)):
                pass
        except (*DAMAGE, pandas.errors.ParserError) as error:
            return _told(flag, file, error)
    return None


def _told(flag: str, file: str, error: BaseException) -> UserError:
    """Return the error of a file that pandas cannot read: of a line with too many values, what may be wrong with it."""
    uneven = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
    if uneven is None:
        return unreadable(flag, file, error)
    before, line, there = uneven.groups()
    tabs = has_tabs(flag, file)
    advice = f": a value with {'a tab' if tabs else 'a comma'} in it must stand in quotes"
    if before == "1" and not tabs:  # the first line has no comma
        advice = other_separator([_first_line(flag, file)]) or advice
    wide = f"line {line} has {there} values, and those before it have {before}"
    return UserError(f"{flag} {file}: cannot be read: {wide}{advice}")


def _for_pandas(options: dict) -> dict:
    """Return the options under the names that pandas itself gives them."""
    return {{"column_names": "names"}.get(name, name): value for name, value in options.items() if name != "features"}


def has_tabs(flag: str, file: str) -> bool:
    """Tell whether tabs part the values of a file: by its name, or of a .txt file by its first line."""
    if extension(file) != ".txt":
        return extension(file) == ".tsv"
    return "\t" in _first_line(flag, file)


def _first_line(flag: str, file: str) -> str:
    """Return the first line of a file that is not empty."""
    with reading(flag, file), open_text(file) as stream:
        return next((line for line in stream if line.strip()), "")


def quotes_balance(file: str) -> bool:
    """Tell whether the quotes of a tsv file are those of csv: around whole values, doubled inside them.

    They are plain characters where a value would go on after its closing quote, where rows would not all have the same
    number of values, and where each line by itself has that number although quotes would join some of them.
    """
    limit = csv.field_size_limit(LONGEST_QUOTED)
    tabs: set[int] = set()

    def counted(lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            if line.strip():
                tabs.add(line.count("\t"))
                yield line

    try:
        with open_text(file, newline="") as stream:
            rows = csv.reader(counted(stream), delimiter="\t", strict=True)
            widths = Counter(map(len, rows))
        joined = rows.line_num > widths.total()
        return len(widths) < 2 and not (joined and tabs == {width - 1 for width in widths})
    except csv.Error:
        return False
    finally:
        csv.field_size_limit(limit)


def _column_names(file: str, columns: Sequence[str], options: dict, flag: str) -> list[str]:
    """Return the names of a csv file's columns: the given ones, or else those in its header line."""
    import pandas

    with reading(flag, file):
        try:
            # Two lines at least: pandas raises when the second is longer than the first.
            count = HEADER_ROWS if columns else 2
            rows = pandas.read_csv(file, header=None, nrows=count, dtype=object, **options)
        except pandas.errors.EmptyDataError:
            raise UserError(f"{flag} {file} is empty") from None
        except pandas.errors.ParserError as error:
            raise _told(flag, file, error) from error
    first = [name.strip() for name in rows.iloc[0].fillna("")]
    if columns:
        _refuse_header(file, columns, first, rows.iloc[1:])
    names = list(columns) or [name or f"Unnamed: {i}" for i, name in enumerate(first)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        hint = "" if columns else "; if it has no header line, name its columns with --data.columns"
        raise UserError(f"{'--data.columns' if columns else file} has two columns named {', '.join(twice)}{hint}")
    return names


def _refuse_header(file: str, columns: Sequence[str], first: list[str], others: "pandas.DataFrame") -> None:
    """Refuse --data.columns of another number, or for a file whose first line looks like a header."""
    if len(columns) != len(first):
        raise UserError(
            f"--data.columns has {len(columns)} names ({' '.join(columns)}), but {file} has {len(first)} columns"
        )
    lower = [name.lower() for name in columns]
    named = [value for value in first if value.lower() in lower]
    if named or _tells_columns(first, others):
        why = f"has the name {named[0]}" if named else "is unlike all the others"
        raise UserError(
            f"--data.columns: the first line of {file} seems to be a header, which would become a row: it {why} "
            f"({', '.join(first)}). If it is a row, move it down: only the first line can be taken for a header. Else "
            "leave out the flag and give the names in the line, or remove the line"
        )


def _tells_columns(first: list[str], others: "pandas.DataFrame") -> bool:
    """Tell whether a first line gives the columns' names.

    It does if its values are short and none is a number, and some column holds only numbers below it, or only a few
    values again and again (classes) and not this one.
    """
    # A value of more than three words is a text and no name.
    if not all(first) or len(set(first)) < len(first) or any(is_number(w) or len(w.split()) > 3 for w in first):
        return False
    for word, (_, column) in zip(first, others.items(), strict=True):
        counts = column.dropna().str.strip().value_counts()
        if counts.empty or word in counts.index:
            continue
        classes = len(word.split()) == 1 and counts.min() >= 3 and counts.sum() >= 10 * len(counts)
        if classes or all(map(is_number, counts.index)):
            return True
    return False


def with_numbers(tables: "dict[str, Dataset]", words: Sequence[str] = ()) -> "dict[str, Dataset]":
    """Turn the text columns in which every value of all splits is a number into integers or floats.

    A column with leading zeros, such as 007, stays text, and so do integers not written as Python writes them.

    Args:
        words: columns that stay text whatever they hold.
    """
    import datasets
    import pyarrow as pa
    from datasets.table import InMemoryTable

    arrow = {split: table.data.table for split, table in tables.items()}
    for name in dict.fromkeys(name for part in arrow.values() for name in part.column_names):
        if name in words:
            continue
        have = [split for split, part in arrow.items() if name in part.column_names]
        whole = pa.chunked_array([chunk for split in have for chunk in arrow[split].column(name).chunks], pa.string())
        if (numbers := _numbers(whole)) is None:
            continue
        start = 0
        for split in have:
            part = arrow[split]
            column = numbers.slice(start, len(part))
            arrow[split] = part.set_column(part.column_names.index(name), name, column)
            start += len(part)
    typed = {}
    for split, table in tables.items():
        # Text columns stay memory-mapped. The metadata hold the old types, which datasets would believe.
        part = InMemoryTable(arrow[split].replace_schema_metadata(None))
        key = key_of(table._fingerprint, "with_numbers", part.schema)
        typed[split] = datasets.Dataset(part, split=table.split, fingerprint=key)
    return typed


def _numbers(column: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray | None":
    """Return a text column as numbers; None when any value is something else, or all are missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.null_count == len(column) or pc.any(pc.match_substring_regex(column, r"^(\+|-?0[0-9])")).as_py():
        return None
    for kind in (pa.int64(), pa.float64()):
        try:
            numbers = pc.cast(column, kind)
        except pa.ArrowInvalid:
            continue
        same = pc.equal(pc.cast(numbers, pa.string()), column) if kind == pa.int64() else pc.is_finite(numbers)
        return numbers if pc.all(same).as_py() else None
    return None
