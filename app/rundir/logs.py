"""The growing files of a run, and its pictures: a disk gets them at once, a store by a thread.

So nobody waits for a store that is slow or away. Lines that are logged meanwhile are kept in memory, and go up later.
"""

import contextlib
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app import storage
from app.storage import Log

PACE = 1.0  # seconds from one write to a store to the next, at least
PAUSE = 5.0  # seconds before a write that has failed is tried again
LAST = 30.0  # seconds in which the last lines must go up when a run ends


class Logs:
    """The growing files that one run writes."""

    def __init__(self) -> None:
        self._later: list[_LaterLog] = []
        self._errand: threading.Thread | None = None

    def begin(self, path: Path, content: bytes, warn: Callable[[str], Any]) -> Log:
        """Begin a file with `content`, in place of what is there.

        Raises:
            OSError: it cannot be written.
        """
        files = storage.at(path.parent)
        log = files.log(path.name, content)
        if not files.is_remote:
            return log
        self._later.append(later := _LaterLog(log, path, warn))
        return later

    def send(self, act: Callable[[], Any], left_out: Callable[[str], Any]) -> None:
        """Write something else to a store in a thread, one thing at a time; `left_out` is told why it is not there."""

        def send() -> None:
            try:
                act()
            except OSError as error:
                left_out(error.strerror or str(error))

        if self._errand is not None and self._errand.is_alive():
            return left_out("earlier ones are still going up")
        self._errand = threading.Thread(target=send, name="errand", daemon=True)
        self._errand.start()

    def flush(self) -> None:
        """Wait until all lines so far are kept.

        Raises:
            OSError: a store does not take them.
        """
        for each in self._later:
            each.flush()

    def close(self) -> None:
        """Write the last lines; what a store does not take is lost, and is said to be."""
        for each in self._later:
            each.close()
        self._later = []
        if self._errand is not None:
            self._errand.join(LAST)


class _LaterLog(Log):
    """A log whose lines are written by a thread: nobody waits for the store."""

    def __init__(self, log: Log, path: Path, warn: Callable[[str], Any]):
        self._log, self._path, self._warn = log, path, warn
        self._change = threading.Condition()
        # Guarded by it: what is to be written, how much was written, and why the last write failed.
        self._waiting, self._written, self._problem = b"", 0, ""
        self._hurries, self._closes = threading.Event(), False
        self._thread = threading.Thread(target=self._write, name="lines", daemon=True)
        self._thread.start()

    def append(self, data: bytes) -> None:
        """See `Log.append`; readers see them a moment later."""
        with self._change:
            self._waiting += data
            self._change.notify_all()

    def _write(self) -> None:
        while data := self._next():
            try:
                self._log.append(data)
            except OSError as error:
                self._failed(error.strerror or str(error))
                continue
            with self._change:
                self._waiting, self._written = self._waiting[len(data) :], self._written + len(data)
                self._problem = ""
                self._change.notify_all()
            self._hurries.wait(PACE)

    def _next(self) -> bytes:
        """Wait for something to write; nothing where all is written and no more comes."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closes)
            return self._waiting

    def _failed(self, why: str) -> None:
        with self._change:
            told, self._problem = bool(self._problem), why
            self._change.notify_all()
            if not told and not self._closes:
                self._warn(f"warning: {self._path}: {why}; lines are kept until they can be written")
            self._change.wait_for(lambda: self._closes, PAUSE)

    def flush(self) -> None:
        """Wait until all that was appended is written.

        Raises:
            OSError: it could not be written.
        """
        with self._change:
            end = self._written + len(self._waiting)
            self._hurries.set()
            self._change.wait_for(lambda: self._written >= end or self._problem)
            self._hurries.clear()
            if self._written < end:
                raise OSError(errno.EIO, self._problem, str(self._path))

    def close(self) -> None:
        with self._change:
            self._closes = True
            self._hurries.set()
            self._change.notify_all()
        self._thread.join(LAST)
        with self._change:
            left, why = self._waiting.count(b"\n"), self._problem or "the store does not answer"
        if left or self._thread.is_alive():
            return self._warn(f"warning: {self._path}: the last {left} lines are lost: {why}")
        with contextlib.suppress(OSError):  # its parts are read as well
            self._log.close()
