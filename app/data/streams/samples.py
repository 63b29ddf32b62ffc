"""Samples of streamed data: what a recipe makes of rows, chunk by chunk, when they are read."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from app.data.rows import MISSING, NO_MEASURES, Measures, Rows, read_rows
from app.data.streams.chunk_cache import ReadByChunks
from app.data.streams.rows import StreamedRows
from app.sampling.batch_plan import BatchPlan
from app.sampling.hashing import key_of
from app.sampling.orders import ByChunks

if TYPE_CHECKING:
    from datasets import Dataset

Finish = Callable[[list[Any]], list[Any]]
KEPT = 256  # chunks, of which a process keeps what was made


class _Made(NamedTuple):
    """What was made of a chunk."""

    table: "Dataset"
    samples: Rows


class StreamedSamples:
    """The rows of streamed data, made into samples in the process that reads them."""

    digested = ()

    def __init__(
        self,
        rows: StreamedRows,
        make: Callable[["Dataset"], Rows],
        identity: Sequence[object],
        measures: Measures = NO_MEASURES,
        finish: Finish = list,
    ):
        """Make samples of rows.

        Args:
            make: takes the table of a chunk, and returns its samples; these should do their work when they are read.
            identity: what decides the samples, besides the rows.
            measures: of a sample that is read, for run.batches.
            finish: what is still to be done to samples that are read together, of whatever chunks.
        """
        self.rows, self._make, self._finish, self.skips = rows, make, finish, rows.skips
        self.weights, self.lengths = measures
        self.fingerprint = key_of(rows.fingerprint, *identity)
        self.models: dict[str, str] = {}
        """What names the contents of the models that a run over these samples needs, by what they are."""
        self._made: OrderedDict[int, _Made] = OrderedDict()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample: int) -> Any:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        """Return the samples with these numbers, in this order."""
        read = self.rows.by_chunk(samples, self._of)
        there = [number for number, sample in enumerate(read) if sample is not MISSING]
        for number, finished in zip(there, self._finish([read[number] for number in there]), strict=True):
            read[number] = finished
        return read

    def order(self, plan: BatchPlan) -> ByChunks:
        """Return the order in which a run reads the samples."""
        return self.rows.order(plan)

    def shard_hashes(self) -> dict[str, str]:
        """Hash what is in each shard, by its name."""
        return self.rows.shard_hashes()

    def read_by_chunks(self) -> list[ReadByChunks | None]:
        """Say how a run reads the samples."""
        return self.rows.read_by_chunks()

    def prepare(self, samples: np.ndarray) -> None:
        """Begin to fetch the chunks of samples, the first ones first."""
        self.rows.prepare(samples)

    def close(self) -> None:
        """Fetch nothing ahead any more."""
        self.rows.close()

    def _of(self, chunk: int) -> Rows:
        """Return the samples of a chunk: made anew where the cache has opened it anew."""
        table = self.rows.table(chunk)
        if (known := self._made.get(chunk)) is not None and known.table is table:
            self._made.move_to_end(chunk)
            return known.samples
        while len(self._made) >= KEPT:
            self._made.popitem(last=False)
        self._made[chunk] = made = _Made(table, self._make(table))
        return made.samples


class Finished:
    """Samples of a table, to which something is still done when they are read."""

    def __init__(self, samples: Rows, finish: Finish):
        """Take the samples, and what is done to those that are read together."""
        self._samples, self._finish = samples, finish

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, sample: int) -> Any:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        """Return the samples with these numbers, in this order."""
        return self._finish(read_rows(self._samples, samples))
