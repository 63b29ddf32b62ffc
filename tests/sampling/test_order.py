"""app.sampling.permutation: orders are permutations, are frozen, cost nothing to hold, and look random.

The statistical tests bound z-scores. Their seeds are fixed, so they cannot fail by chance on another day.
"""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.sampling.permutation import LARGEST, SORTED, permute, stream, stretch

N = 2003  # a size on which the network runs, small enough to look at whole orders

# Pairs of (seed, epoch) that a weak key schedule would confuse.
NEIGHBOURS = [
    *[((seed, 0), (seed + 1, 0)) for seed in range(100)],
    *[((5, epoch), (5, epoch + 1)) for epoch in range(100)],
    *[((a, b), (b, a)) for a, b in itertools.combinations(range(12), 2)],
    *[((a, b), (a + 1, b - 1)) for a in range(3) for b in range(1, 6)],
    *[((12, 3), (1, 23)), ((0, 0), (2**32, 0)), ((0, 0), (2**64, 0)), ((0, 0), (0, 2**32)), ((1, 0), (-1, 0))],
]

VARY = {"seed": lambda i: (i, 0), "epoch": lambda i: (0, i)}
sizes = st.one_of(st.integers(1, 600), st.integers(1, 10**12), st.integers(1, LARGEST))
properties = settings(derandomize=True, deadline=None, database=None)


def order(n: int, seed: int, epoch: int) -> np.ndarray:
    return permute(np.arange(n), n, seed, epoch)


def z_of_counts(counts: np.ndarray) -> float:
    """Return how many deviations the chi-square of counts lies above that of equally likely cells."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def test_bijection_for_every_small_size():
    for n in range(1, 4097):
        ids = order(n, seed=n % 7, epoch=n % 3)
        assert np.bincount(ids, minlength=n).tolist() == [1] * n, n


@pytest.mark.parametrize("n", [SORTED, SORTED + 1, 2**14 - 1, 2**14, 2**14 + 1, 2**15, 2**15 + 1, 1_000_003])
def test_bijection_at_the_edges_of_grids(n):
    assert np.array_equal(np.sort(order(n, 1, 2)), np.arange(n))


@properties
@given(st.integers(1, 5000) | sizes, st.integers(), st.integers(0, 10**4), st.integers(1, 3000))
def test_a_stretch_is_that_part_of_the_stream(n, seed, low, length):
    expected = stream(np.arange(low, low + length), n, seed)
    for found, right in zip(stretch(low, low + length, n, seed), expected, strict=True):
        assert np.array_equal(found, right)


@properties
@given(st.data(), sizes, st.integers(), st.integers(0, 10**6))
def test_injective_in_range_and_the_same_however_batched(data, n, seed, epoch):
    chosen = data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=200))
    places = np.array(chosen, dtype=np.int64)
    ids = permute(places, n, seed, epoch)
    assert ids.dtype == np.int64 and ids.shape == places.shape
    assert ids.min() >= 0 and ids.max() < n
    assert len(set(ids.tolist())) == len(chosen)

    cut = data.draw(st.integers(0, len(chosen)))
    parts = [permute(part, n, seed, epoch) for part in (places[:cut], places[cut:])]
    assert np.array_equal(np.concatenate(parts), ids)
    assert np.array_equal(permute(places[::-1], n, seed, epoch), ids[::-1])
    assert permute(places[cut - 1], n, seed, epoch) == ids[cut - 1]


def test_batch_larger_than_a_block():
    places = np.random.default_rng(0).integers(0, 10**12, (5, 7919))
    whole = permute(places, 10**12, 3, 4)
    assert whole.shape == places.shape
    assert np.array_equal(whole, np.stack([permute(row, 10**12, 3, 4) for row in places]))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint64])
def test_any_integer_type_and_the_argument_stays(dtype):
    places = np.arange(1000, dtype=dtype)
    assert np.array_equal(permute(places, 1000, 0, 0), order(1000, 0, 0))
    assert np.array_equal(places, np.arange(1000))


def test_refuses_what_is_no_place():
    with pytest.raises(IndexError, match="10"):
        permute(np.array([0, 10]), 10, 0, 0)
    with pytest.raises(IndexError, match="-1"):
        permute(np.array([-1]), 1000, 0, 0)
    with pytest.raises(TypeError, match="float"):
        permute(np.array([0.0]), 10, 0, 0)
    for n in (0, -1, LARGEST + 1):
        with pytest.raises(ValueError, match=str(n)):
            permute(np.array([0]), n, 0, 0)


def test_memory_does_not_grow_with_n():
    def peak(n: int) -> int:
        places = np.arange(1000)
        tracemalloc.start()
        permute(places, n, 0, 0)
        stream(places + n - 500, n, 0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(1000)
    assert max(peak(n) for n in (10**6, 10**9, 10**12, LARGEST)) < 1.2 * peak(1000)


# Frozen values: whoever changes them changes every run that is resumed after the change.


@pytest.mark.parametrize(
    ("n", "ids"),
    [
        (1, [0, 0, 0]),
        (5, [2, 0, 3]),
        (300, [65, 225, 95]),
        (10**12, [954026758892, 691183107558, 554967612213]),
        (2**62, [3007011767537877996, 1627374538151778151, 4559396623566364718]),
    ],
)
def test_golden(n, ids):
    assert permute(np.array([0, n // 2, n - 1]), n, seed=7, epoch=3).tolist() == ids


def test_golden_stream():
    ids, epochs = stream(np.arange(8), 3, seed=-1)
    assert ids.tolist() == [2, 0, 1, 0, 1, 2, 1, 2]
    assert epochs.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


@properties
@given(sizes, st.integers(), st.integers(0, 10**6), st.integers(0, 300))
def test_stream_is_the_epochs_one_after_another(n, seed, first, count):
    start = min(first * n, 2**62)
    positions = np.arange(start, start + count)
    ids, epochs = stream(positions, n, seed)
    assert ids.dtype == epochs.dtype == np.int64
    for epoch in np.unique(epochs):
        here = epochs == epoch
        assert np.array_equal(ids[here], permute(positions[here] - epoch * n, n, seed, int(epoch)))
    shuffled = np.random.default_rng(0).permutation(count)
    assert np.array_equal(stream(positions[shuffled], n, seed)[0], ids[shuffled])


@pytest.mark.parametrize("n", [1, 3, 500])
def test_stream_sees_every_sample_once_an_epoch(n):
    ids, epochs = stream(np.arange(4 * n).reshape(4, n), n, seed=2)
    assert np.array_equal(np.sort(ids), np.tile(np.arange(n), (4, 1)))
    assert np.array_equal(epochs, np.repeat(np.arange(4), n).reshape(4, n))


def test_stream_refuses_what_is_no_position():
    with pytest.raises(IndexError, match="-1"):
        stream(np.array([-1, 0]), 10, 0)
    with pytest.raises(TypeError):
        stream(np.array([0.5]), 10, 0)
    assert stream(np.array([], dtype=np.int64), 10, 0)[0].size == 0


@pytest.fixture(scope="module", params=VARY)
def first_places(request) -> np.ndarray:
    """The ids at places 0, 1 and 16 (a neighbour in the row and one in the column) of 9000 orders of 300."""
    return np.stack([permute(np.array([0, 1, 16]), 300, *VARY[request.param](i)) for i in range(9000)])


def test_first_place_is_uniform(first_places):
    assert z_of_counts(np.bincount(first_places[:, 0], minlength=300)) < 4


@pytest.mark.parametrize("other", [1, 2])
def test_two_places_are_independent(first_places, other):
    apart = (first_places[:, other] - first_places[:, 0]) % 300
    assert z_of_counts(np.bincount(apart, minlength=300)[1:]) < 4


@pytest.mark.parametrize("vary", VARY)
@pytest.mark.parametrize("n", [3, 4])
def test_all_orders_of_a_few_are_equally_likely(n, vary):
    all_orders = {ids: i for i, ids in enumerate(itertools.permutations(range(n)))}
    drawn = [all_orders[tuple(order(n, *VARY[vary](i)).tolist())] for i in range(10_000)]
    counts = np.bincount(drawn, minlength=len(all_orders))
    assert counts.min() > 0 and z_of_counts(counts) < 4


@pytest.mark.parametrize("n", [SORTED - 1, N])
def test_neighbouring_keys_give_uncorrelated_orders(n):
    # Both orders are ranks, so that Pearson's coefficient is Spearman's; n - 1 times its square has mean 1.
    z = [np.corrcoef(order(n, *a), order(n, *b))[0, 1] * np.sqrt(n - 1) for a, b in NEIGHBOURS]
    assert np.abs(z).max() < 4.5
    assert abs(np.mean(z)) * np.sqrt(len(z)) < 4
    assert abs(np.var(z) - 1) * np.sqrt(len(z) / 2) < 4


@pytest.mark.parametrize("n", [SORTED - 1, N])
def test_neighbouring_keys_agree_by_chance_only(n):
    """The number of places with the same id in two unrelated orders is Poisson(1) distributed."""
    agreements = np.array([(order(n, *a) == order(n, *b)).sum() for a, b in NEIGHBOURS])
    assert_poisson_of_one(agreements)


@pytest.mark.parametrize("vary", VARY)
@pytest.mark.parametrize("n", [SORTED - 1, N])
def test_an_order_has_nothing_of_the_places(n, vary):
    orders = [order(n, *VARY[vary](i)) for i in range(300)]
    assert_poisson_of_one(np.array([(ids == np.arange(n)).sum() for ids in orders]))
    z = [np.corrcoef(ids, np.arange(n))[0, 1] * np.sqrt(n - 1) for ids in orders]
    assert np.abs(z).max() < 4.5 and abs(np.mean(z)) * np.sqrt(len(z)) < 4


@pytest.mark.parametrize("vary", VARY)
@pytest.mark.parametrize("lag", [1, 2, 32, 33])
def test_neighbours_part(lag, vary):
    """Places that are `lag` apart (32 is one row of the network's grid) get ids that are any distance apart."""
    distances = []
    for i in range(100):
        ids = order(N, *VARY[vary](i))
        distances.append((ids[lag:] - ids[:-lag]) % N)
        assert np.bincount(distances[-1]).max() < 13  # cells are Poisson(1); 13 in any of 1.6 million: 1 in 10 000
    counts = np.bincount(np.concatenate(distances), minlength=N)
    assert counts[[1, N - 1, lag, N - lag]].max() < 150  # each is Poisson(100) distributed
    assert z_of_counts(counts[1:]) < 4


def assert_poisson_of_one(counts: np.ndarray) -> None:
    assert abs(counts.mean() - 1) * np.sqrt(len(counts)) < 4
    assert counts.max() < 9
    cells = np.bincount(np.minimum(counts, 4), minlength=5)
    expected = len(counts) * np.array([0.3679, 0.3679, 0.1839, 0.0613, 0.0190])
    assert ((cells - expected) ** 2 / expected).sum() < 25  # 4 degrees of freedom: one in 20 000
