"""Which source of a mixture sample n is of, and which of that source's samples: functions of n alone, without draws.

**Quotas.** Of the first n samples, each source has a count that is settled by a tree of two-way splits: of m samples at
a node, m x share + 1/2, rounded down, go to its lighter side, and the rest to the other. When m grows by one, one side
grows by one. So counts never fall, they add up to n, and sample n is of the one source whose count grows. The tree is
Huffman's, the lightest sources deepest. A split is off by at most 1/2, of which a source inherits its part of the
node's weight, and these weights grow upwards at least as Fibonacci's numbers do: 1/2 x (1 + 1 + 1/2 + 1/3 + 1/5 + ...)
is 1.68, so no count is ever further than that from n x weight. To go down the tree takes about log2(sources) splits.

**Lanes.** With K lanes (`lanes`), sample n is of lane n mod K, and each lane has a tree of its own, whose splits
round at another point: at the k-th of K points in [0, 1), in an order of lanes that is another one at each node. The
other way, one tree for all whose sources are each dealt to the lanes, makes micro-batches of unequal size: with 20
sources, some micro-batches of 8 rows had 19. Such a micro-batch does not fit a GPU that 8 fill, and all ranks wait
for it. Moving the surplus to other micro-batches would make several machines read one chunk. So sizes stay equal,
each micro-batch reads its own lane of each source, and each lane has the mix to within 3.4 samples (the sum above
without the 1/2) at any time. The price is that the lanes' sum is further off: lanes that all rounded at 1/2 would be
wrong together, while with K points the errors of one split cancel in each round of K samples. What is left comes from
the nodes below and from rounds that are not complete. It was at most 3.4 samples with 8 lanes, and about the root of
K with more, and it does not grow with n, as that of random draws does (`benchmarks/stream_mixing.py`). One lane is
for sources whose rows any rank can read; there the bound is the 1.68 above.

**Parts and caps.** A mixture may change at a sample, on resume or as planned ahead; each source then goes on behind its
last sample, in each lane. A source that has given as many samples as it may (its cap, such as its rows x epochs) leaves
the mix, lane by lane, and the others share its place by their weights.

These values must never change: a resumed run depends on them for the samples that it sees next.
"""

import functools
import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from app.sampling.lanes import dealt
from app.sampling.permutation import LARGEST, permute

# What stands for 1: shares are multiples of 1 / ONE, so that none is off by more than an eighth over 2**62 samples.
ONE = 1 << 64


class Part(NamedTuple):
    """The mix from one sample of the run on."""

    start: int
    weights: tuple[float | Fraction, ...]
    """Of each source, in any unit; 0: it is not in this mix."""
    caps: tuple[int | None, ...] = ()
    """The most samples of each source in the whole run; None, or no caps at all: no limit."""


class Origins(NamedTuple):
    """Where samples of a mixture are from: int64 arrays of one shape."""

    sources: np.ndarray
    samples: np.ndarray
    """Their numbers among the source's own samples, counted from 0 over all its epochs."""


class Tree:
    """Two-way splits of samples over some sources.

    `roundings` is what the splits of a lane add before they round down: for each node, in units of 1 / ONE.
    """

    def __init__(self, weights: Sequence[float | Fraction]):
        """Build Huffman's tree of weights above 0, one for each source."""
        self.shares: list[int] = []
        """Of each node, what its lighter side gets, in units of 1 / ONE."""
        self.sides: list[tuple[int, int]] = []
        """Of each node, its lighter side and its heavier one: a node, or ~ source."""
        self.paths: list[list[tuple[int, bool]]] = [[] for _ in weights]
        """Of each source, the nodes above it, from the root down, and whether it is on their heavier side."""
        exact = [Fraction(weight) for weight in weights]
        unit = math.lcm(*(weight.denominator for weight in exact))
        self.weights = [int(weight * unit) for weight in exact]
        """Of the sources, as exact whole numbers."""
        self.total = sum(self.weights)
        heap = [(weight, place, ~place, [place]) for place, weight in enumerate(self.weights)]
        heapq.heapify(heap)
        while len(heap) > 1:
            light, _, light_side, light_sources = heapq.heappop(heap)
            heavy, _, heavy_side, heavy_sources = heapq.heappop(heap)
            node = len(self.shares)
            self.shares.append((2 * light * ONE // (light + heavy) + 1) // 2)  # rounded
            self.sides.append((light_side, heavy_side))
            for is_heavier, sources in enumerate((light_sources, heavy_sources)):
                for source in sources:
                    self.paths[source].insert(0, (node, bool(is_heavier)))
            heapq.heappush(heap, (light + heavy, len(exact) + node, node, light_sources + heavy_sources))
        self.root = heap[0][2]

    def count(self, source: int, samples: int, roundings: Sequence[int]) -> int:
        """Count those of the first `samples` samples that are of a source."""
        for node, is_heavier in self.paths[source]:
            lighter = (samples * self.shares[node] + roundings[node]) // ONE
            samples = samples - lighter if is_heavier else lighter
        return samples

    def origin(self, sample: int, roundings: Sequence[int]) -> tuple[int, int]:
        """Return of which source a sample is, and how many of the samples before it were of that source."""
        node = self.root
        while node >= 0:
            share = self.shares[node]
            lighter, rest = divmod(sample * share + roundings[node], ONE)
            is_heavier = rest + share < ONE  # with this sample, the lighter side's count does not grow
            node, sample = self.sides[node][is_heavier], sample - lighter if is_heavier else lighter
        return ~node, sample

    def reaches(self, source: int, count: int, roundings: Sequence[int]) -> int:
        """Return the least number of samples of which `count` are of a source, or 2**62 if it is larger."""
        low, high = self._around(source, count)
        numbers = range(min(low, LARGEST), min(high, LARGEST))
        place = bisect_left(numbers, count, key=lambda samples: self.count(source, samples, roundings))
        return numbers.start + place

    def first_full(self, most: dict[int, int], roundings: Sequence[int]) -> int:
        """Return after how many samples the first of some sources has as many as it may, or 2**62 if that is later."""
        first = LARGEST
        for low, source in sorted((self._around(source, count)[0], source) for source, count in most.items()):
            if low >= first:
                break
            first = min(first, self.reaches(source, most[source], roundings))
        return first

    def _around(self, source: int, count: int) -> tuple[int, int]:
        """Return two numbers of samples between which a source reaches a count: no count is off by 4."""
        low, high = ((count + error) * self.total // self.weights[source] for error in (-4, 4))
        return max(0, low), high + 1


class _Stage(NamedTuple):
    """A stretch of a lane in which one tree holds. Samples are the lane's, counted from the beginning of the run."""

    start: int
    tree: Tree
    sources: tuple[int, ...]
    """The sources of the tree."""
    given: tuple[int, ...]
    """How many samples of each source of the mixture the lane had before."""
    roundings: Sequence[int]

    def counts(self, samples: int) -> tuple[int, ...]:
        """Return how many of the lane's first `samples` samples are of each source."""
        counts = list(self.given)
        for place, source in enumerate(self.sources):
            counts[source] += self.tree.count(place, samples - self.start, self.roundings)
        return tuple(counts)

    def origin(self, sample: int) -> tuple[int, int]:
        """Return of which source a sample is, and how many of the lane's samples before it were of that source."""
        place, before = self.tree.origin(sample - self.start, self.roundings)
        source = self.sources[place]
        return source, self.given[source] + before


class _Lane(NamedTuple):
    """The samples of one lane."""

    stages: list[_Stage]
    end: int | None
    """How many samples there are, if all sources have caps."""

    def stage(self, sample: int) -> _Stage:
        """Return the stage that a sample is in."""
        if self.end is not None and sample >= self.end:
            raise IndexError(f"sample {sample} of a lane that has {self.end}: all sources have given what they may")
        return self.stages[bisect_right(self.stages, sample, key=lambda stage: stage.start) - 1]


class Mixture:
    """Several sources, mixed by exact quotas."""

    def __init__(self, parts: Sequence[Part], lanes: int = 1):
        """Take the mix, or the mixes one after another.

        Args:
            parts: the first one starts at 0, each other one behind the one before it. All have the same sources; one
                that is new on resume is the last one, and has weight 0 in the earlier parts.
            lanes: the number of micro-batches of a full step if a source is read by lanes (StreamOrder); else 1.

        Raises:
            ValueError: parts are not of that kind, or a mix has a weight below 0 or none above, or a cap below 1.
        """
        _check(parts, lanes)
        self.lanes, self.sources = lanes, len(parts[0].weights)
        self.parts = [part._replace(caps=part.caps or (None,) * self.sources) for part in parts]
        # Each source is dealt from the lane on in which the one before it ends. So if all have caps, they all end
        # in the lane in which the run does, and no lane runs dry before the others.
        ends = itertools.accumulate((cap or 0 for cap in self.parts[0].caps), initial=0)
        self._first_lanes = [end % lanes for end in ends]
        # The seed is no setting of the run, so that the mix is not a matter of chance.
        self._ranks = [permute(np.arange(lanes), lanes, 0, node) for node in range(self.sources - 1)]
        self._lanes: dict[int, _Lane] = {}

    @property
    def limit(self) -> int | None:
        """Return how many samples there are: None if not all sources have caps."""
        ends = [(self._lane(lane).end, lane) for lane in range(self.lanes)]
        return min((end * self.lanes + lane for end, lane in ends if end is not None), default=None)

    def counts(self, samples: int) -> np.ndarray:
        """Return how many of the first `samples` samples are of each source: int64 [sources].

        Raises:
            IndexError: there are fewer, or the number is below 0 or above 2**62.
        """
        if not 0 <= samples <= LARGEST:
            raise IndexError(f"{samples} samples: there can be 0 to 2**62")
        counts = np.zeros(self.sources, np.int64)
        for lane in range(self.lanes):
            in_lane = dealt(samples, lane, self.lanes)
            counts += self._lane(lane).stage(max(0, in_lane - 1)).counts(in_lane)
        return counts

    def origins(self, samples: np.ndarray) -> Origins:
        """Return where samples (integers of any shape, counted from 0) are from.

        Raises:
            IndexError: there is no such sample.
        """
        samples = np.asarray(samples).astype(np.int64, casting="same_kind")
        if samples.size and not 0 <= samples.min() <= samples.max() < LARGEST:
            raise IndexError(f"samples {samples.min()} to {samples.max()} are not all in [0, 2**62)")
        pairs = np.array([self._origin(sample) for sample in samples.reshape(-1).tolist()], np.int64).reshape(-1, 2)
        return Origins(pairs[:, 0].reshape(samples.shape), pairs[:, 1].reshape(samples.shape))

    def following(self, samples: np.ndarray) -> list[np.ndarray]:
        """Return for each source which of its samples come next in the lanes of these samples: int64 [lanes].

        They are counted as in `origins`, from each lane's last one of these samples on. Sources that give nothing in
        the mix of that sample have none.
        """
        flat = np.asarray(samples, np.int64).reshape(-1)
        found: list[list[int]] = [[] for _ in range(self.sources)]
        for lane in np.unique(flat % self.lanes).tolist():
            in_lane = int(flat[flat % self.lanes == lane].max()) // self.lanes
            stage = self._lane(lane).stage(in_lane)
            counts = stage.counts(in_lane)
            for source in stage.sources:
                found[source].append(counts[source] * self.lanes + self.lane_in_source(source, lane))
        return [np.array(numbers, np.int64) for numbers in found]

    def lane_in_source(self, source: int, lane: int) -> int:
        """Return which lane of a source (of its StreamOrder) a lane of the mixture reads."""
        return (lane - self._first_lanes[source]) % self.lanes

    def _origin(self, sample: int) -> tuple[int, int]:
        in_lane, lane = divmod(sample, self.lanes)
        source, before = self._lane(lane).stage(in_lane).origin(in_lane)
        return source, before * self.lanes + self.lane_in_source(source, lane)

    def _lane(self, lane: int) -> _Lane:
        """Return a lane; it is built when it is asked for first, as a rank needs few."""
        if lane not in self._lanes:
            self._lanes[lane] = self._built(lane)
        return self._lanes[lane]

    def _built(self, lane: int) -> _Lane:
        # The k-th of K lanes rounds at (k + 1/2) / K, where k is its rank at the node.
        roundings = [(2 * int(ranks[lane]) + 1) * ONE // (2 * self.lanes) for ranks in self._ranks]
        stages: list[_Stage] = []
        given: tuple[int, ...] = (0,) * self.sources
        starts = [dealt(part.start, lane, self.lanes) for part in self.parts]
        for part, sample, end in zip(self.parts, starts, [*starts[1:], LARGEST], strict=True):
            while sample < end:
                left = self._left(part, lane, given)
                if not left:
                    return _Lane(stages, sample)
                tree = _tree(tuple(part.weights[source] for source in left))
                stage = _Stage(sample, tree, tuple(left), given, roundings)
                stages.append(stage)
                most = {place: count for place, count in enumerate(left.values()) if count is not None}
                sample = min(end, sample + tree.first_full(most, roundings))
                given = stage.counts(sample)
        return _Lane(stages, None)

    def _left(self, part: Part, lane: int, given: Sequence[int]) -> dict[int, int | None]:
        """Return, for each source that still gives samples in a lane, how many: None if there is no limit."""
        left: dict[int, int | None] = {}
        for source, (weight, cap) in enumerate(zip(part.weights, part.caps, strict=True)):
            most = None if cap is None else dealt(cap, self.lane_in_source(source, lane), self.lanes) - given[source]
            if weight and (most is None or most > 0):
                left[source] = most
        return left


@functools.lru_cache(maxsize=64)
def _tree(weights: tuple[float | Fraction, ...]) -> Tree:
    """Return the tree of some weights, which lanes share."""
    return Tree(weights)


def _check(parts: Sequence[Part], lanes: int) -> None:
    if lanes < 1:
        raise ValueError(f"lanes is {lanes}: it must be at least 1")
    starts = [part.start for part in parts]
    if starts[:1] != [0] or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"parts start at {starts}: the first must start at 0, and each behind the one before it")
    for part in parts:
        if len(part.weights) != len(parts[0].weights) or (part.caps and len(part.caps) != len(part.weights)):
            raise ValueError("parts have different numbers of sources, or of weights and caps")
        if not all(0 <= weight < math.inf for weight in part.weights) or not any(part.weights):
            raise ValueError(f"weights are {part.weights}: none may be below 0 or infinite, and one must be above 0")
        if any(cap is not None and cap < 1 for cap in part.caps):
            raise ValueError(f"caps are {part.caps}: each must be at least 1, or None")
