"""Reading what others may have written: files that are no files, endless texts, and values of any type.

A run folder may come from somebody else, or be damaged. What is read from it is text to show and numbers to draw, and
nothing in it can stop a command, write to the terminal by itself, or lead out of the folder.
"""

import json
import math
from pathlib import Path
from typing import Any, TypeVar

import yaml

from app import storage
from app.errors import printable

T = TypeVar("T")
LARGEST = 1 << 26  # bytes of a file of fields that are read
_DEEPEST, _MOST = 20, 100_000  # levels and values of a file of fields
_LONGEST = 4000  # characters of a text
_GREATEST = 2**63  # larger whole numbers are drawn and compared as floating-point numbers


def read_bytes(path: Path) -> bytes:
    """Read a file of fields.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe, a device or a folder.
        ValueError: it is larger than any such file.
    """
    data = storage.at(path.parent).read(path.name, length=LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"{path} has more than {LARGEST} bytes")
    return data


def fields_of(path: Path) -> dict[str, Any] | None:
    """Read a file of fields, JSON or YAML by its name, as `plain` values; None where it is missing or damaged."""
    fields = raw_fields_of(path)
    return None if fields is None else plain(fields)


def raw_fields_of(path: Path) -> dict[str, Any] | None:
    """Read a file of fields as they are in it, for what is compared or used as a name; errors as in `fields_of`."""
    try:
        words = read_bytes(path).decode("utf-8")
        content = bounded(json.loads(words) if path.suffix == ".json" else yaml.safe_load(words))
    except Exception:  # PyYAML's constructors raise anything, such as a TypeError for a key that cannot be one
        return None
    return content if isinstance(content, dict) else None


def bounded(value: T, most: int = _MOST) -> T:
    """Return a value as it is; errors as in `plain`, and where it holds more than `most` values."""
    _Cleaner(most).clean(value, 0)
    return value


def plain(value: Any) -> Any:
    """Return a value with printable texts, and numbers that fit: what JSON can hold, of a bounded depth and size.

    Raises:
        ValueError: it is too deep or too large, as YAML's references can make it.
    """
    return _Cleaner(_MOST).clean(value, 0)


class _Cleaner:
    def __init__(self, most: int) -> None:
        self._count, self._most = 0, most

    def clean(self, value: Any, depth: int) -> Any:
        self._count += 1
        if depth > _DEEPEST or self._count > self._most:
            raise ValueError("too many values, or too many inside each other")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            return number(value)
        if isinstance(value, dict):
            return {text(key): self.clean(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, list | tuple | set):
            return [self.clean(inner, depth + 1) for inner in value]
        return text(value)


def number(value: int | float) -> int | float:
    """Return a number; a whole one that is too large as a floating-point number, which may be infinite."""
    if isinstance(value, float) or abs(value) < _GREATEST:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def text(value: Any, lines: bool = False) -> str:
    """Return a value as a printable text of a bounded length, in one line; `lines`: it may have several."""
    full = str(value)
    short = full if len(full) <= _LONGEST else f"{full[:_LONGEST]}..."
    return printable(short, "\n\t" if lines else "")


def whole(value: Any) -> int | None:
    """Return a count; None where it is none."""
    return value if type(value) is int and 0 <= value < _GREATEST else None


def section(fields: Any, name: str) -> dict[str, Any]:
    """Return a dictionary inside another; an empty one where there is none."""
    inner = fields.get(name) if isinstance(fields, dict) else None
    return inner if isinstance(inner, dict) else {}
