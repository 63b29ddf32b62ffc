"""The folder of decoded chunks on this machine's disk: never larger than its limit, whoever writes into it.

A chunk is one Arrow file, whole or absent: it is written as a draft and renamed, so a process that is killed leaves
nothing that another one believes. A draft has its full size from its first moment, and what the folder holds is counted
in one file under a lock, so all processes together keep to the limit. When a chunk does not fit, those go that were not
used for the longest time; whoever has mapped one can read on, because a file without a name stays while it is open.

Locks save work, and no chunk depends on them: a process that holds one for a minute may have been stopped, and then the
next one puts a new file in the place of the lock's. If the first one wakes up, two write one chunk, each into its own
draft, or one deletes the other's draft, which is then written again.
"""

import contextlib
import errno
import fcntl
import functools
import math
import os
import secrets
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
import psutil

from app import storage
from app.data.streams.index import Index
from app.errors import UserError
from app.storage.drafts import draft_of, is_draft

if TYPE_CHECKING:
    import pyarrow as pa

ENDING = ".arrow"
LOCKS = 64  # files; two chunks with one of them wait for each other
SLACK = 16  # a folder that is full is emptied by this part of its limit more than must be, so that it is seldom listed
SECONDS_BETWEEN = 0.01  # two attempts to take a lock
PATIENCE = 60.0  # seconds to wait for a lock until its holder counts as stopped
SECONDS = 60.0  # to wait for room while others write
TRIES = 3  # to write a chunk whose draft others delete


def working_set(index: Index, micro_batches: int, window: int) -> float:
    """Return the bytes of a cache that holds two windows of some micro-batches; never more than all chunks take."""
    decoded = index.size.astype(np.float64) * index.growth
    # Chunks differ, and so does what they grow to: one of the largest is counted besides.
    needed = (decoded.mean() * 2 * micro_batches * window + decoded.max()) * SLACK / (SLACK - 1)
    return min(needed, decoded.sum() * (SLACK + 1) / SLACK)


def check_room(flag: str, index: Index, micro_batches: int, window: int, limit: int) -> None:
    """Refuse a cache that does not hold what is read at one time: two windows of each micro-batch, one of them ahead.

    Args:
        flag: names the data.
        micro_batches: of a step, whose rows are read on this machine.
        window: in chunks.
        limit: of the cache, in bytes.

    Raises:
        UserError: it is too small; the message has the size that would do.
    """
    needed = working_set(index, micro_batches, window)
    if needed > limit:
        raise UserError(
            f"--data.cache-gb: it allows {limit / 1e9:.3g} GB, and two windows of {window} chunks for each of "
            f"{micro_batches} micro-batches on this machine take about {needed / 1e9:.3g} GB of {flag}: give "
            f"{rounded_up(needed / 1e9)} or more, or a smaller window"
        )


def lacking_disk(folder: Path, limit: int) -> str:
    """Say that a disk has less room than a folder of chunks may take; empty where it has enough."""
    held = sum(entry.stat().st_size for entry in os.scandir(folder)) if folder.is_dir() else 0
    free = storage.at(folder).free()
    if free is None or free + held >= limit:
        return ""
    return (
        f"--data.cache-gb allows {limit / 1e9:.3g} GB, and {folder} has {(free + held) / 1e9:.3g} GB for chunks: make "
        "room there, move the cache with HF_DATASETS_CACHE, or allow less"
    )


def rounded_up(number: float) -> str:
    """Format a number with two digits, not below it."""
    step = 10 ** (math.floor(math.log10(number)) - 1)
    return f"{math.ceil(number / step) * step:.10g}"


class _File(NamedTuple):
    used: float
    size: int
    name: str


class ChunkFolder:
    """The chunks of one data set, for all processes of the machine."""

    def __init__(self, folder: Path, limit: int):
        """Keep at most `limit` bytes in a folder, which need not be there yet."""
        self._folder, self._limit = folder, limit
        self._counted = False

    def touch(self, name: str) -> bool:
        """Note that a chunk is used; tell whether it is there."""
        try:
            os.utime(self._folder / name)
        except FileNotFoundError:
            return False
        return True

    def has(self, name: str) -> bool:
        """Tell whether a chunk is there."""
        return (self._folder / name).exists()

    def map(self, name: str) -> "pa.Table | None":
        """Return a chunk, mapped into memory; None if it is not there, or is not whole, as after a power failure."""
        import pyarrow as pa

        file = self._folder / name
        try:
            return pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        except FileNotFoundError:
            return None
        except pa.ArrowInvalid:
            file.unlink(missing_ok=True)  # to be brought anew
            return None

    @contextlib.contextmanager
    def bringing(self, name: str) -> Iterator[None]:
        """Exclude others, of this process and of the machine, who would bring the same chunk."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with _locked(self._folder, _lock_of(name)):
            yield

    def put(self, name: str, table: "pa.Table") -> None:
        """Write a chunk, inside of `bringing`.

        Raises:
            UserError: it is larger than the folder may be, or the disk is full.
        """
        size, tries = _size(table), TRIES
        while tries:
            tries -= 1
            try:
                return self._put(name, table, size)
            except OSError as error:
                # One that was stopped, and lost its locks by that, deletes drafts as those of a dead process.
                if isinstance(error, FileNotFoundError) and (self.has(name) or tries):
                    continue
                raise UserError(
                    f"--data.cache-gb: a chunk of {size:,} bytes cannot be written to {self._folder} "
                    f"({error.strerror or error}): make room there, or move the cache with HF_DATASETS_CACHE"
                ) from error

    def _put(self, name: str, table: "pa.Table", size: int) -> None:
        if self.has(name):
            return
        draft = self._begun(name, size)
        try:
            _write(draft, table)
            with _locked(self._folder, _ROOM):  # a list of names that are changed meanwhile may lack some
                draft.rename(self._folder / name)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def begin(self) -> None:
        """Forget what cannot be trusted: chunks that were written before the machine started again may not be whole.

        Whatever else killed processes have left goes when room is made.
        """
        if self._folder.is_dir():
            with _locked(self._folder, _ROOM):
                for file in self._files():
                    if file.name.endswith(ENDING) and file.used < psutil.boot_time():
                        (self._folder / file.name).unlink(missing_ok=True)

    def _begun(self, name: str, size: int) -> Path:
        """Return a draft for a chunk, for which there is room.

        Raises:
            UserError: there is none, not even in an empty folder.
        """
        end = time.monotonic() + SECONDS
        while size <= self._limit and time.monotonic() < end:
            with _locked(self._folder, _ROOM) as counter:
                held = _count_in(counter)
                if not self._counted or held is None or held + size > self._limit:
                    held = self._emptied(size, _lock_of(name))
                    self._counted = True
                if held + size <= self._limit:
                    draft = draft_of(self._folder / name)
                    with draft.open("xb") as file:
                        file.truncate(size)
                    _set_count(counter, held + size)
                    return draft
            time.sleep(0.05)  # until what others write now can go
        raise UserError(
            f"--data.cache-gb: it allows {self._limit / 1e9:.3g} GB, and a chunk takes {size / 1e9:.3g} GB: give more"
        )

    def _emptied(self, size: int, lock: str) -> int:
        """Delete what was not used for the longest time, if so many more bytes do not fit; return what is left.

        Args:
            lock: the one that the caller holds: whoever began another draft under it is dead.
        """
        files = []
        for file in self._files():
            if is_draft(file.name) and _is_dead(self._folder, file.name, lock):
                (self._folder / file.name).unlink(missing_ok=True)
            else:
                files.append(file)
        held = sum(file.size for file in files)
        if held + size > self._limit:
            for file in sorted(file for file in files if file.name.endswith(ENDING)):
                if held + size <= self._limit - self._limit // SLACK:
                    break
                (self._folder / file.name).unlink(missing_ok=True)
                held -= file.size
        return held

    def _files(self) -> Iterator[_File]:
        """Yield the chunks and drafts that are there."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(ENDING) or is_draft(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        about = entry.stat()
                        yield _File(about.st_mtime, about.st_size, entry.name)


_ROOM = "held"  # the file that counts what the folder holds, and its lock


def _lock_of(name: str) -> str:
    return f"lock-{zlib.crc32(name.encode()) % LOCKS}"


@functools.cache
def _threads_lock(folder: Path, lock: str, process: int) -> threading.Lock:
    """Return the lock by which threads exclude each other; a process that was forked has locks of its own."""
    return threading.Lock()


@contextlib.contextmanager
def _locked(folder: Path, lock: str) -> Iterator[IO[bytes]]:
    """Exclude other processes, and other threads, which the system does not tell from this one."""
    with _threads_lock(folder.absolute(), lock, os.getpid()):
        waiting = _Waiting(folder / lock)
        while True:
            with open(folder / lock, "a+b") as file:
                if waiting.takes(file):
                    yield file
                    return
            time.sleep(SECONDS_BETWEEN)


class _Waiting:
    """The wait for a lock; a holder that keeps others for too long counts as stopped, and loses it."""

    def __init__(self, path: Path):
        """Wait for the lock of a file."""
        self._path, self._held, self._since = path, os.stat_result([0] * 10), time.monotonic()

    def takes(self, file: IO[bytes]) -> bool:
        """Lock the file, which has just been opened, and tell whether the lock is ours."""
        about = os.fstat(file.fileno())
        if not os.path.samestat(self._held, about):  # another process has put it there
            self._held, self._since = about, time.monotonic()
        # Not flock, which a process that is forked meanwhile would hold on to. Nor does the system wait for it: it
        # would for ever, and it takes threads of two processes that wait for each other's locks for a deadlock.
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _is_at(self._path, about)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if time.monotonic() > self._since + PATIENCE and _is_at(self._path, about):
            other = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}")
            other.touch()
            other.rename(self._path)
        return False


def _is_at(path: Path, about: os.stat_result) -> bool:
    """Tell whether a file still has its name."""
    try:
        return os.path.samestat(path.stat(), about)
    except FileNotFoundError:
        return False


def _is_dead(folder: Path, draft: str, held: str) -> bool:
    """Tell whether nobody writes a draft any more: whoever does has the lock of its chunk."""
    name = draft[: draft.index(ENDING)] + ENDING
    lock = _lock_of(name)
    if lock == held:
        return True
    threads = _threads_lock(folder.absolute(), lock, os.getpid())
    if not threads.acquire(blocking=False):
        return False
    try:
        with open(folder / lock, "a+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    finally:
        threads.release()


def _count_in(file: IO[bytes]) -> int | None:
    file.seek(0)
    text = file.read()
    return int(text) if text.isdigit() else None


def _set_count(file: IO[bytes], count: int) -> None:
    file.truncate(0)
    file.write(b"%d" % count)
    file.flush()


def _size(table: "pa.Table") -> int:
    """Return the bytes of the file of a table."""
    import pyarrow as pa

    sink = pa.MockOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.size()


def _write(draft: Path, table: "pa.Table") -> None:
    """Fill a draft, which has its size already."""
    import pyarrow as pa

    with draft.open("r+b") as file, pa.ipc.new_file(pa.PythonFile(file, "w"), table.schema) as writer:
        writer.write_table(table)
