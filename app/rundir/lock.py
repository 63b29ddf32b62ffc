"""The lock of a run folder: one run at a time, also on disks that have no flock or that several machines share.

The holder has an flock on the file, writes into it who it is, and touches it every few seconds. Where flock does not
help (the disk lacks it, or each machine keeps its own), a newcomer watches whether the touches go on. The clocks of two
machines are never compared.
"""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app import storage
from app.distributed.environment import is_alive, this_process, was_here
from app.errors import UserError, printable

BEAT = 5.0  # seconds from one touch to the next
WATCHED = 2.2  # beats without a touch after which a holder counts as dead
NAME = "lock"
_TEXT = re.compile(r"process \d+ on (\S+) since .*\n(\d+ \S+)\n")

_held: dict[Path, "FolderLock"] = {}


def _close_in_child() -> None:
    """Keep a forked process, such as one that loads data, from holding a folder that its parent has lost."""
    for lock in _held.values():
        lock.lease.close()
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _say(line: str) -> None:
    print(line, flush=True)


class FolderLock:
    """The file `lock` in a folder, held for as long as a run uses the folder."""

    def __init__(self, folder: Path, say: Callable[[str], Any] = _say):
        self.folder, self.path, self.say = folder, folder / NAME, say
        self.lease, self._taken = storage.at(folder).lease(NAME), False
        self._key, self._text = Path(), ""
        self._released, self._lost = threading.Event(), threading.Event()

    def take(self) -> None:
        """Take the folder.

        Raises:
            UserError: it is in use; by whom.
            OSError: it cannot be written.
        """
        key = storage.at(self.folder).identity(NAME)
        if key in _held:
            raise self._in_use("another run of this process")
        try:
            sure = self.lease.take()
        except FileExistsError:
            raise UserError(f"{self.path} is not a file: move it away") from None
        try:
            self._take(sure)
        except BaseException:
            self.lease.close()
            raise
        self._key, self._taken, _held[key] = key, True, self
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _take(self, sure: bool | None) -> None:
        """Take the folder; `sure`: what the storage says of other processes of this machine."""
        if sure is False:
            raise self._in_use(self._holder())
        before = self._read()
        alone = bool(sure)
        if before:
            host, process = _parse(before)
            if not _is_here(host, process):
                alone = False
                if self._goes_on(before):
                    raise self._in_use(self._holder())
            elif not sure and is_alive(process):
                raise self._in_use(self._holder())
        host, since = socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S")
        self._text = f"process {os.getpid()} on {host} since {since}\n{this_process()}\n"
        self.lease.write(self._text)
        if not alone:
            time.sleep(BEAT / 5)  # another run may take it at the same time
            if self._read() != self._text:
                raise self._in_use(self._holder())

    def _goes_on(self, before: str) -> bool:
        """Watch whether the holder touches its lock."""
        seconds = WATCHED * BEAT
        self.say(f"{self.folder} was last used by {_first_line(before)}: watching {seconds:.0f} s whether it still is")
        first, end = self.lease.mark(), time.monotonic() + seconds
        while self.lease.mark() == first:
            if time.monotonic() > end:
                return False
            time.sleep(BEAT / 10)
        return bool(self._read())  # empty: the holder has just released it

    def _read(self) -> str:
        return self.lease.mark().text

    def _holder(self) -> str:
        try:
            return _first_line(self._read()) or "another process"
        except FileNotFoundError:
            return "another process"

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            try:
                if not self._is_ours():
                    return self._lost.set()
                self.lease.renew()
            except OSError:  # the disk is away for a while
                continue

    def _is_ours(self) -> bool:
        try:
            return self._read() == self._text
        except FileNotFoundError:  # somebody has deleted it, and nobody has taken the folder since
            return True

    def check(self, anew: bool = True) -> None:
        """Refuse to go on where another run has taken the folder, because this one stood still for so long.

        Args:
            anew: read the lock first: this process may just have woken up. Otherwise, what the thread that renews it
                has seen counts: no store is asked.

        Raises:
            UserError: by whom it was taken.
            OSError: the lock cannot be read.
        """
        if not self._taken:  # not the main process, or not any more
            return
        if self._lost.is_set() or (anew and not self._is_ours()):
            self._lost.set()
            raise UserError(
                f"{self.folder} was taken over by {self._holder()}, as this run showed no sign of life for "
                f"{WATCHED * BEAT:.0f} s: it ends here"
            )

    def release(self) -> None:
        """Release the folder."""
        if not self._taken:
            return
        self._released.set()
        _held.pop(self._key)
        with contextlib.suppress(OSError):
            if not self._lost.is_set() and self._is_ours():
                self.lease.clear()
        self.lease.close()
        self._taken = False

    def _in_use(self, holder: str) -> UserError:
        return UserError(f"{self.folder} is in use by {holder}: wait for it, stop it, or give another --run.dir")


def in_use(folder: Path) -> bool:
    """Tell whether a run seems to use a folder, without taking it; a run of another machine counts for a minute."""
    text, touched = _text_of(folder)
    host, process = _parse(text or "")
    if _is_here(host, process):
        return is_alive(process)
    return bool(host) and time.time() - touched < 60  # its clock may differ from ours


def is_lock(folder: Path) -> bool:
    """Tell whether the file `lock` in a folder is a run's: with its text, or empty once the run has released it."""
    text, _ = _text_of(folder)
    return text is not None and (not text or bool(_TEXT.fullmatch(text)))


def is_released(folder: Path) -> bool:
    """Tell whether the file `lock` is one that a run has released, or that it has made and not yet written."""
    return _text_of(folder)[0] == ""


def _text_of(folder: Path) -> tuple[str | None, float]:
    """Return the text of a folder's lock, and when it was touched; None for a text that cannot be read."""
    try:
        mark = storage.at(folder).lease(NAME).mark()
    except OSError:
        return None, 0.0
    return mark.text, mark.changed / 1e9


def _is_here(host: str, process: str) -> bool:
    """Tell whether a holder was started on this machine, which then knows whether it still runs."""
    return host == socket.gethostname() and was_here(process)


def _parse(text: str) -> tuple[str, str]:
    """Return the host and the process of a holder; empty texts where the lock's text is not whole."""
    match = _TEXT.fullmatch(text)
    return (match[1], match[2]) if match else ("", "")


def _first_line(text: str) -> str:
    return printable(text.partition("\n")[0].strip())
