"""Parallel texts as tables: files of one name whose lines belong together, such as train.de and train.en.

The extension of a file is the name of its column.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from app.data.cache import cache_of, remember
from app.data.patterns import divided, files_of
from app.data.reading import explained, open_text, reading
from app.data.tables.files import READERS, extension
from app.data.tables.splits import SPLITS, split_of
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset

KIND = "parallel"
"""What `txt` is of data that may be such files, see TableData in app.data.config."""
# Part of the cache's key: raise it when the rows change.
VERSION = 2
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
        elif divided(path).pattern:
            files += files_of(path)
        elif extension(path) not in READERS:
            files += [str(file) for file in _named(Path(path))]
    if [file for file in files if extension(file) == ".txt"]:
        raise UserError(
            f"{flag} {' '.join(paths)}: the extensions of parallel files name their columns: call them, for example, "
            "train.de and train.en, and give --data.source de --data.target en; if this is a table, name it .tsv"
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
    by_stem: dict[str, dict[str, Together]] = {}  # by split, and in it by what the names of the files begin with
    for file in sorted(folder.iterdir()):
        split = SPLIT.match(file.name.lower())
        if split and _is_column(file):
            group = by_stem.setdefault(split_of(split[1]), {}).setdefault(_stem(str(file)), {})
            group[_column(str(file))] = str(file)
    parallel = {split: [group for group in groups.values() if len(group) > 1] for split, groups in by_stem.items()}
    return {split: groups for split, groups in parallel.items() if groups}


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


def read(
    flag: str, path: str, splits: dict[str, list[Together]], used: Sequence[str] = ()
) -> "tuple[dict[str, Dataset], dict[str, UserError]]":
    """Read parallel files, those of each split, into tables; a row is a line of each.

    Args:
        used: the columns that are needed. Others are left out where their numbers of lines differ.

    Returns:
        The tables, and why some of them cannot be used: files of one name have different numbers of lines. These have
        no rows.

    Raises:
        UserError: a file cannot be read, or those of another name have other extensions.
    """
    import datasets

    groups = [group for each in splits.values() for group in each]
    folder = cache_of([file for group in groups for file in group.values()])
    lines = _count_lines(flag, [file for group in groups for file in group.values()], folder)
    tables, faults = {}, {}
    for split, each in splits.items():
        columns = list(each[0])
        if wrong := next((group for group in each if list(group) != columns), None):
            raise UserError(
                f"{flag} {path}: there are {', '.join(each[0].values())}, but {', '.join(wrong.values())}: give each "
                "name files of the same extensions"
            )
        if (uneven := _uneven(each, lines)) and set(used) <= set(columns) and used:
            columns = list(used)
            each = [{column: group[column] for column in columns} for group in each]
            uneven = _uneven(each, lines)
        if uneven:
            told = " and ".join(f"{file} has {lines[file]:,}" for file in uneven.values())
            faults[split] = UserError(
                f"{flag} {path}: {told} lines, but their lines belong together, the first to the first and so on"
            )
            tables[split] = datasets.Dataset.from_dict({column: [] for column in columns})
            continue
        if not any(lines[file] for group in each for file in group.values()):
            continue
        with explained(flag, path):
            tables[split] = datasets.Dataset.from_generator(
                line_rows,
                features=datasets.Features({column: datasets.Value("string") for column in columns}),
                cache_dir=str(folder),
                gen_kwargs={"groups": tuple(each)},
                fingerprint=key_of(KIND, VERSION, folder.name, *(file for group in each for file in group.values())),
            )
    return tables, faults


def _count_lines(flag: str, files: Sequence[str], folder: Path) -> dict[str, int]:
    """Count the lines of each file."""

    def count(file: str) -> int:
        with reading(flag, file), _opened(file) as stream:
            return sum(1 for _ in stream)

    counts_file = folder / f"lines-{VERSION}-{key_of(*files)}.json"
    return remember(counts_file, lambda: {file: count(file) for file in files})


def _uneven(groups: Sequence[Together], lines: dict[str, int]) -> Together:
    """Return the first files that belong together and have different numbers of lines; none if all are even."""
    return next((group for group in groups if len({lines[file] for file in group.values()}) > 1), {})


def _opened(file: str) -> TextIO:
    # Lines end where the file says so, and not at other signs that Python takes for ends of lines.
    return open_text(file, newline="\n")


def line_rows(groups: Sequence[Together]) -> Iterator[dict[str, str]]:
    """Yield the lines of files that belong together, without what ends them."""
    for group in groups:
        with ExitStack() as opened:
            streams = [opened.enter_context(_opened(file)) for file in group.values()]
            for lines in zip(*streams, strict=True):
                yield {column: line.rstrip("\r\n") for column, line in zip(group, lines, strict=True)}


def spread(table: "Dataset") -> "Dataset":
    """Return a table with the languages of its column `translation`, if it has one, as columns of their own."""
    name = "translation"
    feature = table.features.get(name)
    languages = getattr(feature, "languages", None) or (list(feature) if isinstance(feature, dict) else [])
    if not languages or set(languages) & set(table.column_names):
        return table
    return table.flatten().rename_columns({f"{name}.{language}": language for language in languages})
