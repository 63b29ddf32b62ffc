"""In which order a run goes through rows: which row sample t of the run is, and in which of the row's epochs.

Every order is a pure function of the sample's number, which counts on from epoch to epoch. An order with several lanes
(`lanes`) has one for each micro-batch of a full step, or for each few of them, so that what a micro-batch reads lies
close together; an order with one lane lets any micro-batch have any row.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from app.sampling import permutation
from app.sampling.hashing import hash_of_bytes, key_of
from app.sampling.mixture import Mixture, Part
from app.sampling.pieces import Pieces
from app.sampling.seeding import seed_of
from app.sampling.stream_order import StreamOrder


class Order(ABC):
    """An order of rows."""

    rows: int
    """Of an epoch; their ids are from 0 to rows - 1."""
    lanes: int = 1
    sort_over: int = 1
    """Micro-batches of a step that share a lane: they may be sorted by length together, when their rows are read."""
    fingerprint: str = ""
    """Hash of what decides the order, besides the seed and the number of rows."""
    mix: str = ""
    """Hash of the mix of sources; empty for one source."""
    limit: int | None = None
    """How many samples there are; None: any number, epoch after epoch."""

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

    def counts(self, samples: int) -> dict[str, int]:
        """Count those of the first `samples` samples that each source has given, by its name; empty for one source."""
        return {}


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

    def __init__(self, sizes: np.ndarray, lanes: int, window: int, seed: int, sort_over: int = 1):
        """Take the rows of each chunk; the other arguments are those of StreamOrder and of Order."""
        self._order = StreamOrder(sizes, lanes, window, seed)
        self._first = Pieces.of(self._order.sizes).first
        self.rows, self.lanes, self.sort_over = self._order.rows, lanes, sort_over
        self.fingerprint = key_of("chunks", hash_of_bytes([np.asarray(sizes, "<i8")]), window, sort_over)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = self._order.locate(samples)
        return self._first[found.chunks] + found.rows, found.epochs

    def coming(self, samples: np.ndarray, end: int) -> np.ndarray:
        return self._first[self._order.coming(samples, end)]

    def chunks_of(self, lane: int, epoch: int) -> np.ndarray:
        """Return the chunks that a lane reads in an epoch, in the order of reading, int64."""
        return self._order.chunks_of(lane, epoch)


class SourceOrder(NamedTuple):
    """A source of a mixture, and the order of its rows."""

    name: str
    order: Order
    fingerprint: str = ""
    """Hash of its rows; empty if there is none that is cheap."""


class Mixed(Order):
    """Several orders, mixed by quotas. The ids of a source follow those of the sources before it."""

    def __init__(self, sources: Sequence[SourceOrder], parts: Sequence[Part], lanes: int):
        """Mix sources.

        Args:
            parts: the mixes, one after another, as of Mixture.
            lanes: of the mixture; each source has as many, or one.

        Raises:
            ValueError: parts do not fit, or a source has other lanes.
        """
        if any(each.order.lanes not in (1, lanes) for each in sources) or len(parts[0].weights) != len(sources):
            raise ValueError("sources do not fit the mixture: they must be as many, with its lanes, or with one")
        self.sources, self.lanes = tuple(sources), lanes
        self.sort_over = max(each.order.sort_over for each in sources)
        self.mixture = Mixture(parts, lanes)
        self.parts = self.mixture.parts
        self._pieces = Pieces.of([each.order.rows for each in sources])
        self.rows = self._pieces.rows
        self._ends: dict[int, np.ndarray] = {}
        self.fingerprint = self.fingerprint_of(len(sources))
        self.mix = key_of(lanes, *self.parts)

    @cached_property
    def limit(self) -> int | None:  # type: ignore[override]  # it is an attribute of an order
        """Return how many samples there are: None if not all sources have caps."""
        return self.mixture.limit

    def fingerprint_of(self, sources: int) -> str:
        """Hash what decides the order of the first sources; not their mix, which may change."""
        some = self.sources[:sources]
        return key_of(
            "mixed", *((each.name, each.order.rows, each.order.fingerprint, each.fingerprint) for each in some)
        )

    def rows_of(self, sources: int) -> int:
        """Count the rows of the first sources."""
        return int(self._pieces.borders[sources])

    def going_on(self, before: Sequence[Part], seen: int, short: int = 0) -> "Mixed":
        """Return the order of a run that had another mix in its first `seen` samples, and has this one from there on.

        Args:
            before: its parts, of the first of these sources.
            short: samples missing from its steps so far, as of BatchPlan: parts begin with a step, so that many
                samples earlier than they do if all steps are full.
        """
        new = len(self.sources) - len(before[0].weights)
        past = [
            Part(part.start, (*part.weights, *[0.0] * new), (*(part.caps or [None] * len(part.weights)), *[None] * new))
            for part in before
            if part.start < seen or not part.start
        ]
        parts = [part._replace(start=part.start - short) for part in self.parts]
        here = [part for part in parts if part.start <= seen][-1]
        later = [part for part in parts if part.start > seen]
        if not seen:
            return self
        if past[-1][1:] != here[1:]:
            past.append(here._replace(start=seen))
        return Mixed(self.sources, [*past, *later], self.lanes)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        origins = self.mixture.origins(samples)
        ids, epochs = np.empty_like(origins.samples), np.empty_like(origins.samples)
        for source in np.unique(origins.sources).tolist():
            here = origins.sources == source
            found, epochs[here] = self.sources[source].order.locate(origins.samples[here])
            ids[here] = self._pieces.first[source] + found
        return ids, epochs

    def coming(self, samples: np.ndarray, end: int) -> np.ndarray:
        if end not in self._ends:
            self._ends = {end: self.mixture.counts(end)}
        ids = [np.zeros(0, np.int64)]
        for source, following in enumerate(self.mixture.following(samples)):
            if len(following):
                last = int(self._ends[end][source])
                ids.append(self._pieces.first[source] + self.sources[source].order.coming(following, last))
        return np.concatenate(ids)

    def source_of(self, ids: np.ndarray) -> np.ndarray:
        """Return of which source ids are."""
        return self._pieces.piece_of(ids)

    def counts(self, samples: int) -> dict[str, int]:
        """Count those of the first `samples` samples that each source has given, by its name."""
        return dict(zip((each.name for each in self.sources), self.mixture.counts(samples).tolist(), strict=True))


def seed_of_source(seed: int, source: int) -> int:
    """Return the seed of a mixture's source, so that sources of one size have orders of their own."""
    return seed_of(seed, source, 1)
