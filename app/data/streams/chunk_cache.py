"""Chunks on this machine's disk: fetched once for all its processes, decoded, and mapped into memory.

A chunk is one Arrow file, whole or absent: it is written as a draft and renamed, so a process that is killed leaves
nothing that another one believes. Of the processes that want a chunk at once, one fetches it while the others wait for
a lock, which the system lets go if its holder dies. When the folder grows beyond its limit, the chunks go that were
not used for the longest time; whoever has mapped one keeps it, because a file without a name stays while it is open.
"""

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING

from app import storage
from app.data.cache import SECONDS_KEPT
from app.data.reading import DAMAGE, unreadable
from app.data.streams.chunks import Chunk
from app.data.streams.index import FORMATS, Index
from app.errors import UserError
from app.storage.drafts import drafted, is_draft

if TYPE_CHECKING:
    import pyarrow as pa

LOCKS = 64  # files; two chunks with one of them wait for each other
THREADS = 4  # that fetch ahead in one process
MAPPED = 256  # chunks that a process keeps open
SECONDS_BETWEEN = 0.01  # two attempts to take a lock


class ChunkCache:
    """The chunks of one data set, as this process reads them."""

    def __init__(self, flag: str, index: Index, folder: Path, limit: int):
        """Keep chunks in a folder.

        Args:
            flag: names the data in errors.
            folder: for this data set alone, for all processes of the machine.
            limit: bytes of all chunks there, as decoded.
        """
        self._flag, self._index, self._folder, self._limit = flag, index, folder, limit
        self._reader = FORMATS[index.shards.format](flag, index.shards.folder)
        self._mapped: OrderedDict[int, pa.Table] = OrderedDict()
        self._unchanged: set[int] = set()
        self._coming: dict[int, Future] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._locks = _locks()

    def table(self, chunk: int) -> "pa.Table":
        """Return the rows of a chunk, fetched if they are not here yet.

        Raises:
            UserError: it cannot be fetched or read, or its shard has changed since it was indexed.
        """
        self._after_fork()
        if chunk in self._mapped:
            self._mapped.move_to_end(chunk)
            return self._mapped[chunk]
        if coming := self._coming.pop(chunk, None):
            coming.result()
        while True:
            self._fetch(chunk)
            with contextlib.suppress(FileNotFoundError):  # another process has made room
                self._mapped[chunk] = _map(self._file(chunk))
                break
        while len(self._mapped) > MAPPED:
            self._mapped.popitem(last=False)
        return self._mapped[chunk]

    def read(self, chunk: int) -> "pa.Table":
        """Fetch the rows of a chunk, and do not keep them. Errors as in `table`."""
        return self._decoded(chunk)

    def prepare(self, chunks: Iterable[int]) -> None:
        """Fetch chunks in threads, the first ones first, and return at once. Errors come when they are asked for."""
        self._after_fork()
        wanted = [chunk for chunk in chunks if chunk not in self._mapped and chunk not in self._coming]
        if wanted and self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="chunks")
        for chunk in wanted:
            assert self._threads is not None
            self._coming[chunk] = self._threads.submit(self._fetch, chunk)

    def close(self) -> None:
        """Fetch nothing more."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _after_fork(self) -> None:
        """Begin anew in a process that was forked: it has none of the threads of the one before, and its locks."""
        if self._process != os.getpid():
            self._coming, self._threads, self._locks = {}, None, _locks()
            self._process = os.getpid()

    def _file(self, chunk: int) -> Path:
        return self._folder / f"{chunk}.arrow"

    def _fetch(self, chunk: int) -> None:
        """Make sure that a chunk is on the disk."""
        file = self._file(chunk)
        if _touched(file):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        number = chunk % LOCKS
        with self._locks[number], _locked(self._folder / f"lock-{number}"):
            if _touched(file):
                return
            table = self._decoded(chunk)
            self._make_room(table.nbytes)
            try:
                _write(file, table)
            except OSError as error:
                raise UserError(
                    f"--data.cache-gb: a chunk of {table.nbytes:,} bytes cannot be written to {self._folder} "
                    f"({error.strerror or error}): make room there, or move the cache with HF_DATASETS_CACHE"
                ) from error

    def _decoded(self, chunk: int) -> "pa.Table":
        index, part = self._index, self._index.part(chunk)
        number = int(index.shard[chunk])
        shard, tails = index.shards.files[number], index.tails[number]
        files = storage.at(index.shards.folder)
        try:
            self._check_unchanged(number)
            data = files.read(shard.name, part.start, part.size, follow=True)
            tail = files.read(shard.name, shard.size - tails.tail, tails.tail, follow=True) if tails.tail else b""
            if len(data) < part.size or len(tail) < tails.tail:
                raise ValueError(f"it ends {part.size - len(data)} bytes before its chunk at byte {part.start} does")
            table = self._reader.table(Chunk(shard, part, data, tail), index.features)
            if len(table) != part.rows:
                raise ValueError(f"it has {len(table)} rows, where the index has {part.rows}")
        except DAMAGE as error:
            raise unreadable(self._flag, self._where(chunk), error) from error
        return table

    def name_of(self, chunk: int) -> str:
        """Return the words by which errors name a chunk."""
        return f"{self._flag} {self._where(chunk)}"

    def _where(self, chunk: int) -> str:
        part, number = self._index.part(chunk), int(self._index.shard[chunk])
        return f"{self._index.shards.place_of(number)}, {part.rows} rows from byte {part.start}"

    def _check_unchanged(self, number: int) -> None:
        """Refuse a shard that is another one than was indexed; once for each shard.

        Raises:
            UserError: it has changed, or is gone.
        """
        if number in self._unchanged:
            return
        shard, place = self._index.shards.files[number], self._index.shards.place_of(number)
        entry = storage.at(self._index.shards.folder).entry(shard.name)
        if entry is None or (entry.size, entry.tag) != (shard.size, shard.tag):
            what = "is gone" if entry is None else "has changed"
            raise UserError(
                f"{self._flag} {place} {what} since the data were indexed: put the shard back, or start a new run"
            )
        self._unchanged.add(number)

    def _make_room(self, size: int) -> None:
        """Delete what was not used for the longest time until so many more bytes fit."""
        files = sorted(_files(self._folder))
        excess = sum(each[1] for each in files) + size - self._limit
        for used, held, path in files:
            left_behind = is_draft(path.name) and time.time() - used > SECONDS_KEPT
            if left_behind or (excess > 0 and path.suffix == ".arrow"):
                path.unlink(missing_ok=True)
                excess -= held


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield when each file was used last, its size and its path."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                about = entry.stat()
                yield about.st_mtime, about.st_size, Path(entry.path)


def _touched(file: Path) -> bool:
    """Note that a chunk is used, if it is there."""
    try:
        os.utime(file)
    except FileNotFoundError:
        return False
    return True


def _locks() -> list[threading.Lock]:
    return [threading.Lock() for _ in range(LOCKS)]


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Exclude other processes. Threads of this one must not meet here: the system does not tell them apart."""
    with open(file, "ab") as lock:
        while not _is_taken(lock):
            time.sleep(SECONDS_BETWEEN)
        yield


def _is_taken(lock: IO[bytes]) -> bool:
    """Wait for a lock; tell whether it is ours now."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # not flock, which a process that is forked meanwhile would hold on to
    except OSError as error:
        # The system takes threads of two processes that wait for one lock each, and hold another, for a deadlock: it
        # does not know that those who hold one wait for none.
        if error.errno != errno.EDEADLK:
            raise
        return False
    return True


def _write(file: Path, table: "pa.Table") -> None:
    import pyarrow as pa

    with drafted(file) as draft, pa.ipc.new_file(str(draft), table.schema) as sink:
        sink.write_table(table)


def _map(file: Path) -> "pa.Table":
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()
