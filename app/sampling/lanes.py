"""How the samples of a run are dealt to lanes: sample n is of lane n mod K, as cards are dealt to K players.

Each full step has one micro-batch for each lane, or as many as share a lane. Of the first s samples, lane k has s / K,
rounded up in the first s mod K lanes and down in the others, so lanes never differ by more than one sample, and
together they have s (Hermite's identity). So no size of a batch or of the data has to divide by anything. This goes on
from epoch to epoch: an epoch of N rows does not begin at lane 0, but behind the last sample of the epoch before it.
"""

from typing import TypeVar

import numpy as np

from app.sampling.cuts import even_cuts

Lane = TypeVar("Lane", int, np.ndarray)


def dealt(samples: int, lane: Lane, lanes: int) -> Lane:
    """Count those of the first `samples` samples that a lane has been dealt; for an array of lanes, an array."""
    return (samples + lanes - 1 - lane) // lanes


def edges(samples: int, lanes: int) -> np.ndarray:
    """Count those of the first `samples` samples that lanes 0 to k - 1 have been dealt, for k up to `lanes`: int64."""
    lane = np.arange(lanes + 1)
    return samples // lanes * lane + np.minimum(samples % lanes, lane)


def micro_batches(low: int, high: int, lanes: int, micro_batch: int, shared: int = 1) -> list[np.ndarray]:
    """Cut samples low to high - 1, a step, into micro-batches of at most `micro_batch` samples.

    A full step gives each lane its own micro-batches; within a lane their sizes differ by at most one. A step with
    fewer micro-batches (the last one of a run, or one of a ramp) is cut evenly instead: micro-batches then have several
    lanes, but neighbouring ones, so that most samples stay on the rank that reads their lane in full steps.

    Args:
        shared: micro-batches of a full step that share a lane.

    Raises:
        ValueError: the step needs more micro-batches than a full one.
    """
    pieces = -(-(high - low) // micro_batch)
    if pieces > lanes * shared:
        raise ValueError(f"{high - low} samples make {pieces} micro-batches of {micro_batch}, for {lanes * shared}")
    samples = np.arange(low, high)
    lane_of_each = samples % lanes
    samples = samples[np.argsort(lane_of_each, kind="stable")]
    if pieces < lanes * shared:
        return np.split(samples, even_cuts(len(samples), pieces))
    by_lane = np.split(samples, np.cumsum(np.bincount(lane_of_each, minlength=lanes))[:-1])
    return [piece for own in by_lane for piece in np.split(own, even_cuts(len(own), shared))]
