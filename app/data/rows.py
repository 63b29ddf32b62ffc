"""Rows of a data set: read by their numbers, and stacked into batches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from app.data.streams.chunk_cache import ReadByChunks
    from app.sampling.batch_plan import BatchPlan, Length, Weigh
    from app.sampling.orders import Order

# The target that counts nowhere: the value that torch's losses leave out.
IGNORED = -100


class Missing:
    """Takes the place of a row that cannot be read, where the user has asked to leave such rows out."""


MISSING = Missing()


class Rows(Protocol):
    """A data set: its rows by their numbers.

    It may also have what a class below names, and `__getitems__`, which takes a list of numbers.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int, /) -> Any: ...


@runtime_checkable
class Ordered(Protocol):
    """A data set that is not to be read in any order, such as one that is read by chunks."""

    def order(self, plan: "BatchPlan", /) -> "Order":
        """Return the order in which a run reads the rows: with one lane, or with one for each micro-batch of a step.

        Args:
            plan: of the run, without an order of its own.
        """
        ...


@runtime_checkable
class Fetched(Protocol):
    """A data set whose rows are fetched from elsewhere before they are read."""

    def prepare(self, samples: np.ndarray, /) -> None:
        """Begin to fetch what rows lie in, the first ones first, and return; called in the rank's own process."""
        ...

    def close(self) -> None:
        """Fetch nothing ahead any more."""
        ...


@runtime_checkable
class Streamed(Protocol):
    """A data set that is read by chunks, through a cache of this machine, or that has sources of which some are."""

    def read_by_chunks(self) -> "list[ReadByChunks | None]":
        """Say how each source is read; None for one that is not read so."""
        ...


@runtime_checkable
class Incomplete(Protocol):
    """A data set that may give MISSING instead of a row."""

    @property
    def skips(self) -> bool:
        """Tell whether it does so."""
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """A data set that leaves rows of its table out; it keeps the others in their order."""

    def kept_before(self, row: int, /) -> int:
        """Count those that it keeps of the rows of its table before one of them, by its number."""
        ...


@runtime_checkable
class Digested(Protocol):
    """A data set that says which of its rows may be read to tell it from another one."""

    @property
    def digested(self) -> Sequence[int]:
        """Return their numbers: none if its `fingerprint` says all."""
        ...


@runtime_checkable
class Sharded(Protocol):
    """A data set that is read from several files, and knows what is in each."""

    def shard_hashes(self) -> dict[str, str]:
        """Return a hash of each file, or of some neighbouring ones if there are many, by what messages call them."""
        ...


class Measures(NamedTuple):
    """What is known of a row only when it is read."""

    weigh: "Weigh | None" = None
    """Weighs a row; None: all weigh 1, and none is missing."""
    length: "Length | None" = None
    """Returns how long a row is, to sort by; None: all are of one length."""


NO_MEASURES = Measures()


def read_rows(data: Rows, ids: Sequence[int]) -> list[Any]:
    """Return the rows with these numbers, in this order: in one call where the data has `__getitems__`."""
    many = getattr(data, "__getitems__", None)
    return many(ids) if many else [data[i] for i in ids]


def stack(rows: Sequence[dict[str, np.ndarray]]) -> "dict[str, Tensor]":
    """Make a batch of rows whose arrays have one shape for each name: tensors [rows, ...]."""
    import torch

    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
