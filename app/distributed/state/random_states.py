"""The generators of random numbers of each rank: Python's, NumPy's, torch's and its GPU's, as JSON."""

import random
from typing import Any

import numpy as np
import torch


def collect(device: torch.device) -> dict[str, Any]:
    """Return the states of this process's generators.

    Args:
        device: of this process.
    """
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), place, has_gauss, cached],
        "torch": _hex(torch.get_rng_state()),
        "gpu": _hex(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Give this process's generators the states that `collect` returned; a GPU's only on a GPU.

    Raises:
        ValueError, KeyError, TypeError: they are no such states.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, place, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, cached))
    torch.set_rng_state(_bytes(states["torch"]))
    if device.type == "cuda" and states["gpu"] is not None:
        torch.cuda.set_rng_state(_bytes(states["gpu"]), device)


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
