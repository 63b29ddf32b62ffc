"""Random numbers keyed by step, micro-batch or sample, and independent of ranks and loader workers.

Random words by counter are hashes of their keys alone, so any process can draw any of them, in any order.
"""

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
# Steps of the counter: odd, and unlike each other (the golden ratio, and two factors of MurmurHash3's finalizer).
_GOLDEN, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


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


def mixed(words: np.ndarray) -> np.ndarray:
    """Hash uint64 words of any shape, one to one, by the finalizer of SplitMix64 (Steele et al., 2014)."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def words_of(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return a random uint64 word for each pair of a key and a counter; the shapes are broadcast."""
    return mixed(keys.astype(np.uint64) + mixed(counters.astype(np.uint64) * _GOLDEN + _GOLDEN))


def below(words: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Scale words to int64 numbers in [0, bound), for bounds below 2**32."""
    return (((words >> np.uint64(32)) * bounds.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
