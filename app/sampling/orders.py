"""In which order a run goes through rows: which row sample t of the run is, and in which of the row's epochs.

Every order is a pure function of the sample's number, which counts on from epoch to epoch. An order with K lanes
(`lanes`) has one for each micro-batch of a full step, so that what a micro-batch reads lies close together; an order
with one lane lets any micro-batch have any row.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from app.sampling import permutation
from app.sampling.hashing import hash_of_bytes, key_of
from app.sampling.mixture import Mixture
from app.sampling.seeding import seed_of
from app.sampling.stream_order import StreamOrder


class Order(ABC):
    """An order of rows."""

    rows: int
    """Of an epoch; their ids are from 0 to rows - 1."""
    lanes: int = 1
    fingerprint: str = ""
    """Hash of what decides the order, besides the seed and the number of rows."""

    @abstractmethod
    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and the epochs (int64) of samples, which are integers of any shape."""

    def stretch(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and the epochs of samples low to high - 1."""
        return self.locate(np.arange(low, high))

    def coming(self, samples: np.ndarray, end: int) -> np.ndarray:
        """Return ids, int64, one of each chunk that is read at these samples or soon after.

        Args:
            end: the number of samples of the run.
        """
        return np.zeros(0, np.int64)


class Shuffled(Order):
    """Rows that can be read in any order: each epoch has its own permutation of them."""

    def __init__(self, rows: int, seed: int):
        self.rows, self.seed = rows, seed

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return permutation.stream(samples, self.rows, self.seed)

    def stretch(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        return permutation.stretch(low, high, self.rows, self.seed)


class ByChunks(Order):
    """Rows that are read by chunks, in the order of a StreamOrder; an id counts the rows of the chunks before too."""

    def __init__(self, sizes: np.ndarray, lanes: int, window: int, seed: int):
        """Take the rows of each chunk; the arguments are those of StreamOrder."""
        self._order = StreamOrder(sizes, lanes, window, seed)
        self._first = np.cumsum(self._order.sizes) - self._order.sizes
        self.rows, self.lanes = self._order.rows, lanes
        self.fingerprint = key_of("chunks", hash_of_bytes([np.asarray(sizes, "<i8")]), window)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = self._order.locate(samples)
        return self._first[found.chunks] + found.rows, found.epochs

    def coming(self, samples: np.ndarray, end: int) -> np.ndarray:
        return self._first[self._order.coming(samples, end)]


class Mixed(Order):
    """Several orders, mixed by quotas. The ids of a source follow those of the sources before it."""

    def __init__(self, mixture: Mixture, sources: Sequence[Order]):
        """Mix orders that have the mixture's lanes, or one lane.

        Raises:
            ValueError: there are other sources than in the mixture, or their lanes are others.
        """
        if len(sources) != mixture.sources or any(each.lanes not in (1, mixture.lanes) for each in sources):
            raise ValueError("sources do not fit the mixture: they must be as many, with its lanes, or with one")
        self.mixture, self.sources = mixture, tuple(sources)
        self.rows, self.lanes = sum(each.rows for each in sources), mixture.lanes
        self._first = np.cumsum([0, *(each.rows for each in sources)])
        self._ends: dict[int, np.ndarray] = {}
        self.fingerprint = key_of("mixed", *((each.rows, each.fingerprint) for each in sources))

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        origins = self.mixture.origins(samples)
        ids, epochs = np.empty_like(origins.samples), np.empty_like(origins.samples)
        for source in np.unique(origins.sources).tolist():
            here = origins.sources == source
            found, epochs[here] = self.sources[source].locate(origins.samples[here])
            ids[here] = self._first[source] + found
        return ids, epochs

    def coming(self, samples: np.ndarray, end: int) -> np.ndarray:
        if end not in self._ends:
            self._ends = {end: self.mixture.counts(end)}
        ids = [np.zeros(0, np.int64)]
        for source, following in enumerate(self.mixture.following(samples)):
            if len(following):
                ids.append(self._first[source] + self.sources[source].coming(following, int(self._ends[end][source])))
        return np.concatenate(ids)

    def source_of(self, ids: np.ndarray) -> np.ndarray:
        """Return of which source ids are."""
        return np.searchsorted(self._first, ids, side="right") - 1


def seed_of_source(seed: int, source: int) -> int:
    """Return the seed of a mixture's source, so that sources of one size have orders of their own."""
    return seed_of(seed, source, 1)
