"""Rows of streamed data, by their numbers: the first row of the first chunk is 0."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.data.streams.chunk_cache import ChunkCache
from app.data.streams.index import Index


class StreamedRows:
    """The rows of a data set, each as a table of datasets would give it."""

    def __init__(self, index: Index, cache: ChunkCache):
        """Read the chunks of an index through a cache."""
        self._index, self._cache = index, cache
        self._ends = np.cumsum(index.rows, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        chunks, places = self.places(np.asarray(rows, np.int64))
        read: dict[int, dict[str, Any]] = {}
        for chunk in np.unique(chunks).tolist():
            table = self._cache.dataset(chunk)
            (here,) = np.nonzero(chunks == chunk)
            of_chunk = table.__getitems__(places[here].tolist())
            read |= dict(zip(here.tolist(), of_chunk, strict=True))
        return [read[number] for number in range(len(rows))]

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the chunk of each row, and its place in it.

        Raises:
            IndexError: there is no such row.
        """
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"there are {len(self)} rows")
        chunks = np.searchsorted(self._ends, rows, side="right")
        return chunks, rows - (self._ends[chunks] - self._index.rows[chunks])

    def prepare(self, chunks: Sequence[int]) -> None:
        """Fetch chunks ahead of need."""
        self._cache.prepare(chunks)
