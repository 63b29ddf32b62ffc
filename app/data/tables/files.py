"""Files of tables: which ones a path names, and which reader of datasets is for them."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.data.reading import near
from app.errors import UserError

if TYPE_CHECKING:
    from datasets import DatasetBuilder

READERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
READERS |= dict.fromkeys((".conll", ".conllu", ".iob", ".bio"), "conll")
"""From the extension of a file to the reader of datasets."""


def extension(path: str) -> str:
    """Return the extension that tells the format, in lower case: `.csv` of a.csv and of a.csv.gz."""
    return Path(Path(path).name.lower().removesuffix(".gz")).suffix


def reader_of(file: str, txt: str = "") -> str | None:
    """Return the reader for a file, or None; where `txt` is conll, .txt files and bare names are CoNLL."""
    kind = extension(file)
    return "conll" if txt == "conll" and kind in ("", ".txt") else READERS.get(kind)


def is_file_name(path: str) -> bool:
    """Tell whether a path names a file or a pattern of files, present or not, rather than a folder or a Hub id."""
    if os.path.isdir(path):  # Spark writes a folder rows.parquet
        return False
    return extension(path) in READERS or glob.has_magic(path) or os.path.isfile(path)


def find_files(paths: Sequence[str], flag: str, txt: str = "") -> list[str]:
    """Expand patterns, and check that all files are present and of one format; `flag` names them in errors."""
    files: list[str] = []
    for path in paths:
        found = sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]
        if not found:
            raise UserError(f"{flag} {path}: no file has such a name{near(path)}")
        files += found
    for file in files:
        if os.path.isdir(file):
            raise UserError(f"{flag} {file} is a folder: give one folder alone, or files")
        if not os.path.exists(file):
            raise UserError(f"{flag} {file}: no such file{near(file)}")
        if reader_of(file, txt) is None:
            raise UserError(
                f"{flag} {file}: unknown format {extension(file) or '(no extension)'}; csv, tsv, json, jsonl, txt, "
                "conll and parquet files are read, all but parquet also compressed by gzip (.gz)"
            )
    check_one_format(files, flag)
    return files


def check_one_format(files: Sequence[str], named: str) -> None:
    """Refuse files of several formats; `named` says in the error what names them."""
    if len(kinds := sorted({extension(file) for file in files})) > 1:
        raise UserError(f"{named} names files of several formats ({', '.join(kinds)}): give files of one format")


def file_builder(files: dict[str, list[str]], folder: Path, **options: object) -> "DatasetBuilder":
    """Return the builder of datasets that reads files of one format, those of each split, into a cache folder."""
    import datasets

    reader = READERS[extension(next(iter(files.values()))[0])]
    # Names of files may look like patterns.
    names = {split: [glob.escape(os.path.abspath(file)) for file in files[split]] for split in files}
    return datasets.load_dataset_builder(reader, data_files=names, cache_dir=str(folder), **options)
