"""Rows of a data set: read by their numbers, and stacked into batches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# The target that counts nowhere: the value that torch's losses leave out.
IGNORED = -100


class Rows(Protocol):
    """A data set: its rows by their numbers. It may also have `__getitems__`, which takes a list of numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int, /) -> Any: ...


def read_rows(data: Rows, ids: Sequence[int]) -> list[Any]:
    """Return the rows with these numbers, in this order: in one call where the data has `__getitems__`."""
    many = getattr(data, "__getitems__", None)
    return many(ids) if many else [data[i] for i in ids]


def stack(rows: Sequence[dict[str, np.ndarray]]) -> "dict[str, Tensor]":
    """Make a batch of rows whose arrays have one shape for each name: tensors [rows, ...]."""
    import torch

    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
