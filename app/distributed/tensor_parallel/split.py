"""How layers are split: into slices, of which each process computes some, and whose results are added."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Split:
    """The slices of every split layer, and the processes that share them.

    With a fixed tree, sums of slices have the same bits on any number of processes: each holds a whole subtree.
    """

    def __init__(self, mesh: DeviceMesh | None, slices: int = 0):
        """Split over the processes of a mesh with one dimension; None: one process computes all slices.

        Args:
            slices: how many there are, a power of two, added in a fixed tree; 0: one for each process, added in any
                order.
        """
        self.mesh = mesh
        self.processes = mesh.size() if mesh else 1
        self.rank = mesh.get_local_rank() if mesh else 0
        self.group = mesh.get_group() if mesh else None
        self.fixed_tree = bool(slices)
        self.count = slices or self.processes
        self.inside = False
        """Whether activations are split now: between a layer cut by columns and one cut by rows."""
        self._last: tuple[Tensor, tuple[Tensor, ...]] | None = None

    @property
    def here(self) -> int:
        """Return how many slices this process computes."""
        return self.count // self.processes

    @contextmanager
    def pretending(self, processes: int) -> Iterator[None]:
        """Be one of several processes, of which the others are not there: for tensors without contents."""
        before = self.processes, self.count
        self.processes, self.count = processes, self.count if self.fixed_tree else processes
        try:
            yield
        finally:
            self.processes, self.count = before

    def copies(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return a tensor once for each slice of this process; its gradients are summed over all slices.

        Layers that get the same tensor one after the other, such as those of queries, keys and values, share its
        copies, so that one exchange between processes serves all of them.
        """
        if not torch.is_grad_enabled() or not x.requires_grad:
            return (x,) * self.here
        if self._last is None or self._last[0] is not x:
            self._last = x, _Copies.apply(x, self)
        return self._last[1]

    def copies_of_weight(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return a weight once for each slice of this process; its gradients are summed over all slices."""
        return (
            _Copies.apply(weight, self) if torch.is_grad_enabled() and weight.requires_grad else (weight,) * self.here
        )

    def forget(self) -> None:
        """Free the tensor that layers have shared."""
        self._last = None

    def sum(self, partial: Sequence[Tensor]) -> Tensor:
        """Add one tensor of each slice, over all processes."""
        return _Sum.apply(self, *partial)

    def join(self, x: Tensor) -> Tensor:
        """Concatenate the last dimension of all processes' tensors, [.., n] to [.., processes x n]."""
        return _Join.apply(x, self) if self.processes > 1 else x

    def total(self, partial: Sequence[Tensor]) -> Tensor:
        """Add tensors of this process's slices to those of the other processes."""
        total = tree(partial)
        if self.processes == 1:
            return total
        if self.fixed_tree:
            return tree(self.gathered(total))
        total = total.clone() if total is partial[0] else total
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total

    def largest(self, numbers: Tensor) -> Tensor:
        """Return the largest of all processes' numbers, place by place."""
        if self.processes == 1:
            return numbers
        numbers = numbers.clone()
        if self.group is not None:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return numbers

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return a tensor of each process, in the order of the processes."""
        tensor = tensor.contiguous()
        tensors = [torch.empty_like(tensor) for _ in range(self.processes)]
        if self.group is not None:
            dist.all_gather(tensors, tensor, group=self.group)
        return tensors


def tree(terms: Sequence[Tensor]) -> Tensor:
    """Add neighbours, then the sums of neighbours, and so on; the number of terms is a power of two."""
    terms = list(terms)
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def cut(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    """Cut a tensor into parts that lie in memory alike on every layout, so that kernels work alike.

    A product of small matrices looks at the strides of dimensions of size 1, and at where the memory begins.
    """
    if count == 1:
        return [tensor.contiguous().view(-1).view(tensor.shape)]
    return [part.clone(memory_format=torch.contiguous_format) for part in tensor.chunk(count, dim)]


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate what `cut` has cut; its gradient is cut in the same way."""
    return _Joined.apply(dim, *parts)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> Tensor:
        ctx.dim, ctx.count = dim, len(parts)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *cut(gradient, ctx.count, ctx.dim))


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> tuple[Tensor, ...]:
        ctx.split = split
        return tuple(x.view_as(x) for _ in range(split.here))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.split.total(gradients), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: Split, *partial: Tensor) -> Tensor:
        ctx.count = len(partial)
        return split.total(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *[gradient] * ctx.count)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return torch.cat(split.gathered(x), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.split.processes, dim=-1)[ctx.split.rank].contiguous(), None
