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
    return {
        "python": [version, list(words), gauss],
        "numpy": _numpys(),
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
    if states["numpy"] is not None:
        kind, keys, place, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, cached))
    torch.set_rng_state(_bytes(states["torch"]))
    if device.type == "cuda" and states["gpu"] is not None:
        torch.cuda.set_rng_state(_bytes(states["gpu"]), device)


def _numpys() -> list[Any] | None:
    """Return the state of NumPy's own generator; None where a program has put another kind in its place."""
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return None
    keys, place = state["state"]["key"], state["state"]["pos"]
    return ["MT19937", keys.tolist(), int(place), int(state["has_gauss"]), float(state["gauss"])]


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
