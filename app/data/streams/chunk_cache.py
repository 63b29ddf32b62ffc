"""Chunks as one process reads them: brought to this machine's disk once for all its processes, and mapped into memory.

The process that makes a cache brings chunks, ahead of need or when somebody asks. Processes that are forked from it,
such as the workers of a DataLoader, ask it for what is not on the disk.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from app.data.cache import cache_folder
from app.data.streams.chunk_folder import ChunkFolder, check_room, working_set
from app.data.streams.chunk_reader import BadChunk, ChunkReader
from app.data.streams.chunks import as_dataset
from app.data.streams.forked_readers import Answering, Asking
from app.data.streams.index import FORMAT, Index
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

THREADS = 4  # that bring chunks ahead, and as many that bring what somebody waits for
UNLIMITED = 1 << 62  # bytes of chunks on a machine
MAPPED = 256  # chunks that a process keeps open
TRIES = 20  # to map a chunk that others delete as soon as it is there


def folder_of(index: Index) -> Path:
    """Return where the chunks of a data set lie on this machine: one folder for all indexes of parts of it."""
    return cache_folder() / "chunks" / key_of(FORMAT, *index.shards, index.features)


@dataclass(frozen=True)
class ReadByChunks:
    """How a run reads a data set by chunks."""

    flag: str
    """Names the data in errors."""
    index: Index
    window: int
    """Chunks for each micro-batch, as --data.window."""
    sort_over: int
    """Micro-batches that share a lane, as --data.sort-over."""
    limit: int
    """Bytes of all chunks on each machine, as decoded."""

    @property
    def lane_window(self) -> int:
        """Return the chunks of which a lane mixes the rows: so many that a step mixes as many, whatever lanes share."""
        return self.window * self.sort_over

    def working_set(self, lanes: int) -> float:
        """Return the bytes that a machine must hold for so many lanes."""
        return working_set(self.index, lanes * self.sort_over, self.window)

    def check_room(self, lanes: int) -> None:
        """Refuse a limit that is too small for what a machine reads at one time.

        Args:
            lanes: that it reads.

        Raises:
            UserError: it is too small.
        """
        check_room(self.flag, self.index, lanes * self.sort_over, self.window, self.limit)


class ChunkCache:
    """The chunks of one data set, for the process that makes it and for those that are forked from it."""

    def __init__(self, flag: str, index: Index, folder: Path, limit: int):
        """Keep chunks in a folder.

        Args:
            flag: names the data in errors.
            folder: for this data set alone, for all processes of the machine; several indexes of one data set may
                share it.
            limit: bytes of all chunks there, as decoded.
        """
        self._flag, self._limit = flag, limit
        self._index, self._folder = index, ChunkFolder(folder, limit)
        self._reader = ChunkReader(flag, index)
        self._mapped: OrderedDict[int, Dataset] = OrderedDict()
        self._coming: dict[int, Future] = {}
        self._damaged: set[int] = set()  # which are not fetched ahead again and again
        self._guard = threading.Lock()
        self._ahead = ThreadPoolExecutor(THREADS, thread_name_prefix="chunks-ahead")
        self._asked = ThreadPoolExecutor(THREADS, thread_name_prefix="chunks-asked")
        self._answering = Answering(self._bring_for_fork)
        self._owner = psutil.Process()
        self._asking = Asking(self._answering.address, self._owner)
        self._folder.begin()

    def table(self, chunk: int) -> "pa.Table":
        """Return the rows of a chunk, as `dataset`."""
        return self.dataset(chunk).data.table

    def dataset(self, chunk: int) -> "Dataset":
        """Return the rows of a chunk, brought if they are not here yet.

        Raises:
            BadChunk: it is damaged.
            UserError: it cannot be fetched, or its shard has changed since it was indexed.
        """
        name = self._name(chunk)
        here = self._folder.touch(name)
        if (mapped := self._mapped.get(chunk)) is not None:
            self._mapped.move_to_end(chunk)
            if not here:
                del self._mapped[chunk]  # others have deleted it; now its bytes can go
            return mapped
        for _ in range(TRIES):
            if not here:
                self._bring(chunk)
            table = self._folder.map(name)
            if table is not None:
                break
            here = False
        else:
            raise UserError(
                f"--data.cache-gb: chunks are deleted before they are read ({TRIES} times the same): give more"
            )
        self._let_go()
        # Kept, as it costs ten times what reading a row does.
        mapped = as_dataset(table, self._index.features, self.name_of(chunk), self._index.fingerprint, chunk)
        self._mapped[chunk] = mapped
        return mapped

    def name_of(self, chunk: int) -> str:
        """Return the words by which errors name a chunk."""
        return self._reader.name_of(chunk)

    def read_by(self, window: int, sort_over: int = 1) -> ReadByChunks:
        """Say how a run reads the chunks, with these settings."""
        return ReadByChunks(self._flag, self._index, window, sort_over, self._limit)

    def prepare(self, chunks: Iterable[int]) -> None:
        """Bring chunks in threads, the first ones first, and return at once.

        What is here already counts as used now. Errors come when a chunk is read. A forked process brings nothing.
        """
        if self._is_forked():
            return
        with self._guard:
            done = [chunk for chunk, coming in self._coming.items() if coming.done() and not coming.exception()]
            for chunk in done:
                del self._coming[chunk]
            for chunk in chunks:
                if chunk in self._damaged or chunk in self._coming:
                    continue
                if not self._folder.touch(self._name(chunk)):
                    self._coming[chunk] = self._ahead.submit(self._fetch, chunk)

    def close(self) -> None:
        """Bring nothing more, for nobody. What is under way is finished before the interpreter ends."""
        if not self._is_forked():
            self._answering.close()
            for pool in (self._ahead, self._asked):
                pool.shutdown(wait=False, cancel_futures=True)

    def _is_forked(self) -> bool:
        return os.getpid() != self._owner.pid

    def _name(self, chunk: int) -> str:
        """Return the name of a chunk's file: by where it lies, since an index may be of a part of the data."""
        return f"{self._index.shard[chunk]}-{self._index.start[chunk]}.arrow"

    def _let_go(self) -> None:
        """Close chunks that others have deleted, whose bytes stay on the disk until then, and the oldest of many."""
        for chunk in [each for each in self._mapped if not self._folder.has(self._name(each))]:
            del self._mapped[chunk]
        while len(self._mapped) >= MAPPED:
            self._mapped.popitem(last=False)

    def _bring(self, chunk: int) -> None:
        """Wait until a chunk is on the disk. Raises as `table`."""
        if self._is_forked():
            return self._asking.bring(chunk)
        with self._guard:
            coming = self._coming.pop(chunk, None)
        if coming is None or coming.cancel():  # nobody waits behind what is only fetched ahead
            return self._fetch(chunk)
        return coming.result()

    def _bring_for_fork(self, chunk: int) -> None:
        # In a thread of a pool, which the interpreter waits for at its end: one that decodes must not be cut off there.
        self._asked.submit(self._bring, chunk).result()

    def _fetch(self, chunk: int) -> None:
        name = self._name(chunk)
        if not self._folder.touch(name):
            with self._folder.bringing(name):
                if not self._folder.touch(name):
                    try:
                        table = self._reader.table(chunk)
                    except BadChunk:
                        self._damaged.add(chunk)
                        raise
                    self._folder.put(name, table)
