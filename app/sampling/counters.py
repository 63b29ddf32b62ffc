"""Random words by counter: each is a hash of its key alone, so any process can draw any of them, in any order."""

import numpy as np

# Steps of the counter: odd, and unlike each other (the golden ratio, and two factors of MurmurHash3's finalizer).
_GOLDEN, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


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
