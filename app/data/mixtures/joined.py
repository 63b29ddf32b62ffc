"""The rows of several sources, one after another, and the order in which a run mixes them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from app.data.fingerprint import places
from app.data.mixtures.mix_file import Mix
from app.data.rows import Fetched, Incomplete, Measures, Ordered, Rows, Sharded, Streamed, read_rows
from app.data.streams.chunk_cache import ReadByChunks
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan, Length, Weigh
from app.sampling.hashing import hash_of_bytes, key_of
from app.sampling.mixture import Part
from app.sampling.orders import Mixed, Order, Shuffled, SourceOrder, seed_of_source
from app.sampling.pieces import Pieces
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

    def __init__(self, sources: Sequence[Any], pieces: Pieces):
        """Join those of sources, whose rows are these pieces."""
        self._weights, self._pieces = [each.weights for each in sources], pieces

    def fingerprint_of(self, samples: int) -> str:
        """Hash the weights of the first samples, which are all of some sources."""
        whole = self._weights[: self._pieces.piece_of(samples)]
        return key_of(*(hash_of_bytes([w]) if isinstance(w, np.ndarray) else w.fingerprint_of(len(w)) for w in whole))

    def __len__(self) -> int:
        return self._pieces.rows

    def __getitem__(self, samples: np.ndarray) -> np.ndarray:
        weights = np.empty(len(samples), np.float64)
        for source, here, numbers in self._pieces.grouped(samples):
            weights[here] = self._weights[source][numbers]
        return weights


class JoinedRows:
    """The rows of several sources. The numbers of a source's rows follow those of the sources before it."""

    def __init__(self, sources: Sequence[Rows]):
        """Join the rows of sources."""
        self.sources = tuple(sources)
        self._pieces = Pieces.of([len(each) for each in sources])
        self.lengths: np.ndarray | Length | None = self._lengths()
        """What run.batches gets as `lengths`: those of all rows, if they are known, or what measures one when read."""
        self.weights: JoinedWeights | Weigh | None = self._joined_weights()
        """What run.batches gets as `weights`: those of all rows, if they are known and not all 1, or what weighs one.
        """
        self.skips = any(isinstance(each, Incomplete) and each.skips for each in sources)
        self.digested = self._digested()

    def __len__(self) -> int:
        return self._pieces.rows

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Return the rows with these numbers, in this order."""
        read: list[Any] = [None] * len(rows)
        for source, here, numbers in self.by_source(np.asarray(rows, np.int64)):
            for place, row in zip(here.tolist(), read_rows(source, numbers.tolist()), strict=True):
                read[place] = row
        return read

    def prepare(self, rows: np.ndarray) -> None:
        """Begin to fetch what rows lie in, of sources that must be fetched."""
        for source, _, numbers in self.by_source(rows):
            if isinstance(source, Fetched):
                source.prepare(numbers)

    def close(self) -> None:
        """Fetch nothing ahead any more."""
        for source in self.sources:
            if isinstance(source, Fetched):
                source.close()

    def read_by_chunks(self) -> list[ReadByChunks | None]:
        """Say how each source is read; None for one that is not read by chunks."""
        return [each.read_by_chunks()[0] if isinstance(each, Streamed) else None for each in self.sources]

    def by_source(self, rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Yield each source that has some of these rows, where among them, and their numbers in the source."""
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"there are {len(self)} rows")
        for source, here, numbers in self._pieces.grouped(rows):
            yield self.sources[source], here, numbers

    def _lengths(self) -> np.ndarray | None:
        lengths = [getattr(each, "lengths", None) for each in self.sources]
        return None if any(each is None or callable(each) for each in lengths) else np.concatenate(lengths)  # type: ignore[arg-type]

    def _joined_weights(self) -> JoinedWeights | None:
        known = [getattr(each, "weights", None) for each in self.sources]
        return None if any(w is None or callable(w) for w in known) else JoinedWeights(self.sources, self._pieces)

    def _digested(self) -> list[int]:
        """Choose rows to tell these data from others by: of each source that can be read anywhere, as of one alone."""
        rows: list[int] = []
        for source, first in zip(self.sources, self._pieces.first.tolist(), strict=True):
            if not isinstance(source, Fetched):
                rows += [first + place for place in places(len(source))]
        return rows


class MixedRows(JoinedRows):
    """The rows of a mixture's sources."""

    def __init__(
        self,
        mix: Mix,
        sources: Sequence[Rows],
        measures: Measures | None = None,
        whole: Rows | None = None,
    ):
        """Join the rows of a mixture's sources, in its order.

        Args:
            measures: of a row that is read, where not all rows are known before; None: the rows' own.
            whole: the data set of which the sources are parts, if they were made as one.
        """
        super().__init__(sources)
        self.mix, self.whole = mix, whole
        self.models: dict[str, str] = getattr(whole, "models", {})
        """What names the contents of the models that a run over these rows needs, by what they are."""
        if measures is not None:
            self.weights, self.lengths = measures

    def shard_hashes(self) -> dict[str, str]:
        """Hash what is in each file of sources that know it, by the names of the source and the file."""
        named = zip(self.mix.sources, self.sources, strict=True)
        known = [(about.name, each.shard_hashes()) for about, each in named if isinstance(each, Sharded)]
        return {f"{source}: {shard}": value for source, hashes in known for shard, value in hashes.items()}

    def order(self, plan: BatchPlan) -> Mixed:
        """Return the order in which a run mixes the sources; raises as `mixed_order`."""
        return mixed_order(self.mix, self.sources, plan)


def as_one(rows: Any) -> Any:
    """Return the data set that a mixture was cut from; other rows as they are."""
    return rows.whole if isinstance(rows, MixedRows) else rows


def mixed_order(mix: Mix, rows: Sequence[Any], plan: BatchPlan) -> Mixed:
    """Return the order in which a run mixes sources, which have these rows.

    Raises:
        UserError: a source has fewer rows than a global batch.
    """
    sources = []
    for number, (about, own_rows) in enumerate(zip(mix.sources, rows, strict=True)):
        if len(own_rows) < plan.global_batch:
            raise UserError(
                f"--data.mix: the source {about.name} has {len(own_rows):,} rows, fewer than --run.global-batch "
                f"{plan.global_batch}: give it more, join it with another one, or leave it out"
            )
        own = dataclasses.replace(plan, samples=len(own_rows), seed=seed_of_source(plan.seed, number))
        order: Order = own_rows.order(own) if isinstance(own_rows, Ordered) else Shuffled(own.samples, own.seed)
        sources.append(SourceOrder(about.name, order, getattr(own_rows, "fingerprint", None) or ""))
    return Mixed(sources, _parts(mix, rows, plan), max(each.order.lanes for each in sources))


def _parts(mix: Mix, rows: Sequence[Any], plan: BatchPlan) -> list[Part]:
    """Return the mixes of a run, one after another."""
    weights = {each.name: each.weight for each in mix.sources}
    caps = tuple(
        None if about.epochs is None else max(1, round(about.epochs * len(each)))
        for about, each in zip(mix.sources, rows, strict=True)
    )
    by_start = {0: tuple(weights.values())}
    for change in sorted(mix.later, key=lambda each: as_steps(each.start, plan.steps)):
        weights |= change.weights
        by_start[plan.sizes.before(as_steps(change.start, plan.steps))] = tuple(weights.values())
    return [Part(start, each, caps) for start, each in by_start.items()]
