"""Tables from csv, tsv, json, jsonl and parquet files."""

import csv
import difflib
import glob
import os
from collections.abc import Sequence
from pathlib import Path

from app.data.cache import fingerprint
from app.errors import UserError

# Extension to the reader of datasets.
READERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
FORMATS = "csv, tsv, json, jsonl and parquet files are read, the first four with .gz behind the name too"


def is_file_name(path: str) -> bool:
    """Tell whether a path names a file (or a pattern of files), there or not, rather than a folder or a Hub id."""
    return extension(path) in READERS or glob.has_magic(path) or os.path.isfile(path)


def extension(path: str) -> str:
    """Return the extension that tells the format, in lower case: `.csv` of a.csv and of a.csv.gz."""
    name = Path(path).name.lower()
    return Path(name.removesuffix(".gz")).suffix


def find_files(paths: Sequence[str]) -> list[str]:
    """Expand patterns and check that all files are there and of one format."""
    files: list[str] = []
    for path in paths:
        found = sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]
        if not found:
            raise UserError(f"--data.path {path}: no file has such a name{near(path)}")
        files += found
    for file in files:
        if os.path.isdir(file):
            raise UserError(f"--data.path {file} is a folder: give one folder alone, or files")
        if not os.path.exists(file):
            raise UserError(f"--data.path {file}: no such file{near(file)}")
        if extension(file) not in READERS:
            raise UserError(f"--data.path {file}: unknown format {extension(file) or '(no extension)'}; {FORMATS}")
    if len(kinds := sorted({extension(file) for file in files})) > 1:
        raise UserError(f"--data.path names files of several formats ({', '.join(kinds)}): give files of one format")
    return files


def near(path: str, only_close: bool = False) -> str:
    """Say what there is where the path does not lead, names like it first: a clause to end a message with."""
    folder = Path(path).absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith("."))
    close = difflib.get_close_matches(Path(path).name, names, n=3, cutoff=0.6)
    shown = close + [name for name in names if name not in close and not only_close]
    if only_close and not close:
        return ""
    if not shown:
        return f"; {folder} is empty"
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"; {folder} has {', '.join(shown[:8])}{more}"


def file_builder(files: list[str], columns: Sequence[str]):
    """Return the builder of datasets that reads the files, which `find_files` has found, into one split `train`."""
    import datasets

    reader = READERS[extension(files[0])]
    options = {}
    if reader == "csv":
        options = _csv_options(files, columns)
    elif columns:
        raise UserError(f"--data.columns names columns of csv and tsv files; {files[0]} has names of its own")
    return datasets.load_dataset_builder(reader, data_files=[os.path.abspath(file) for file in files], **options)


def _csv_options(files: list[str], columns: Sequence[str]) -> dict:
    """Choose how pandas reads csv: every column as text, which `with_numbers` turns into numbers where all are.

    pandas would decide chunk by chunk, turn the words NA, None and null into missing values, and take the first
    column for an index where rows are longer than the header.
    """
    import datasets

    tabs = extension(files[0]) == ".tsv"
    options = {"sep": "\t" if tabs else ",", "quoting": csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL}
    options |= {"keep_default_na": False, "na_values": [""]}
    names = _column_names(files[0], columns, options)
    for file in files[1:]:
        if (others := _column_names(file, columns, options)) != names:
            raise UserError(f"--data.path: {files[0]} has columns {', '.join(names)}, but {file} {', '.join(others)}")
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return {**options, "column_names": names, "header": None if columns else 0, "features": features}


def _column_names(file: str, columns: Sequence[str], options: dict) -> list[str]:
    """Return the names of a csv file's columns: the given ones, or else those in its header line."""
    import pandas

    try:
        # Two lines: pandas raises when the second is longer than the first.
        lines = pandas.read_csv(file, header=None, nrows=2, dtype=object, **options).fillna("").to_numpy().tolist()
    except pandas.errors.EmptyDataError:
        raise UserError(f"--data.path {file} is empty") from None
    except (pandas.errors.ParserError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from error
    first = [name.strip() for name in lines[0]]
    if columns and len(columns) != len(first):
        raise UserError(
            f"--data.columns has {len(columns)} names ({' '.join(columns)}), but {file} {len(first)} columns"
        )
    if columns and list(columns) == first:
        raise UserError(f"--data.columns: the first line of {file} has these names already; leave out the flag")
    names = list(columns) or [name or f"Unnamed: {i}" for i, name in enumerate(first)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        hint = "" if columns else "; if it has no header line, name its columns with --data.columns"
        raise UserError(f"{'--data.columns' if columns else file} has two columns named {', '.join(twice)}{hint}")
    return names


def unreadable(path: str, error: BaseException) -> UserError:
    """Make the UserError of data that its reader refuses, with the reader's reason."""
    reason = " ".join(str(error).split())
    if isinstance(error, UnicodeDecodeError):
        reason += "; it must be UTF-8: convert it, for example with iconv -f latin1 -t utf8"
    return UserError(f"--data.path {path}: cannot be read: {reason}")


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
