"""lanes: samples are dealt like cards, and a step's micro-batches are its lanes, of nearly equal size."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.sampling.lanes import dealt, edges, micro_batches

properties = settings(derandomize=True, deadline=None, database=None)


@properties
@given(st.integers(0, 300), st.integers(1, 9))
def test_samples_are_dealt_as_cards_are(samples, lanes):
    cards = np.bincount(np.arange(samples) % lanes, minlength=lanes)
    assert [dealt(samples, lane, lanes) for lane in range(lanes)] == cards.tolist()
    assert dealt(samples, np.arange(lanes), lanes).tolist() == cards.tolist()
    assert edges(samples, lanes).tolist() == [0, *np.cumsum(cards)]


@properties
@given(st.integers(0, 2**62), st.integers(1, 2**12))
def test_lanes_have_all_samples_together_at_any_size(samples, lanes):
    counts = dealt(samples, np.arange(lanes), lanes)
    assert sum(counts.tolist()) == samples == edges(samples, lanes)[-1] and np.ptp(counts) <= 1


@properties
@given(st.integers(0, 10**12), st.integers(1, 80), st.integers(1, 20), st.integers(1, 80), st.integers(1, 80))
def test_a_step_is_cut_by_lanes_and_no_micro_batch_is_too_large(low, global_batch, micro_batch, size, shared):
    """Also a short step, which has fewer micro-batches than a full one, and lanes that several micro-batches share."""
    size, full = min(size, global_batch), -(-global_batch // micro_batch)
    shared = math.gcd(full, shared)
    lanes = full // shared
    micros = micro_batches(low, low + size, lanes, micro_batch, shared)
    sizes = [len(samples) for samples in micros]
    assert np.array_equal(np.sort(np.concatenate(micros)), np.arange(low, low + size))
    assert len(micros) == -(-size // micro_batch) and min(sizes) >= 1
    assert max(sizes) <= min(micro_batch, min(sizes) + 1 + (shared > 1))
    lane_of_each = [samples % lanes for samples in micros]
    if len(micros) == full:
        assert [set(each) for each in lane_of_each] == [{lane} for lane in range(lanes) for _ in range(shared)]
    assert np.all(np.diff(np.concatenate(lane_of_each)) >= 0)


def test_more_micro_batches_than_lanes_are_refused():
    with pytest.raises(ValueError, match="13 samples make 4 micro-batches of 4, for 3"):
        micro_batches(0, 13, 3, 4)
