"""Chunks from where the shards lie: fetched, checked and decoded; what is damaged for good is told from the rest."""

import errno
import functools
from typing import TYPE_CHECKING

from app import storage
from app.data.reading import DAMAGE, unreadable
from app.data.streams.chunks import Chunk
from app.data.streams.index import ADVICE, FORMATS, Index, changed
from app.data.streams.shards import is_url
from app.data.tables.columns import CHUNK
from app.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

TRIES = 2
"""To fetch what cannot be decoded. What cannot be fetched, storages try again by themselves: see `objects.PATIENCE`."""

TAILS = 64
"""Shards of which a reader keeps the tails: lanes read several shards at a time, and chunks of each one after another.
"""


class BadChunk(UserError):
    """A chunk stays damaged however often it is fetched."""

    def __init__(self, chunk: int, message: str):
        """Take the number of the chunk in its index, and the whole message."""
        super().__init__(message)
        self.chunk = chunk

    def with_advice(self) -> "BadChunk":
        """Return the error for a user who has not asked to leave out what is damaged."""
        return BadChunk(self.chunk, f"{self}; {ADVICE}")


class ChunkReader:
    """What reads the chunks of an index."""

    def __init__(self, flag: str, index: Index):
        """Read for `flag`, which names the data in errors."""
        self._flag, self._index = flag, index
        self._format = FORMATS[index.shards.format](flag, index.shards.folder, index.shards.folder)
        self._files = storage.at(index.shards.folder)
        self._tail = functools.lru_cache(TAILS)(lambda number: index.fetch_tail(number, self._files))
        self._unchanged: set[int] = set()

    def table(self, chunk: int) -> "pa.Table":
        """Return the rows of a chunk. What cannot be decoded is fetched once more: it may be damaged on its way alone.

        Raises:
            BadChunk: it is damaged.
            UserError: it cannot be fetched, or its shard has changed since it was indexed.
        """
        for _ in range(TRIES):
            fetched = self._fetched(chunk)
            try:
                return self._decoded(fetched)
            except DAMAGE as error:
                problem = unreadable(self._flag, self._place_of(chunk), error)
                problem.__cause__ = error
                self._tail.cache_clear()  # it may be the tail that was damaged
        raise BadChunk(chunk, str(problem)) from problem.__cause__

    def name_of(self, chunk: int) -> str:
        """Return the words by which errors name a chunk."""
        return f"{self._flag} {self._place_of(chunk)}"

    def _place_of(self, chunk: int) -> str:
        shards, part = self._index.shards, self._index.part(chunk)
        return f"{shards.place_of(int(self._index.shard[chunk]))}{CHUNK}{part.start} ({part.rows} rows)"

    def _fetched(self, chunk: int) -> Chunk:
        number = int(self._index.shard[chunk])
        place = self._index.shards.place_of(number)
        try:
            self._check_size(number)
            return self._index.fetch(chunk, self._files, self._tail(number))
        except storage.Changed:
            raise changed(self._flag, place) from None
        except FileNotFoundError:
            raise changed(self._flag, place, "is gone") from None
        except OSError as error:
            away = is_url(self._index.shards.folder) and error.errno in (errno.EIO, errno.ETIMEDOUT)
            advice = "it was asked for minutes; repeat the command when it answers again" if away else ""
            raise unreadable(self._flag, self._place_of(chunk), error, advice) from error

    def _decoded(self, chunk: Chunk) -> "pa.Table":
        part = chunk.part
        if len(chunk.data) < part.size:
            raise ValueError(f"it ends {part.size - len(chunk.data)} bytes before its chunk at byte {part.start} does")
        table = self._format.table(chunk, self._index.features)
        table.validate(full=True)  # texts too: Arrow takes any bytes for one
        if len(table) != part.rows:
            raise ValueError(f"it has {len(table)} rows, where the index has {part.rows}")
        return table

    def _check_size(self, number: int) -> None:
        """Look at a shard that has no tag by which each read tells whether it has changed: its size, once.

        Raises:
            storage.Changed: it is another one.
            OSError: nobody knows, or it is gone.
        """
        shard = self._index.shards.files[number]
        if shard.tag or number in self._unchanged:
            return
        entry = self._files.entry(shard.name)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "is gone")
        if entry.size != shard.size:
            raise storage.Changed(shard.name)
        self._unchanged.add(number)
