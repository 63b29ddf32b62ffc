"""Rows of streamed data, by their numbers: the first row of the first chunk is 0."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from app.data.rows import MISSING, Rows, read_rows
from app.data.streams.chunk_cache import ChunkCache, ReadByChunks
from app.data.streams.chunk_reader import BadChunk
from app.data.streams.index import Index
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan
from app.sampling.orders import ByChunks
from app.sampling.pieces import Pieces

if TYPE_CHECKING:
    from datasets import Dataset


class StreamedRows:
    """The rows of a data set, each as a table of datasets would give it."""

    digested = ()
    """No row is read to tell whether data are the same: the index says it."""

    def __init__(self, index: Index, cache: ChunkCache, window: int, skips: bool = False, sort_over: int = 1):
        """Read the chunks of an index through a cache.

        Args:
            window: chunks for each micro-batch whose rows are shuffled together, as --data.window.
            skips: give MISSING for the rows of chunks that stay damaged.
            sort_over: micro-batches of a step that share a lane, as --data.sort-over.
        """
        self._index, self._cache, self.skips, self._read = index, cache, skips, cache.read_by(window, sort_over)
        self._pieces = Pieces.of(index.rows)
        self._bad: set[int] = set()

    def __len__(self) -> int:
        return self._pieces.rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return self.by_chunk(rows, self.table)

    def by_chunk(self, rows: Sequence[int], samples_of: Callable[[int], Rows]) -> list[Any]:
        """Return what stands for rows in the samples of their chunks, in this order.

        Args:
            samples_of: returns the samples of a chunk; it may raise BadChunk.
        """
        read: list[Any] = [MISSING] * len(rows)
        for chunk, here, places in self._pieces.grouped(self._checked(np.asarray(rows, np.int64))):
            if chunk in self._bad:
                continue
            try:
                of_chunk = read_rows(samples_of(chunk), places.tolist())
            except BadChunk as error:
                if not self.skips:
                    raise error.with_advice() from error.__cause__
                self._bad.add(chunk)  # this process does not try it again, and says it once
                told = f"warning: {error}; its rows are left out (--data.bad skip)"
                print(told, file=sys.stderr, flush=True)
                continue
            for number, sample in zip(here.tolist(), of_chunk, strict=True):
                read[number] = sample
        return read

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the chunk of each row, and its place in it.

        Raises:
            IndexError: there is no such row.
        """
        return self._pieces.places_of(self._checked(rows))

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"there are {len(self)} rows")
        return rows

    @property
    def chunks(self) -> int:
        """Count the chunks."""
        return len(self._pieces)

    @property
    def places_of_shards(self) -> frozenset[str]:
        """Return the paths or URLs of the shards."""
        return self._index.shards.places

    @property
    def fingerprint(self) -> str:
        """Return a hash of what the rows depend on."""
        return self._index.fingerprint

    def shard_hashes(self) -> dict[str, str]:
        """Hash what is in each shard, by its name."""
        return self._index.shard_hashes()

    def order(self, plan: BatchPlan) -> ByChunks:
        """Return the order in which a run reads the rows.

        Raises:
            UserError: as many micro-batches as --data.sort-over says cannot share lanes.
        """
        count, shared = plan.micro_batches_per_step, self._read.sort_over
        if count % shared:
            fits = ", ".join(str(number) for number in range(1, count + 1) if not count % number)
            raise UserError(
                f"--data.sort-over {shared}: does not divide the {count} micro-batches of a step (--run.global-batch "
                f"{plan.global_batch}, --run.micro-batch {plan.micro_batch}): give one of {fits}"
            )
        return ByChunks(self._index.rows, count // shared, self._read.lane_window, plan.seed, shared)

    def read_by_chunks(self) -> list[ReadByChunks | None]:
        """Say how a run reads the rows."""
        return [self._read]

    def prepare(self, rows: np.ndarray) -> None:
        """Begin to fetch the chunks of rows, the first ones first."""
        chunks, _ = self.places(rows)
        self._cache.prepare(dict.fromkeys(chunks.tolist()))

    def close(self) -> None:
        """Fetch nothing ahead any more."""
        self._cache.close()

    def table(self, chunk: int) -> "Dataset":
        """Return the rows of a chunk; errors name it as its shard and its place there."""
        return self._cache.dataset(chunk)
