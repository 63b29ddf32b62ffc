"""Mixture: exact quotas at any sample, no sample of a source lost or doubled, in lanes and parts and up to caps."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.sampling.lanes import micro_batches
from app.sampling.mixture import Mixture, Part, Tree
from app.sampling.stream_order import StreamOrder

properties = settings(derandomize=True, deadline=None, database=None)
# No count is further from n x weight, with one lane and in a lane of several: half, and all, of the sum of
# 1 / Fibonacci's numbers. An eighth more is what shares of 64 bits may add at 2**62 samples.
ALONE, IN_LANE = 1.68, 3.36
lane_counts = st.integers(1, 9)
near = st.one_of(st.integers(1, 50), st.floats(1e-3, 1e3), st.fractions(Fraction(1, 10**6), 10**6))
far = st.sampled_from([1e-300, 1e300, Fraction(1, 10**9), 10**9])
mixes = st.lists(near, min_size=1, max_size=12).map(tuple) | st.lists(near | far, min_size=1, max_size=12).map(tuple)
plain = st.lists(st.integers(1, 50), min_size=2, max_size=6).map(tuple)


def shares_of(weights) -> list[Fraction]:
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def pairs(mixture: Mixture, samples: range) -> list[tuple[int, int]]:
    """Return the source and its sample of samples."""
    origins = mixture.origins(np.array(samples))
    return list(zip(origins.sources.tolist(), origins.samples.tolist(), strict=True))


def furthest(counts, samples: int, weights) -> float:
    return float(
        max(abs(int(count) - samples * share) for count, share in zip(counts, shares_of(weights), strict=True))
    )


def slow_counts(weights, samples: int) -> list[int]:
    """Count by Huffman's tree with shares of 64 bits, in another way than the mixture does."""
    nodes = [(share, place, {place: None}) for place, share in enumerate(shares_of(weights))]
    tie = len(nodes)
    while len(nodes) > 1:
        nodes.sort(key=lambda node: node[:2])
        (a, _, light), (b, _, heavy) = nodes[:2]
        nodes = [*nodes[2:], (a + b, tie, (Fraction(round(a / (a + b) * 2**64), 2**64), light, heavy))]
        tie += 1

    def split(node, here: int) -> dict[int, int]:
        if isinstance(node, dict):
            return dict.fromkeys(node, here)
        share, light, heavy = node
        lighter = int(here * share + Fraction(1, 2))
        return split(light, lighter) | split(heavy, here - lighter)

    counts = split(nodes[0][2], samples)
    return [counts[place] for place in range(len(weights))]


@properties
@given(mixes, lane_counts, st.integers(1, 120))
def test_every_count_is_near_its_quota_and_every_sample_comes_once(weights, lanes, samples):
    """For any n, counts add up to n, and one of them grows by one."""
    mixture = Mixture([Part(0, weights)], lanes)
    before, used = np.zeros(len(weights), int), [set() for _ in weights]
    counts_of_lanes = np.zeros((lanes, len(weights)), int)
    for n, (source, number) in enumerate(pairs(mixture, range(samples))):
        counts = mixture.counts(n + 1)
        assert np.flatnonzero(counts - before).tolist() == [source] and counts.sum() == n + 1
        counts_of_lanes[n % lanes, source] += 1
        assert number not in used[source]
        used[source].add(number)
        before = counts
        assert furthest(counts_of_lanes[n % lanes], n // lanes + 1, weights) < IN_LANE
        assert lanes > 1 or furthest(counts, n + 1, weights) < ALONE
    for source, numbers in enumerate(used):  # each lane's, one after another
        for lane in range(lanes):
            slot = mixture.lane_in_source(source, lane)
            numbers_here = sorted(number for number in numbers if number % lanes == slot)
            assert numbers_here == list(range(slot, slot + lanes * counts_of_lanes[lane, source], lanes))


@properties
@given(st.lists(st.integers(1, 50), min_size=1, max_size=9).map(tuple), st.integers(0, 400) | st.integers(0, 2**62))
def test_counts_are_those_of_exact_splits(weights, samples):
    assert Mixture([Part(0, weights)]).counts(samples).tolist() == slow_counts(weights, samples)


@properties
@given(mixes, lane_counts, st.integers(0, 18).flatmap(lambda power: st.integers(10**power, 4 * 10**power)))
def test_any_number_of_samples(weights, lanes, samples):
    mixture = Mixture([Part(0, weights)], lanes)
    counts, (source, number) = mixture.counts(samples), pairs(mixture, range(samples, samples + 1))[0]
    assert counts.sum() == samples
    assert np.flatnonzero(mixture.counts(samples + 1) - counts).tolist() == [source]
    assert furthest(counts, samples, weights) < (ALONE + 0.125 if lanes == 1 else lanes * (IN_LANE + 0.125))
    assert lanes > 1 or number == counts[source]


def test_shares_are_rounded_to_64_bits():
    assert Tree((3, 4)).shares == [round(Fraction(3, 7) * 2**64)] and Tree((1, 2)).shares == [2**64 // 3]


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_sources_take_ten_splits(seed):
    """On average."""
    weights = np.random.default_rng(seed).pareto(0.7, 1000) + 0.1
    tree, mixture = Tree(weights.tolist()), Mixture([Part(0, tuple(weights.tolist()))])
    splits = sum(weight * len(path) for weight, path in zip(tree.weights, tree.paths, strict=True))
    assert splits < 10 * tree.total
    counts = mixture.counts(100_000)
    assert counts.sum() == 100_000 and np.abs(counts - 100_000 * weights / weights.sum()).max() < ALONE


def test_lanes_round_apart():
    """Over 8 lanes, no count is further than 4 samples from its quota. It would be 8, if all lanes rounded alike."""
    furthest_of_all = []
    for seed in range(12):
        weights = np.random.default_rng(seed).dirichlet(np.full(5, 0.5)) + 1e-6
        sources = Mixture([Part(0, tuple(weights.tolist()))], 8).origins(np.arange(4000)).sources
        counts = np.cumsum(sources[:, None] == np.arange(5), axis=0)
        furthest_of_all.append(np.abs(counts - np.arange(1, 4001)[:, None] * (weights / weights.sum())).max())
    assert max(furthest_of_all) < 4 and np.mean(furthest_of_all) < 3


@properties
@given(plain, st.lists(st.integers(1, 60), min_size=6, max_size=6), lane_counts)
def test_sources_with_caps_give_all_their_samples_once_and_end_with_the_run(weights, caps, lanes):
    """Caps divide neither by lanes nor by each other, and no lane runs dry before the last sample."""
    caps = caps[: len(weights)]
    mixture = Mixture([Part(0, weights, tuple(caps))], lanes)
    assert mixture.limit == sum(caps) and mixture.counts(sum(caps)).tolist() == caps
    expected = [(source, number) for source, cap in enumerate(caps) for number in range(cap)]
    assert sorted(pairs(mixture, range(sum(caps)))) == expected
    with pytest.raises(IndexError, match="all sources have given what they may"):
        mixture.origins(np.array([sum(caps)]))
    with pytest.raises(IndexError):
        mixture.counts(sum(caps) + 1)


@properties
@given(plain, st.integers(1, 60), lane_counts)
def test_others_take_the_place_of_a_source_that_has_ended(weights, cap, lanes):
    mixture = Mixture([Part(0, weights, (cap, *[None] * (len(weights) - 1)))], lanes)
    samples = 100 * sum(weights) * (cap + lanes)  # far behind the end of the first source, in each lane
    counts = mixture.counts(samples)
    assert counts[0] == cap and counts.sum() == samples and mixture.limit is None
    begin = mixture.counts(samples // 2)
    gained = (counts - begin)[1:]
    assert furthest(gained, int(gained.sum()), weights[1:]) < 2 * lanes * IN_LANE
    assert furthest(mixture.counts(cap), cap, weights) < lanes * IN_LANE  # until then, the mix is as it was asked for


@properties
@given(st.lists(st.tuples(plain.filter(lambda w: len(w) > 2), st.integers(1, 90)), min_size=1, max_size=4), lane_counts)
def test_after_another_mix_each_source_goes_on_behind_its_last_sample(drawn, lanes):
    """Sources come and go: a weight of 0 is none. What was before a part does not depend on it."""
    starts = [0, *itertools.accumulate(length for _, length in drawn)]
    mixes_here = [(*weights[:2], place % 2 * weights[2]) for place, (weights, _) in enumerate(drawn)]
    parts = [Part(start, weights) for start, weights in zip(starts, mixes_here, strict=False)]
    mixture = Mixture(parts, lanes)
    stream = pairs(mixture, range(starts[-1]))
    for place, (part, end) in enumerate(zip(parts, starts[1:], strict=True)):
        assert pairs(Mixture(parts[: place + 1], lanes), range(end)) == stream[:end]
        gained = mixture.counts(end) - mixture.counts(part.start)
        assert furthest(gained, end - part.start, part.weights) < (ALONE if lanes == 1 else lanes * IN_LANE)
    for source in range(3):
        for lane in range(lanes):
            numbers = [number for s, number in stream[lane::lanes] if s == source]
            assert numbers == list(range(lane, lane + lanes * len(numbers), lanes))


def test_a_run_that_is_resumed_may_add_a_source_and_raise_a_cap():
    """A new source is the last one; it changes nothing of what was."""
    first = Part(0, (3, 1), (50, 20))
    before = Mixture([first], 3)
    first = Part(0, (3, 1, 0), (50, 20, None))
    after = Mixture([first, Part(40, (1, 1, 2), (50, 60, 30))], 3)
    assert pairs(before, range(40)) == pairs(after, range(40))
    assert after.limit is not None and 140 - 3 * 3 <= after.limit <= 140
    stream = pairs(after, range(after.limit))
    assert len(set(stream)) == after.limit and set(stream) <= {
        (source, number) for source, cap in enumerate((50, 60, 30)) for number in range(cap)
    }


@properties
@given(plain, st.integers(1, 20), st.integers(1, 5), st.integers(0, 9))
def test_a_micro_batch_reads_its_own_lane_of_every_source(weights, global_batch, micro_batch, seed):
    """Mixture and streams together: equal micro-batches, every row of a source once an epoch, each in one lane."""
    draw, lanes = np.random.default_rng(seed), -(-global_batch // micro_batch)
    sizes = [draw.integers(1, 6, draw.integers(1, 6)) for _ in weights]
    streams = [StreamOrder(each, lanes, 2, seed) for each in sizes]
    caps = tuple(2 * stream.rows for stream in streams)
    mixture = Mixture([Part(0, weights, caps)], lanes)
    rows_used: list[list] = [[] for _ in weights]
    for low in range(0, sum(caps), global_batch):
        micros = micro_batches(low, min(low + global_batch, sum(caps)), lanes, micro_batch)
        for lane, samples in enumerate(micros):
            origins = mixture.origins(samples)
            for source in np.unique(origins.sources).tolist():
                numbers = origins.samples[origins.sources == source]
                assert len(micros) < lanes or set(numbers % lanes) == {mixture.lane_in_source(source, lane)}
                rows_used[source] += zip(*(column.tolist() for column in streams[source].locate(numbers)), strict=True)
    for each, used in zip(sizes, rows_used, strict=True):
        rows = [(chunk, row) for chunk, size in enumerate(each) for row in range(size)]
        assert sorted(used) == sorted((*row, epoch) for row in rows for epoch in (0, 1))


@pytest.mark.parametrize(
    ("parts", "lanes", "words"),
    [
        ([], 1, r"parts start at \[\]"),
        ([Part(1, (1,))], 1, r"parts start at \[1\]"),
        ([Part(0, (1,)), Part(0, (2,))], 1, r"parts start at \[0, 0\]"),
        ([Part(0, (1,)), Part(5, (2, 1))], 1, "different numbers of sources"),
        ([Part(0, (1, 2), (3,))], 1, "different numbers of sources"),
        ([Part(0, (1, -2))], 1, r"weights are \(1, -2\)"),
        ([Part(0, (0, 0))], 1, r"weights are \(0, 0\)"),
        ([Part(0, (1, float("nan")))], 1, "nan"),
        ([Part(0, (1, float("inf")))], 1, "inf"),
        ([Part(0, (1, 2), (0, None))], 1, r"caps are \(0, None\)"),
        ([Part(0, (1,))], 0, "lanes is 0"),
    ],
)
def test_refuses_what_is_no_mix(parts, lanes, words):
    with pytest.raises(ValueError, match=words):
        Mixture(parts, lanes)


def test_refuses_what_is_no_sample():
    mixture = Mixture([Part(0, (1, 2))])
    for samples in ([-1, 0], [2**62]):
        with pytest.raises(IndexError, match=str(samples[0])):
            mixture.origins(np.array(samples))
    with pytest.raises(TypeError):
        mixture.origins(np.array([0.5]))
    assert [column.shape for column in mixture.origins(np.zeros((2, 0), int))] == [(2, 0)] * 2
    with pytest.raises(IndexError, match="-1"):
        mixture.counts(-1)


# Frozen values: whoever changes them changes every run that is resumed after the change.


@pytest.mark.parametrize(
    ("lanes", "samples", "expected"),
    [
        (1, [0, 1, 2, 3, 999, 10**12], [(0, 0), (1, 0), (0, 1), (2, 0), (2, 699), (2, 749999999950)]),
        (4, [0, 1, 2, 3, 999, 10**12], [(0, 0), (1, 1), (2, 0), (0, 3), (2, 697), (2, 749999999954)]),
    ],
)
def test_golden(lanes, samples, expected):
    mixture = Mixture([Part(0, (0.5, 0.3, 0.2), (None, 10, None)), Part(100, (1, 0, 3))], lanes)
    assert pairs(mixture, samples) == expected
