"""The lock of a folder: held by one run at a time, over processes and over machines that share the disk."""

import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from app import launch

# Seconds between two signs of life of a holder. One who comes from another machine waits for longer than two.
BEAT = 4.0
_PATIENCE = 2.5
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
_held: dict[Path, TextIO] = {}


class InUse(Exception):
    """The folder is another run's; the message says whose."""


def _close_in_child() -> None:
    """Keep a forked process, such as one that loads data, from holding on to a folder that its parent has lost."""
    for file in _held.values():
        os.close(file.fileno())


os.register_at_fork(after_in_child=_close_in_child)


class Lock:
    """A file that is locked with flock, says who holds it, and is touched every few seconds while it is held.

    The kernel drops a flock with its process. Where the disk has none, the holder's process is asked for; where the
    holder is on another machine, whose locks may not be seen here, its touches are. No clocks are compared.
    """

    def __init__(self, path: Path):
        """Take the lock.

        Raises:
            InUse: another run holds it.
            OSError: the file cannot be written.
        """
        self.path, self._key = path, path.resolve()
        if self._key in _held:
            raise InUse("another run of this process")
        # flock, not lockf: a lock of the latter kind is lost when anything in this process reads the file.
        file = open(path, "a+")  # noqa: SIM115 - held until the run ends
        try:
            self._take(file)
        except BaseException:
            file.close()
            raise
        self._file, _held[self._key] = file, file
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _take(self, file: TextIO) -> None:
        sure = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(_words(_read(file))) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            sure = False
        holder = _read(file)
        if holder and holder["host"] != socket.gethostname():
            self._watch(file, holder)
        elif holder and not sure and launch.is_alive(holder["process"]):
            raise InUse(_words(holder))
        try:
            if os.fstat(file.fileno()).st_ino != self.path.stat().st_ino:  # made anew by another run
                raise InUse("another process")
        except FileNotFoundError:
            raise InUse("another process") from None
        own = {"host": socket.gethostname(), "process": launch.this_process()}
        file.truncate(0)
        file.write(json.dumps({**own, "since": time.strftime("%Y-%m-%d %H:%M:%S")}))
        file.flush()
        if not sure:  # of several that found it free, the last one has it
            time.sleep(BEAT / 4)
            if {**(last := _read(file)), **own} != last:
                raise InUse(_words(last))

    def _watch(self, file: TextIO, holder: dict[str, str]) -> None:
        """Wait until a holder on another machine would have given two signs of life, and leave when it gives one."""
        wait = _PATIENCE * BEAT
        print(
            f"{self.path.parent} was held by {_words(holder)}; watching for {wait:.0f} s whether it lives",
            file=sys.stderr,
        )
        seen, end = self._touched(), time.monotonic() + wait
        while time.monotonic() < end:
            time.sleep(BEAT / 8)
            if self._touched() != seen and _read(file):
                raise InUse(_words(_read(file)))

    def _touched(self) -> int:
        with open(self.path) as file:  # opened anew: network file systems ask the server then
            return os.fstat(file.fileno()).st_mtime_ns

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            try:
                os.utime(self.path)
            except OSError:  # the disk may come back
                continue

    def release(self) -> None:
        """Give the lock back; the file stays, and is empty."""
        self._released.set()
        file = _held.pop(self._key)
        file.truncate(0)
        file.close()


def _read(file: TextIO) -> dict[str, str]:
    """Read who holds a lock; nothing where nobody does, or where the text is not whole."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return holder if isinstance(holder, dict) and {"host", "process", "since"} <= set(holder) else {}
    except ValueError:
        return {}


def _words(holder: dict[str, str]) -> str:
    if not holder:
        return "another process"
    return f"process {holder['process'].split()[0]} on {holder['host']} since {holder['since']}"
