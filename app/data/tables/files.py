"""Files of tables: which ones a path names, and which reader of datasets is for them."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.data.file_names import log_among
from app.data.folders import Below, entries_below, files_below
from app.data.images import formats
from app.data.patterns import divided, files_of
from app.data.reading import near
from app.errors import UserError

if TYPE_CHECKING:
    from datasets import DatasetBuilder

READERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
READERS |= dict.fromkeys((".conll", ".conllu", ".iob", ".bio"), "conll")
"""From the extension of a file to its reader."""
TABLE = "table"
"""What TableData.txt says if .txt files are tables."""
TAKEN = {
    "boxes": "COCO's json file, YOLO's data.yaml or obj.data, a folder with one of these or with Pascal VOC's xml "
    "files, and tables (json, jsonl and parquet)",
    "images": "a folder with a subfolder of images for each class, and tables (parquet, json, jsonl, csv and tsv)",
    "conll": "CoNLL files (conll, conllu, iob, bio, txt) and tables (json, jsonl and parquet), all but parquet also "
    "compressed by gzip (.gz)",
}
"""What is read, by what TableData.txt says that data are."""
UNFINISHED = "_temporary"
TABLES = "csv, tsv, json, jsonl, txt and parquet files, all but parquet also compressed by gzip (.gz)"


def extension(path: str) -> str:
    """Return the extension that tells the format, in lower case: `.csv` of a.csv and of a.csv.gz."""
    return Path(Path(path).name.lower().removesuffix(".gz")).suffix


def reader_of(file: str, txt: str = "") -> str | None:
    """Return the reader for a file, or None; `txt` says what .txt files are, and if it is conll, also bare names."""
    kind = extension(file)
    if kind == ".txt" and txt in ("images", "boxes"):
        return None
    if kind == ".txt" and txt == TABLE:
        return "csv"
    return "conll" if txt == "conll" and kind in ("", ".txt") else READERS.get(kind)


def is_file_name(path: str) -> bool:
    """Tell whether a path names a file or a pattern of files, present or not, rather than a folder or a Hub id."""
    if os.path.isdir(path):  # Spark writes a folder rows.parquet
        return False
    return extension(path) in READERS or bool(divided(path).pattern) or os.path.isfile(path)


def find_files(paths: Sequence[str], flag: str, txt: str = "") -> list[str]:
    """Expand patterns, and check that all files are present and of one format; `flag` names them in errors."""
    files: list[str] = []
    for path in paths:
        matches = files_of(path) if divided(path).pattern else [path]
        if not matches:
            raise UserError(f"{flag} {path}: no file has such a name{near(path)}")
        files += matches
    for file in files:
        if os.path.isdir(file):
            raise UserError(f"{flag} {file} is a folder: give one folder alone, or files")
        if not os.path.exists(file):
            raise UserError(f"{flag} {file}: no such file{near(file)}")
        if reader_of(file, txt) is None:
            raise unknown_format(flag, file, txt)
    check_one_format(files, flag)
    return files


def unknown_format(flag: str, file: str, txt: str) -> UserError:
    """Return the error for a file that is in none of the formats of a task; `txt` says of which one."""
    kind = extension(file) or "(no extension)"
    return UserError(f"{flag} {file}: unknown format {kind}; what is read: {TAKEN.get(txt, TABLES)}")


def check_holds_data(flag: str, folder: str, txt: str) -> None:
    """Refuse a folder without any file that could be a table, for a task of images; `txt` says of which one."""
    files = [parts for parts in files_below(folder) if txt in TAKEN]
    kinds = {extension(parts[-1]) for parts in files} - {".txt"}
    images = {extension(parts[-1]) for parts in files} & formats.ENDINGS
    if files and not kinds & {*READERS, ".arrow", ".zip", ".tar"} and not (images and txt == "images"):
        tops = sorted({parts[0] + "/" * (len(parts) > 1) for parts in files})
        raise UserError(
            f"{flag} {folder} has {', '.join(tops[:6])}{' and more' * (len(tops) > 6)}, which is no layout that is "
            f"known; what is read: {TAKEN[txt]}"
        )


def check_whole(flag: str, folder: str) -> None:
    """Refuse a folder with files of data that cannot be read or are not finished, or with rows that count no more."""
    names = os.listdir(folder)
    for each in entries_below(folder):
        names.append(each.name)
        if extension(each.name) in READERS and (trouble := _trouble(each)):
            raise UserError(f"{flag} {folder}: {each.name} {trouble}: move it, or name the files by a pattern")
    if log := log_among(names):
        raise UserError(f"{flag} {folder}: {log}")


def _trouble(entry: Below) -> str:
    """Say why a file of data should not be read, or will not be; nothing if it is as it should be."""
    if not entry.trouble and UNFINISHED in entry.parts:
        return f"is in {UNFINISHED}, where Spark leaves what it has not finished"
    return entry.trouble or "lies in a folder that is a link, which is not followed here" * entry.linked


def check_one_format(files: Sequence[str], named: str) -> None:
    """Refuse files of several formats; `named` says in the error what names them."""
    if len(kinds := sorted({extension(file) for file in files})) > 1:
        raise UserError(f"{named} names files of several formats ({', '.join(kinds)}): give files of one format")


def file_builder(files: dict[str, list[str]], folder: Path, reader: str = "", **options: object) -> "DatasetBuilder":
    """Return the builder of datasets that reads files of one format, those of each split, into a cache folder."""
    import datasets

    reader = reader or READERS[extension(next(iter(files.values()))[0])]
    # Names of files may look like patterns.
    names = {split: [glob.escape(os.path.abspath(file)) for file in files[split]] for split in files}
    return datasets.load_dataset_builder(reader, data_files=names, cache_dir=str(folder), **options)
