"""Parallel texts as tables: files of one name whose lines belong together, such as train.de and train.en.

The extension of a file is the name of its column.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from app.data.cache import cache_of
from app.data.reading import explained, open_text
from app.data.tables.files import READERS, extension
from app.data.tables.splits import SPLITS, split_of
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset

KIND = "parallel"
"""What `txt` is of data that may be such files, see TableData in app.data.config."""
# Part of the cache's key: raise it when the rows change.
VERSION = 1
Together = dict[str, str]
"""The files of one name, by their extensions."""
SPLIT = re.compile(rf"({'|'.join(sorted(SPLITS, key=len, reverse=True))})(?![a-z])")


def find(paths: Sequence[str], flag: str) -> dict[str, list[Together]]:
    """Return the parallel files that paths name, by split; none if they name something else.

    A path is one of the files, a pattern of them, what their names have in common (`train` for train.de and train.en),
    or, alone, a folder with files named train, val and so on.

    Raises:
        UserError: a file has no other one of its name.
    """
    if len(paths) == 1 and os.path.isdir(paths[0]):
        return _in_folder(Path(paths[0]))
    files: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            return {}
        if os.path.exists(path):
            files.append(path)
        elif glob.has_magic(path):
            files += sorted(glob.glob(path))
        elif extension(path) not in READERS:
            files += [str(file) for file in _named(Path(path))]
    if [file for file in files if extension(file) == ".txt"]:
        raise UserError(
            f"{flag} {' '.join(paths)}: the extensions of parallel files name their columns: call them, for example, "
            "train.de and train.en, and give --data.source de --data.target en"
        )
    if not files or not all(map(_is_column, map(Path, files))):
        return {}
    groups: dict[str, Together] = {}
    for file in files:
        groups.setdefault(_stem(file), {})[_column(file)] = file
    for stem, group in groups.items():
        if len(group) == 1:  # one file names the others
            groups[stem] = {_column(str(file)): str(file) for file in _named(Path(stem))}
        if len(groups[stem]) == 1:
            raise UserError(
                f"{flag} {stem}{next(iter(Path(file).suffix for file in group.values()))}: there is no other file "
                f"named {Path(stem).name}.*, whose lines would belong to its lines: put both into one folder, with one "
                "name and different extensions, such as train.de and train.en"
            )
    return {"train": list(groups.values())}


def _in_folder(folder: Path) -> dict[str, list[Together]]:
    """Return the files of each split in a folder; a name without another file of it is left out."""
    found: dict[str, dict[str, Together]] = {}
    for file in sorted(folder.iterdir()):
        split = SPLIT.match(file.name.lower())
        if split and _is_column(file):
            found.setdefault(split_of(split[1]), {}).setdefault(_stem(str(file)), {})[_column(str(file))] = str(file)
    kept = {split: [group for group in groups.values() if len(group) > 1] for split, groups in found.items()}
    return {split: groups for split, groups in kept.items() if groups}


def _named(stem: Path) -> list[Path]:
    """Return the files that have this name and an extension of their own."""
    files = sorted(stem.parent.glob(f"{glob.escape(stem.name)}.*"))
    return [file for file in files if _is_column(file) and _stem(str(file)) == str(stem)]


def _is_column(file: Path) -> bool:
    """Tell whether a file may be one of parallel ones: it has an extension, and it is none of another format."""
    kind = extension(str(file))
    return bool(kind) and kind not in READERS and file.is_file()


def _stem(file: str) -> str:
    return str(Path(file.removesuffix(".gz")).with_suffix(""))


def _column(file: str) -> str:
    return Path(file.removesuffix(".gz")).suffix.removeprefix(".")


def read(flag: str, path: str, splits: dict[str, list[Together]]) -> "dict[str, Dataset]":
    """Read parallel files, those of each split, into tables; a row is a line of each.

    Raises:
        UserError: files of one name have different numbers of lines, or those of another name other extensions.
    """
    import datasets

    groups = [group for each in splits.values() for group in each]
    folder = cache_of([file for group in groups for file in group.values()])
    tables = {}
    for split, each in splits.items():
        columns = list(each[0])
        if wrong := next((group for group in each if list(group) != columns), None):
            raise UserError(
                f"{flag} {path}: there are {', '.join(each[0].values())}, but {', '.join(wrong.values())}: give each "
                "name files of the same extensions"
            )
        with explained(flag, path):
            tables[split] = datasets.Dataset.from_generator(
                line_rows,
                features=datasets.Features({column: datasets.Value("string") for column in columns}),
                cache_dir=str(folder),
                gen_kwargs={"groups": tuple(each)},
                fingerprint=key_of(KIND, VERSION, folder.name, *(file for group in each for file in group.values())),
            )
    return {split: table for split, table in tables.items() if len(table)}


def line_rows(groups: Sequence[Together]) -> Iterator[dict[str, str]]:
    """Yield the lines of files that belong together, without what ends them.

    Raises:
        ValueError: they have different numbers of lines.
    """
    for group in groups:
        with ExitStack() as opened:
            # Lines end where the file says so, and not at other signs that Python takes for ends of lines.
            streams = {c: opened.enter_context(open_text(file, newline="\n")) for c, file in group.items()}
            count = 0
            while len(row := {c: line for c, stream in streams.items() if (line := stream.readline())}) == len(group):
                count += 1
                yield {column: line.rstrip("\r\n") for column, line in row.items()}
            if row:
                more = {c: count + (c in row) + sum(1 for _ in stream) for c, stream in streams.items()}
                lines = " and ".join(f"{group[column]} has {number:,}" for column, number in more.items())
                raise ValueError(f"{lines} lines, but their lines belong together, the first to the first and so on")


def spread(table: "Dataset") -> "Dataset":
    """Return a table with the languages of its column `translation`, if it has one, as columns of their own."""
    name = "translation"
    feature = table.features.get(name)
    languages = getattr(feature, "languages", None) or (list(feature) if isinstance(feature, dict) else [])
    if not languages or set(languages) & set(table.column_names):
        return table
    return table.flatten().rename_columns({f"{name}.{language}": language for language in languages})
