"""What lies in folders of data: entries that systems and tools leave there, and the splits that names are for."""

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from app.data.tables.splits import SPLITS, kind_of, split_of
from app.errors import UserError

LEFT = {"__macosx", "__pycache__", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "lost+found", "icon\r"}


def is_hidden(name: str) -> bool:
    """Tell whether a file or folder is none of the user's data: a hidden one, or what a system leaves in folders."""
    return name.startswith(".") or name.lower() in LEFT


def words_in(name: str) -> list[str]:
    """Return the words of a name as they are spelt: what lies between letters, in whatever script, parts them."""
    # Systems write é as one character or as two; an accent without a letter of its own is part of the letter before.
    composed = unicodedata.normalize("NFC", name)
    return "".join(each if unicodedata.category(each)[0] in "LM" else " " for each in composed).split()


def split_in(name: str) -> str:
    """Return the split that a file or folder is for, by the words of its name; nothing if these do not say."""
    words = words_in(name.lower())
    return next((split_of(split) for split in SPLITS if split in words), "")


def splits_by_name(names: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return which of train, validation and test datasets takes each file of a data set for: none, one, or several.

    Files such as data/train-00000-of-00002.parquet have names of splits, and where there are any, no other name counts;
    a name that is no word for a split stands for itself. Else words in the names of folders count, and only where there
    are none, words in the names of files: in lower case, parted by -, _, a dot, a blank or a digit.

    Args:
        names: below the folder of the data set, with slashes.
    """
    return _kinds_by_name(names, _PARTED.split)


def splits_meant(names: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return what `splits_by_name` does if words also count in upper case, and whatever lies between letters."""
    return _kinds_by_name(names, lambda name: words_in(name.lower()))


def _kinds_by_name(names: Sequence[str], words: Callable[[str], list[str]]) -> dict[str, frozenset[str]]:
    if numbered := _numbered(names):
        kinds = {name: frozenset([kind_of(split) or split]) for name, split in numbered.items()}
        return {name: kinds.get(name, frozenset()) for name in names}

    def kinds_in(parts: Sequence[str]) -> frozenset[str]:
        return frozenset(kind_of(word) for part in parts for word in words(part)) - {""}

    by_folder = {name: kinds_in(name.split("/")[:-1]) for name in names}
    if any(by_folder.values()):
        return by_folder
    return {name: kinds_in([name.rpartition("/")[2].rpartition(".")[0]]) for name in names}


def _numbered(names: Iterable[str]) -> dict[str, str]:
    """Return the splits of files such as data/train-00000-of-00002.parquet, as their names spell them."""
    return {name: match[1] for name in names if (match := _NUMBERED.fullmatch(name))}


def check_numbered(what: str, names: Iterable[str]) -> None:
    """Refuse files such as data/dev-00000-of-00001.parquet next to data/validation-...: to datasets, two splits.

    Args:
        what: names the folder in errors.
    """
    first_by_kind: dict[str, tuple[str, str]] = {}
    for name, split in _numbered(names).items():
        first, its = first_by_kind.setdefault(kind_of(split) or split, (name, split))
        if its != split:
            raise UserError(
                f"{what}: {first} and {name} are of two splits, {its} and {split}, and both words mean "
                f"{kind_of(split)}: rename those of one, or name the files to train on by a pattern"
            )


# As the patterns of datasets have them (`NON_WORDS_CHARS` and `SPLIT_PATTERN_SHARDED` in its data_files.py).
_PARTED = re.compile(r"[-._ 0-9]")
_NUMBERED = re.compile(r"data/([^/]+)-[0-9]{5}-of-[0-9]{5}[^/]*\.[^/]*")


class Below(NamedTuple):
    """What lies below a folder and is no folder, or is one that cannot be followed."""

    parts: tuple[str, ...]
    """Its path there."""
    trouble: str
    """Why it is no file that can be read; empty if it is one."""
    linked: bool
    """Whether a folder above it is a link."""

    @property
    def name(self) -> str:
        """Return its path with slashes."""
        return "/".join(self.parts)


def entries_below(folder: str) -> Iterator[Below]:
    """Yield what lies below a folder, following links, without what is hidden: files first, then those of folders.

    Raises:
        UserError: a folder cannot be listed.
    """
    yield from _below(folder, (), {}, linked=False)


def _below(folder: str, parts: tuple[str, ...], seen: dict[str, tuple[str, ...]], linked: bool) -> Iterator[Below]:
    real = os.path.realpath(folder)
    if (first := seen.setdefault(real, parts)) != parts:
        if parts[: len(first)] != first:  # else it leads back up
            yield Below(parts, f"is {'/'.join(first)} by another name", linked)
        return
    try:
        with os.scandir(folder) as scan:
            entries = sorted((each for each in scan if not is_hidden(each.name)), key=lambda each: each.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed: {error.strerror or error}") from None
    inner = []
    for each in entries:
        if _is(each, os.DirEntry.is_dir):
            inner.append(each)
        else:
            yield Below((*parts, each.name), "" if _is(each, os.DirEntry.is_file) else trouble_of(each.path), linked)
    for each in inner:
        yield from _below(each.path, (*parts, each.name), seen, linked or each.is_symlink())


def trouble_of(path: str) -> str:
    """Say why what has a path is no file that can be read; nothing if it is one, or a folder."""
    if os.path.isfile(path) or os.path.isdir(path):
        return ""
    return "is a link that leads nowhere" if os.path.islink(path) else "is a pipe, a socket or a device"


def _is(entry: os.DirEntry[str], kind: Callable[[os.DirEntry[str]], bool]) -> bool:
    try:
        return kind(entry)
    except OSError:  # a link in a circle, or to where this user may not look
        return False


def files_below(folder: str) -> Iterator[tuple[str, ...]]:
    """Yield the path of each file below a folder as its parts, following links, without what is hidden."""
    return (each.parts for each in entries_below(folder) if not each.trouble)
