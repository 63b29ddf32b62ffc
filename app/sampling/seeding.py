"""Randomness that belongs to a step, a micro-batch or a sample, and knows neither ranks nor workers."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

EVALUATION = -1
"""Stands in keys where training has its step: every evaluation draws the same numbers, so scores compare."""


def seed_of(*key: int) -> int:
    """Mix numbers into a seed of 63 bits; related keys give unrelated seeds."""
    digest = hashlib.blake2b(repr(tuple(map(int, key))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(*key: int) -> None:
    """Seed every generator that a model may draw from: torch's on all devices, numpy's and Python's."""
    import torch

    seed = seed_of(*key)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # where there is none, torch would format a stack to keep the call for later: 0.3 ms a micro-batch, twice
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def aside(device: "torch.device") -> Iterator[None]:
    """Let a block seed and draw as it likes; after it, the generators go on as if it had not been there."""
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def sample_generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """Make the random numbers of one sample's augmentation: the same on any rank, in any worker."""
    return np.random.Generator(np.random.Philox(key=seed_of(seed, epoch, sample)))
