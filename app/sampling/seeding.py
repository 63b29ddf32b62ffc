"""Random numbers keyed by step, micro-batch or sample, and independent of ranks and loader workers."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

EVALUATION = -1
"""Takes the place of the step in keys: every evaluation draws the same numbers, so its scores are comparable."""


def seed_of(*key: int) -> int:
    """Hash numbers to a seed of 63 bits; similar keys give unrelated seeds."""
    digest = hashlib.blake2b(repr(tuple(map(int, key))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(*key: int) -> None:
    """Seed every generator that a model may use: torch's on all devices, numpy's and Python's."""
    import torch

    seed = seed_of(*key)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # without one, manual_seed would format a stack trace to repeat the call later: 0.3 ms, twice a micro-batch
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def aside(device: "torch.device") -> Iterator[None]:
    """Restore all generators after a block that seeds and draws from them."""
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def sample_generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """Make the generator for one sample's augmentation: the same on any rank and in any worker."""
    return np.random.Generator(np.random.Philox(key=seed_of(seed, epoch, sample)))
