"""StreamOrder: every row once an epoch, lanes and windows as they are said to be, from one row to 10^12, frozen."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.sampling.stream_order import BLOCK, StreamOrder

properties = settings(derandomize=True, deadline=None, database=None)
lane_counts, windows, seeds = st.integers(1, 9), st.integers(1, 5) | st.integers(1, 64), st.integers(0, 9)
small = st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(any)
full = st.lists(st.integers(1, 12), min_size=1, max_size=30)
# Rows of an epoch by orders of magnitude, spread over chunks whose sizes differ by as much.
large = st.builds(
    lambda rows, chunks, seed: np.random.default_rng(seed).multinomial(
        rows, np.random.default_rng(seed).dirichlet(np.full(chunks, 0.5))
    ),
    st.integers(0, 12).flatmap(lambda power: st.integers(10**power, 10 ** (power + 1) if power < 12 else 10**12)),
    st.integers(1, 2000),
    st.integers(0, 99),
)


def pairs(order: StreamOrder, samples: np.ndarray) -> list[tuple[int, int]]:
    """Return the chunk and the row of samples."""
    located = order.locate(samples)
    return list(zip(located.chunks.tolist(), located.rows.tolist(), strict=True))


def rows_of(sizes) -> list[tuple[int, int]]:
    return [(chunk, row) for chunk, size in enumerate(sizes) for row in range(size)]


def z_of_distances(numbers: np.ndarray) -> float:
    """Return how many deviations the mean distance of neighbours is from that of a shuffled range, n / 3."""
    distances = np.abs(np.diff(numbers)) / len(numbers)
    return float((distances.mean() - 1 / 3) * np.sqrt(18 * len(distances)))


@properties
@given(small, lane_counts, windows, seeds, st.integers(1, 11))
def test_every_row_once_an_epoch_in_batches_of_any_size(sizes, lanes, window, seed, batch):
    """Batches do not divide the epoch, and some are of two epochs or more."""
    order, rows = StreamOrder(np.array(sizes), lanes, window, seed), sum(sizes)
    batches = [pairs(order, np.arange(low, min(low + batch, 3 * rows))) for low in range(0, 3 * rows, batch)]
    stream = [pair for each in batches for pair in each]
    for epoch in range(3):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == rows_of(sizes)
        for lane in range(lanes):
            samples = [sample for sample in range(epoch * rows, (epoch + 1) * rows) if sample % lanes == lane]
            assert set(order.chunks_of(lane, epoch)) == {stream[sample][0] for sample in samples}
    assert order.locate(np.arange(3 * rows)).epochs.tolist() == np.repeat([0, 1, 2], rows).tolist()


@properties
@given(full, lane_counts, windows, seeds, st.integers(0, 3))
def test_lanes_cut_the_line_and_windows_cut_the_lanes(sizes, lanes, window, seed, epoch):
    """Found from the chunks of each lane alone: which rows a lane gives, and in which window each of them comes."""
    order, rows = StreamOrder(np.array(sizes), lanes, window, seed), sum(sizes)
    samples = np.arange(epoch * rows, (epoch + 1) * rows)
    chunks_of_lanes = [order.chunks_of(lane, epoch).tolist() for lane in range(lanes)]
    line = [pair for chunk in joined(chunks_of_lanes) for pair in rows_of(sizes) if pair[0] == chunk]
    assert len(line) == rows
    for lane, chunks in enumerate(chunks_of_lanes):
        given_rows = pairs(order, samples[samples % lanes == lane])
        part, line = line[: len(given_rows)], line[len(given_rows) :]
        while part:
            here = {chunk for chunk, _ in part if chunk in chunks[:window]}
            expected = [pair for pair in part if pair[0] in here]
            assert here and part[: len(expected)] == expected
            assert sorted(given_rows[: len(expected)]) == sorted(expected)
            part, given_rows, chunks = part[len(expected) :], given_rows[len(expected) :], chunks[window:]
        assert not chunks and not given_rows


def joined(chunks_of_lanes: list[list[int]]) -> list[int]:
    """Join the chunks of lanes to one list, in which each stands once; only the border of two lanes may share one."""
    line: list[int] = []
    for chunks in chunks_of_lanes:
        line += chunks[1:] if chunks[:1] == line[-1:] else chunks
    assert len(set(line)) == len(line)
    return line


@properties
@given(large, lane_counts, windows, seeds, st.data())
def test_any_number_of_rows(sizes, lanes, window, seed, data):
    """In a stretch of samples that may go over the end of an epoch, no row comes twice, and each is in its chunk."""
    order, rows = StreamOrder(sizes, lanes, window, seed), int(sizes.sum())
    low = data.draw(st.integers(0, 4 * rows) | st.integers(-200, 0).map(lambda back: max(0, 3 * rows + back)))
    samples = np.arange(low, low + data.draw(st.integers(1, 400)))
    located = order.locate(samples)
    assert np.array_equal(located.epochs, samples // rows)
    assert np.all((located.rows >= 0) & (located.rows < sizes[located.chunks]))
    keys = set(zip(*(column.tolist() for column in located), strict=True))
    assert len(keys) == len(samples)
    for lane, epoch in set(zip((samples % lanes).tolist(), located.epochs.tolist(), strict=True)):
        inside = located.chunks[(samples % lanes == lane) & (located.epochs == epoch)]
        assert set(inside.tolist()) <= set(order.chunks_of(lane, epoch).tolist())


@properties
@given(large, lane_counts, windows, st.data())
def test_the_same_however_it_is_asked(sizes, lanes, window, data):
    rows = int(sizes.sum())
    samples = np.array(data.draw(st.lists(st.integers(0, 5 * rows), min_size=1, max_size=60)))
    whole = pairs(StreamOrder(sizes, lanes, window, 3), samples)
    order = StreamOrder(sizes.astype(np.uint64), lanes, window, 3)
    assert [pairs(order, samples[place : place + 1])[0] for place in range(len(samples))] == whole
    located = order.locate(np.stack([samples, samples[::-1]]))
    assert all(column.shape == (2, len(samples)) and column.dtype == np.int64 for column in located)
    assert located.chunks[1].tolist() == [chunk for chunk, _ in whole[::-1]]


def test_windows_lanes_epochs_and_seeds_are_permuted_each_in_its_way():
    """Chunks of one size, so that all windows have as many rows; each is far from the order that it had."""
    size, lanes = 4 * BLOCK, 2
    orders, windows_here = [StreamOrder(np.full(8, size), lanes, 2, seed) for seed in (0, 1)], []
    for order in orders:
        located = order.locate(np.arange(2 * 8 * size).reshape(2, 2, 2 * size, lanes))
        for epoch, window, lane in np.ndindex(2, 2, 2):
            chunks, rows = located.chunks[epoch, window, :, lane], located.rows[epoch, window, :, lane]
            windows_here.append(rows + size * (chunks == chunks.max()))
    assert len({tuple(order.chunks_of(0, epoch)) for order in orders for epoch in (0, 1)}) == 4
    # Two windows that were permuted alike would have every row at one place; others have one of 8192.
    alike = [np.mean(a == b) for place, a in enumerate(windows_here) for b in windows_here[:place]]
    assert len(windows_here) == 16 and max(alike) < 0.002
    assert all(abs(z_of_distances(numbers)) < 4 for numbers in windows_here)


def test_a_window_over_all_chunks_shuffles_the_lane():
    order = StreamOrder(np.full(100, 50), 1, 100, 0)
    located = order.locate(np.arange(5000))
    place_in_line = np.argsort(order.chunks_of(0, 0))[located.chunks] * 50 + located.rows
    assert abs(z_of_distances(place_in_line)) < 3


def test_a_million_chunks_take_32_bytes_each():
    """Also where two epochs are held and a third one is begun."""
    sizes = np.random.default_rng(0).integers(0, 2_000_000, 10**6)
    order = StreamOrder(sizes, 64, 16, 0)
    tracemalloc.start()
    for epoch in (0, 1, 2):
        order.locate(np.arange(epoch * order.rows, epoch * order.rows + 8))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sizes.nbytes + held < 32.5 * 10**6 and sizes.nbytes + peak < 40 * 10**6


@pytest.mark.parametrize(
    ("sizes", "options", "error", "words"),
    [
        ([], {}, ValueError, "0 rows in 0 chunks"),
        ([0, 0], {}, ValueError, "0 rows in 2 chunks"),
        ([3, -1], {}, ValueError, "no chunk below 0"),
        ([2**61, 2**61, 2**61], {}, ValueError, r"1 to 2\*\*62"),
        ([2**63, 2**63], {}, ValueError, r"1 to 2\*\*62"),
        ([1.0], {}, TypeError, "float64"),
        ([[1]], {}, TypeError, r"\(1, 1\)"),
        ([1], {"lanes": 0}, ValueError, "lanes is 0"),
        ([1], {"window": 0}, ValueError, "window is 0"),
    ],
)
def test_refuses_what_is_no_data(sizes, options, error, words):
    with pytest.raises(error, match=words):
        StreamOrder(
            np.array(sizes, dtype=None if sizes else np.int64), **{"lanes": 1, "window": 1, "seed": 0, **options}
        )


def test_refuses_what_is_no_sample():
    order = StreamOrder(np.array([3]), 1, 1, 0)
    for samples in ([-1, 0], [2**62]):
        with pytest.raises(IndexError, match=str(samples[0])):
            order.locate(np.array(samples))
    with pytest.raises(TypeError):
        order.locate(np.array([0.5]))
    assert order.locate(np.array([], dtype=np.int64)).chunks.size == 0


# Frozen values: whoever changes them changes every run that is resumed after the change.


@pytest.mark.parametrize(
    ("sizes", "samples", "expected"),
    [
        ([3, 1, 4, 1, 5], [0, 1, 2, 13, 14, 27, 28], [(2, 2), (4, 0), (0, 1), (4, 1), (4, 3), (0, 2), (0, 0)]),
        (
            [300] * 300,
            [0, 1, 44_999, 89_999, 90_000, 10**9],
            [(262, 130), (187, 177), (104, 150), (44, 269), (173, 250), (255, 26)],
        ),
        (
            [10**9 + chunk for chunk in range(1000)],
            [0, 5, 10**12, 10**15],
            [(618, 679223085), (627, 454104523), (148, 601805835), (768, 169672492)],
        ),
    ],
)
def test_golden(sizes, samples, expected):
    assert pairs(StreamOrder(np.array(sizes), 4, 2, seed=7), np.array(samples)) == expected
