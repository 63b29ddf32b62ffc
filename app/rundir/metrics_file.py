"""metrics.jsonl, diagnostics.jsonl and audit.jsonl: one JSON object a line, each with its `step`, in order.

One run writes such a file, and anybody may read it at any time. No step is in it twice: a run that resumes takes back
the lines of the steps that it makes again.
"""

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from app import storage
from app.config import finite
from app.rundir.logs import Logs

_LAST = 3  # lines of which one may be cut, and others are of scores
DIAGNOSTICS = "diagnostics.jsonl"
IDS = "ids"
SKIPPED = "skipped_steps"  # how many steps of the run have been left out so far
_OF_STEPS = {IDS, SKIPPED}  # a line that the step itself writes has one of them, whatever its body logs


class Line(NamedTuple):
    """A line as it is in the file, and the fields that it holds."""

    text: str
    fields: dict[str, Any]


def read(path: Path) -> list[dict[str, Any]]:
    """Read the fields of every line; damaged lines are left out. A file that is not there has none."""
    return [line.fields for line in read_lines(path)[0]]


def column(path: Path, name: str) -> list[float]:
    """Read the numbers of one name, in order, without taking in the whole of a long file."""
    mark = json.dumps(name).encode()
    try:
        with storage.at(path.parent).open_log(path.name) as file:
            parsed = [_parse(line.decode(errors="replace")) for line in file if mark in line]
    except OSError:
        return []
    values = [fields.get(name) for fields in parsed if fields is not None]
    return [float(value) for value in values if isinstance(value, int | float)]


def read_lines(path: Path) -> tuple[list[Line], int]:
    """Read the whole lines of a file, and count the damaged ones.

    A last line without its end is neither: it is being written, or its writer was killed.
    """
    try:
        with storage.at(path.parent).open_log(path.name) as file:
            *whole, cut = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return [], 0
    parsed = [(text, _parse(text)) for text in whole]
    lines = [Line(text, fields) for text, fields in parsed if fields is not None]
    return lines, len(whole) - len(lines) + ("\0" in cut)  # a power failure leaves zeros, a killed process does not


def _parse(text: str) -> dict[str, Any] | None:
    """Return the fields of a line; None where it is damaged."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and type(fields.get("step")) is int else None


def last_step(path: Path) -> int:
    """Return the step of the last lines that are not damaged, without parsing a long file; 0 where there is none."""
    try:
        with storage.at(path.parent).open_log(path.name) as file:
            parsed = [_parse(line.decode(errors="replace")) for line in deque(file, maxlen=_LAST)]
    except OSError:
        return 0
    return max([0, *(fields["step"] for fields in parsed if fields is not None)])


class Follower:
    """Read a file while it is written, each line once."""

    def __init__(self, path: Path):
        """Begin at the first line; the file need not be there yet."""
        self.path, self._place = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Return the fields of the lines that were finished since the last call."""
        try:
            with storage.at(self.path.parent).open_log(self.path.name, self._place) as file:
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        parsed = map(_parse, whole.decode(errors="replace").split("\n")[:-1])
        return [fields for fields in parsed if fields is not None]


class MetricsFile:
    """Write such a file, each line at once."""

    def __init__(
        self,
        path: Path,
        resumed_from: int,
        warn: Callable[[str], Any] = print,
        scores_too: bool = False,
        logs: Logs | None = None,
    ):
        """Open `path`, dropping damaged lines and those of steps after `resumed_from`.

        Args:
            scores_too: drop the scores of that step as well, because it will be evaluated again.
            logs: of the run, which flushes and closes the file with its others.
        """
        lines, damaged = read_lines(path)
        if damaged:
            warn(f"warning: {path}: {damaged} damaged lines are left out")

        def stays(fields: dict[str, Any]) -> bool:
            again = scores_too and fields["step"] == resumed_from and not _OF_STEPS & set(fields)
            return fields["step"] <= resumed_from and not again

        content = "".join(f"{line.text}\n" for line in lines if stays(line.fields))
        self.path, self.warn = path, warn
        self.log, self.waiting = (logs or Logs()).begin(path, content.encode(), warn), b""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append one line. Where that fails, say so once, and keep it until the next one can be written."""
        self.waiting, held = self.waiting + json.dumps(finite({"step": step, **values})).encode() + b"\n", self.waiting
        try:
            self.log.append(self.waiting)
            self.waiting = b""
        except OSError as error:
            if not held:
                self.warn(f"warning: {self.path}: {error.strerror}; lines are kept until they can be written")
