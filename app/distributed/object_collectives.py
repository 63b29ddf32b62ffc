"""Collectives of Python objects for recipes: numbers, texts, lists, arrays; an error on one rank reaches all."""

import pickle
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from app.distributed import collectives
from app.errors import UserError, mendable

T = TypeVar("T")
Outcome = tuple[bytes, str]  # a pickled object, or what went wrong


class ObjectCollectives:
    """Exchange Python objects between the ranks of a group. Every rank of it must make the same calls in one order.

    Objects are pickled, so a tensor on a GPU arrives on the GPU of the rank that sent it: send `tensor.cpu()`. They
    travel through the process group of training, and are meant for what is small: names, counts, scores, indices.
    """

    def __init__(self, limit: timedelta, group: dist.ProcessGroup | None = None):
        """Take all ranks, or those of a group.

        Args:
            limit: how long a collective of a new group may take.
        """
        self._limit, self._group = limit, group
        self.size: int = 1 if collectives.alone() else dist.get_world_size(group)
        """Number of ranks in this group."""
        self.rank: int = 0 if collectives.alone() else dist.get_rank(group)
        """This process's rank in this group, from 0."""

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the value of rank `source` on every rank. What the others pass does not matter: None will do."""
        self._check(source)
        sent: list[Any] = [_pickled(value) if self.rank == source else None]
        if self.size > 1:
            dist.broadcast_object_list(sent, group_src=source, group=self._group)
        return self._opened("broadcast", {source: sent[0]})[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks, on every rank."""
        pickled = collectives.gather(_pickled(value), self._group)
        return self._opened("gather", dict(enumerate(pickled)))

    def scatter(self, values: Iterable[T] | None, source: int = 0) -> T:
        """Return on rank r what rank `source` has at place r of its list, which has one value for each rank.

        The other ranks pass None. Arrays are cut along their first dimension.
        """
        self._check(source)
        parts = _parts(values, self.size) if self.rank == source else None
        mine: list[Any] = [parts[0] if parts else None]
        if self.size > 1:
            dist.scatter_object_list(mine, parts, group_src=source, group=self._group)
        return self._opened("scatter", {source: mine[0]})[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the block on every rank, and end it on every rank if it fails on one: nobody waits for that one.

        The block must not synchronise ranks by itself: use it for reading files, checks and the like.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        told = None if problem is None else (mendable(problem) is not None, collectives.in_words(problem))
        failures = {rank: each for rank, each in enumerate(collectives.gather(told, self._group)) if each}
        words = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in failures.items())
        if failures and all(ours for ours, _ in failures.values()):
            raise UserError(words) from problem  # the same on every rank, so that it is shown once
        if problem is not None:
            raise problem
        if failures:
            raise RuntimeError(words)

    def split(self, key: Hashable) -> "ObjectCollectives":
        """Make groups of the ranks that pass equal keys, such as the name of a machine; return that of this rank.

        Every rank of this group takes part. Ranks of a group are numbered from 0, in their order here.
        """
        keys = self.gather(key)
        if self.size == 1:
            return self
        here = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        ranks = [rank for rank, other in zip(here, keys, strict=True) if other == key]
        # On the host, where objects are; only the ranks of a group meet to make it.
        made = dist.new_group(ranks, self._limit, backend="gloo", use_local_synchronization=True)
        return ObjectCollectives(self._limit, made)

    def _check(self, source: int) -> None:
        if not 0 <= source < self.size:
            raise UserError(f"source {source}: there are {self.size} ranks, from 0 to {self.size - 1}")

    def _opened(self, what: str, sent: dict[int, Outcome]) -> list[Any]:
        """Unpickle values by rank, unless one of them could not be pickled."""
        if wrong := {rank: why for rank, (_, why) in sent.items() if why}:
            words = "; ".join(f"the value of rank {rank} {why}" for rank, why in wrong.items())
            raise UserError(f"run.collectives.{what}: {words}")
        return [pickle.loads(data) for data, _ in sent.values()]


def _parts(values: Any, size: int) -> list[Outcome]:
    """Return what each rank gets of values; where they are wrong, all get the reason, and none waits for this rank."""
    parts, problem = [], ""
    if not isinstance(values, Iterable):
        problem = f"is {type(values).__name__ if values is not None else None}"
    else:
        try:
            parts = [_pickled(value) for value in list(values)]
        except Exception as error:  # whatever a generator raises
            return [(b"", f"cannot be listed ({collectives.in_words(error)})")] * size
        if len(parts) != size:
            problem = f"is {len(parts)} values"
    if problem:
        return [(b"", f"{problem}: give a list of {size}, one for each rank")] * size
    wrong = next((why for _, why in parts if why), "")
    return [(b"", wrong)] * size if wrong else parts


def _pickled(value: Any) -> Outcome:
    try:
        return pickle.dumps(value), ""
    except Exception as error:  # whatever an object's own code raises
        why = f"cannot be pickled ({collectives.in_words(error)})"
        return b"", f"{why}: {type(value).__name__} has to be made of numbers, texts, lists and arrays"
