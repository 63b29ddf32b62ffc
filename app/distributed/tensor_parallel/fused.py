"""Layers that compute queries, keys and values with one matrix, as GPT-2's c_attn does.

A slice of such a layer needs the columns of its heads in each third of the matrix, which lie apart. A DTensor cannot
hold them as one part, and in another order checkpoints would depend on the layout. So processes keep rows of the
weight, and exchange them for columns when the layer is computed; gradients go the other way.
"""

from typing import Any

import torch
from torch import Tensor

from app.distributed.naming import local_shard
from app.distributed.tensor_parallel.split import Split, cut

TOGETHER = 3  # queries, keys and values


def own_columns(parameter: Tensor, split: Split, exchanged: bool) -> list[Tensor]:
    """Return the columns of each of this process's slices, [.., numbers of a slice].

    Args:
        parameter: [.., 3 x width].
        exchanged: whether processes keep rows of it; otherwise they keep all of it.
    """
    return list(_Columns.apply(local_shard(parameter), split, exchanged and split.processes > 1))


def in_thirds(columns: Tensor) -> Tensor:
    """View columns, [.., 3 x width], as those of queries, keys and values, [.., 3, width]."""
    return columns.unflatten(-1, (TOGETHER, -1))


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, split: Split, exchanged: bool) -> tuple[Tensor, ...]:
        ctx.split, ctx.exchanged = split, exchanged
        whole = torch.cat(split.gathered(part)) if exchanged else part
        slices = in_thirds(whole).chunk(split.count, -1)[split.rank * split.here :][: split.here]
        return tuple(cut(each.flatten(-2), 1, -1)[0].clone() for each in slices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        split = ctx.split
        gradient_here = torch.cat([in_thirds(each) for each in gradients], -1)
        whole = gradient_here if split.processes == 1 else torch.cat(split.gathered(gradient_here), -1)
        whole = whole.flatten(-2)
        return (whole.chunk(split.processes)[split.rank].clone() if ctx.exchanged else whole), None, None
