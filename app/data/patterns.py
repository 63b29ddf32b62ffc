"""Patterns of paths, as shells read them: * and ? stay inside a name, and ** is any number of folders, or none."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from app.data.folders import is_hidden
from app.errors import UserError

PATTERN = re.compile(r"[*?\[]")


class Divided(NamedTuple):
    """A path in two parts."""

    folder: str
    """What is a real path; empty for the folder that the process works in."""
    pattern: str
    """Of names below it; empty if all of the path is real."""


def divided(path: str, exists: Callable[[str], bool] = os.path.lexists, first: int = 0) -> Divided:
    """Divide a path where its pattern begins. A part that is the name of something real is no pattern.

    Args:
        exists: tells whether something has a path.
        first: how many parts at its beginning are no names, as the scheme and the host of a URL.
    """
    parts = path.split("/")
    for number in range(first, len(parts)):
        if PATTERN.search(parts[number]) and not exists("/".join(parts[: number + 1])):
            return Divided("/".join(parts[:number]) or "/" * path.startswith("/"), "/".join(parts[number:]))
    return Divided(path, "")


def fits(name: str, pattern: str) -> bool:
    """Tell whether the path of a file fits a pattern; upper and lower case differ."""
    return _fit(name.split("/"), pattern.split("/"))


def _fit(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return _fit(names, patterns[1:]) or (bool(names) and _fit(names[1:], patterns))
    return bool(names) and fnmatchcase(names[0], patterns[0]) and _fit(names[1:], patterns[1:])


def files_of(path: str) -> list[str]:
    """Return the local files, and folders, that a path or a pattern names, in order.

    What lies in a folder is named once, also where links lead to the folder: by the name with the fewest parts.

    Raises:
        UserError: a folder cannot be listed.
    """
    folder, pattern = divided(path)
    if not pattern:
        return [path] if os.path.exists(path) else []
    parts = [part for part in pattern.split("/") if part]
    # `**` is folders too, and who writes it means what lies in them.
    whole = "**" in parts
    paths = [os.path.join(folder, name) for name in _fitting(folder, (*parts, *["*"] * (parts[-1] == "**")))]
    return [each for each in paths if not os.path.isdir(each)] if whole else paths


def _fitting(folder: str, parts: tuple[str, ...]) -> list[str]:
    """Return the names below a folder that fit the parts of a pattern, of which the last one is not `**`, in order."""
    name_by_place: dict[tuple[str, str], str] = {}
    seen: set[tuple[str, frozenset[tuple[str, ...]]]] = set()
    level = [("", _open_to([parts]))]
    while level:  # the folders of one depth; so that shorter names come first
        deeper = []
        for below, ways in level:
            real = os.path.realpath(os.path.join(folder, below))
            if (real, ways) in seen:  # by another name, or a link leads back up
                continue
            seen.add((real, ways))
            for entry in _entries(os.path.join(folder, below) or "."):
                name = os.path.join(below, entry.name)
                if any(len(way) == 1 and _is_meant(entry.name, way[0]) for way in ways):
                    # Not the real path of the file: in a cache of the Hub, files of equal contents are links to one.
                    name_by_place.setdefault((real, entry.name), name)
                on = _open_to(rest for way in ways for rest in _after(entry.name, way))
                if on and (entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))):
                    deeper.append((name, on))
        level = deeper
    return sorted(name_by_place.values())


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as scan:
            return sorted(scan, key=lambda each: each.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed: {error.strerror or error}") from None


def _open_to(ways: Iterable[tuple[str, ...]]) -> frozenset[tuple[str, ...]]:
    """Add to the parts that are left of a pattern what is left where `**` stands for no folder."""
    every = set()
    for way in ways:
        every.add(way)
        while way[0] == "**":
            way = way[1:]
            every.add(way)
    return frozenset(every)


def _after(name: str, way: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield what is left of a pattern in a folder of this name."""
    if way[0] == "**":
        if not is_hidden(name):
            yield way
    elif len(way) > 1 and _is_meant(name, way[0]):
        yield way[1:]


def _is_meant(name: str, part: str) -> bool:
    """Tell whether a part of a pattern means a name; hidden ones only if it begins as they do, as in a shell."""
    return fnmatchcase(name, part) and (not is_hidden(name) or name == part or part.startswith("."))
