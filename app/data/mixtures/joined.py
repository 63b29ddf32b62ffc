"""The rows of several sources, one after another, and the order in which a run mixes them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from app.data.mixtures.mix_file import Mix
from app.data.rows import Fetched, Incomplete, Ordered, Rows, read_rows
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan
from app.sampling.hashing import key_of
from app.sampling.mixture import Part
from app.sampling.orders import Mixed, Order, Shuffled, Source, seed_of_source
from app.sampling.triggers import as_steps


class Slice:
    """Some neighbouring rows of a data set that is read as a whole."""

    def __init__(self, rows: Any, start: int, end: int):
        self.rows, self.start, self.end = rows, start, end
        lengths, weights = getattr(rows, "lengths", None), getattr(rows, "weights", None)
        self.lengths = None if lengths is None else lengths[start:end]
        self.weights = None if weights is None else weights[start:end]

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return the rows with these numbers, counted from the first one of the slice."""
        return read_rows(self.rows, [self.start + number for number in numbers])


class JoinedWeights:
    """The weights of the rows of several sources."""

    def __init__(self, sources: Sequence[Any], ends: np.ndarray):
        self._weights, self._ends = [each.weights for each in sources], ends
        prints = [getattr(each, "fingerprint", None) or key_of(*np.asarray(each)) for each in self._weights]
        self.fingerprint = key_of(*prints)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, samples: np.ndarray) -> np.ndarray:
        sources = np.searchsorted(self._ends, samples, side="right")
        weights = np.empty(len(samples), np.float64)
        for source in np.unique(sources).tolist():
            here = sources == source
            first = self._ends[source - 1] if source else 0
            weights[here] = self._weights[source][samples[here] - first]
        return weights


class JoinedRows:
    """The rows of a mixture. The numbers of a source's rows follow those of the sources before it."""

    def __init__(self, mix: Mix, sources: Sequence[Rows]):
        """Join the rows of a mixture's sources, in its order."""
        self.mix, self.sources = mix, tuple(sources)
        self._ends = np.cumsum([len(each) for each in sources])
        self.lengths = self._lengths()
        """Of all rows, if they are known."""
        self.weights = self._joined_weights()
        """Of all rows, if they are known and not all 1."""
        self.skips = any(isinstance(each, Incomplete) and each.skips for each in sources)
        self.digested = self._digested()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Return the rows with these numbers, in this order."""
        read: list[Any] = [None] * len(rows)
        for source, here, numbers in self._by_source(np.asarray(rows, np.int64)):
            for place, row in zip(here.tolist(), read_rows(source, numbers.tolist()), strict=True):
                read[place] = row
        return read

    def prepare(self, rows: np.ndarray) -> None:
        """Begin to fetch what rows lie in, of sources that must be fetched."""
        for source, _, numbers in self._by_source(rows):
            if isinstance(source, Fetched):
                source.prepare(numbers)

    def order(self, plan: BatchPlan) -> Mixed:
        """Return the order in which a run mixes the sources.

        Raises:
            UserError: a source has fewer rows than a global batch.
        """
        sources = []
        for number, (about, rows) in enumerate(zip(self.mix.sources, self.sources, strict=True)):
            if len(rows) < plan.global_batch:
                raise UserError(
                    f"--data.mix: the source {about.name} has {len(rows):,} rows, fewer than --run.global-batch "
                    f"{plan.global_batch}: give it more, join it with another one, or leave it out"
                )
            own = dataclasses.replace(plan, samples=len(rows), seed=seed_of_source(plan.seed, number))
            order: Order = rows.order(own) if isinstance(rows, Ordered) else Shuffled(own.samples, own.seed)
            fingerprint = rows.fingerprint if isinstance(rows, Ordered) and hasattr(rows, "fingerprint") else ""
            sources.append(Source(about.name, order, fingerprint))
        lanes = max(each.order.lanes for each in sources)
        return Mixed(sources, self._parts(plan), lanes)

    def _parts(self, plan: BatchPlan) -> list[Part]:
        """Return the mixes of a run, one after another."""
        weights = {each.name: each.weight for each in self.mix.sources}
        caps = tuple(
            None if each.epochs is None else max(1, round(each.epochs * len(rows)))
            for each, rows in zip(self.mix.sources, self.sources, strict=True)
        )
        by_start = {0: tuple(weights.values())}
        for change in sorted(self.mix.later, key=lambda each: as_steps(each.start, plan.steps)):
            weights |= change.weights
            by_start[plan.sizes.before(as_steps(change.start, plan.steps))] = tuple(weights.values())
        return [Part(start, each, caps) for start, each in by_start.items()]

    def _by_source(self, rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Yield each source that has some of these rows, where among them, and their numbers in the source."""
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"there are {len(self)} rows")
        sources = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(sources).tolist():
            (here,) = np.nonzero(sources == number)
            first = self._ends[number - 1] if number else 0
            yield self.sources[number], here, rows[here] - first

    def _lengths(self) -> np.ndarray | None:
        lengths = [getattr(each, "lengths", None) for each in self.sources]
        return None if any(each is None for each in lengths) else np.concatenate(lengths)  # type: ignore[arg-type]

    def _joined_weights(self) -> JoinedWeights | None:
        return (
            None
            if any(getattr(s, "weights", None) is None for s in self.sources)
            else JoinedWeights(self.sources, self._ends)
        )

    def _digested(self) -> list[int]:
        """Choose rows to tell these data from others by: of each source that can be read anywhere, the ends."""
        rows: list[int] = []
        for source, end in zip(self.sources, self._ends.tolist(), strict=True):
            if not isinstance(source, Fetched):
                rows += [end - len(source), end - 1]
        return sorted(set(rows))
