"""What a checkpoint holds besides its state: its record, and the scores that were measured after it was committed."""

import contextlib
import json
from pathlib import Path
from typing import Any

from app import storage

RECORD = "record.json"
SCORES = "scores.json"  # replaces some fields of the record; in no manifest
_LATER = ("metrics", "scores", "unevaluated", "patience")  # those fields


def write(draft: Path, record: dict[str, Any]) -> str:
    """Write a checkpoint's record into its draft, wait until it is on disk, and return its name."""
    files = storage.at(draft)
    files.fill(RECORD, json.dumps(record))
    files.up(RECORD)
    return RECORD


def read(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's record, with what was measured later.

    Raises:
        OSError, ValueError: the record cannot be read, or is damaged. Damaged later scores are left out.
    """
    record, later = _fields(folder, RECORD), {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        later = _fields(folder, SCORES)
    return {**record, **{name: later[name] for name in _LATER if name in later}}


def _fields(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(storage.at(folder).read_text(name, follow=True))
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{folder / name} is not the record that was written")
    return found


def later_fields(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for scores.json that make a checkpoint agree with `record`; empty if it already does."""
    before = read(folder)
    now = {name: record[name] for name in _LATER if name in record}
    now["metrics"] = {**before.get("metrics", {}), **now.get("metrics", {})}
    return now if any(before.get(name) != value for name, value in now.items()) else {}


def write_later(folder: Path, fields: dict[str, Any]) -> None:
    """Write the fields that replace those of the record."""
    storage.at(folder).write(SCORES, json.dumps(fields), durable=True)
