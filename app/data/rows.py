"""Rows of a data set: fetched by their numbers, and stacked into batches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# The target that counts nowhere: the value that torch's losses leave out.
IGNORED = -100


def fetch(data: Sequence, ids: Sequence[int]) -> list[Any]:
    """Return the rows with these numbers, in this order: in one call where the data has `__getitems__`."""
    many = getattr(data, "__getitems__", None)
    return many(ids) if many else [data[i] for i in ids]


def stack(rows: Sequence[dict[str, np.ndarray]]) -> "dict[str, Tensor]":
    """Make a batch of rows whose arrays have one shape for each name: tensors [rows, ...]."""
    import torch

    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
