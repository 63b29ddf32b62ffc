"""Samples of streamed data: what a recipe makes of rows, chunk by chunk, when they are read."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from app.data.rows import Rows, read_rows
from app.data.streams.rows import StreamedRows
from app.sampling.hashing import key_of
from app.sampling.orders import ByChunks

if TYPE_CHECKING:
    from datasets import Dataset

KEPT = 256  # chunks, of which a process keeps what was made


class StreamedSamples:
    """The rows of streamed data, made into samples in the process that reads them."""

    digested = ()
    lengths = None
    """Nobody knows them before the rows are read."""

    def __init__(
        self,
        rows: StreamedRows,
        make: Callable[["Dataset"], Rows],
        identity: Sequence[object],
        weights: Callable[[Any], float] | None = None,
    ):
        """Make samples of rows.

        Args:
            make: takes the table of a chunk, and returns its samples; these should do their work when they are read.
            identity: what decides the samples, besides the rows.
            weights: weighs a sample that is read, for run.batches; None: all weigh 1, and none is missing.
        """
        self.rows, self.weights, self._make = rows, weights, make
        self.fingerprint = key_of(rows.fingerprint, *identity)
        self._made: OrderedDict[int, Rows] = OrderedDict()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample: int) -> Any:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        """Return the samples with these numbers, in this order."""
        chunks, places = self.rows.places(np.asarray(samples, np.int64))
        read: list[Any] = [None] * len(samples)
        for chunk in np.unique(chunks).tolist():
            (here,) = np.nonzero(chunks == chunk)
            of_chunk = read_rows(self._of(chunk), places[here].tolist())
            for number, sample in zip(here.tolist(), of_chunk, strict=True):
                read[number] = sample
        return read

    def order(self, lanes: int, seed: int) -> ByChunks:
        """Return the order in which a run reads the samples."""
        return self.rows.order(lanes, seed)

    def prepare(self, samples: np.ndarray) -> None:
        """Begin to fetch the chunks of samples, the first ones first."""
        self.rows.prepare(samples)

    def _of(self, chunk: int) -> Rows:
        """Return the samples of a chunk."""
        if chunk in self._made:
            self._made.move_to_end(chunk)
            return self._made[chunk]
        while len(self._made) >= KEPT:
            self._made.popitem(last=False)
        self._made[chunk] = made = self._make(self.rows.table(chunk))
        return made
