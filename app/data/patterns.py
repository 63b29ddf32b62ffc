"""Patterns of paths, as shells read them: * and ? stay inside a name, and ** is any number of folders, or none."""

import glob
import os
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

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
    """Return the local files, and folders, that a path or a pattern names, in order."""
    folder, pattern = divided(path)
    if not pattern:
        return [path] if os.path.exists(path) else []
    names = sorted(set(glob.glob(pattern, root_dir=folder or None, recursive=True)))
    paths = [os.path.join(folder, name) for name in names]
    # `**` is folders too, and who writes it means what lies in them.
    return [each for each in paths if not os.path.isdir(each)] if "**" in pattern.split("/") else paths
