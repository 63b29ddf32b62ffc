"""Sums that do not depend on the order of their terms."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.distributed import placements
from app.distributed.naming import local_gradient
from app.training.exact import rounding as grid_rounding

PARTS = 3


def order_free(terms: Iterable[Tensor], bound: float, count: int) -> Tensor:
    """Sum float64 tensors into PARTS numbers, to which other ranks' parts can be added in any order; see `total`.

    Args:
        terms: tensors of any shape.
        bound: an upper bound of the sum of absolute values over all ranks; above it, bits depend on the order.
        count: an upper bound of the number of terms over all ranks.

    Returns:
        The parts, float64 [PARTS], coarse first.
    """
    sums = None
    for term in terms:
        if sums is None:
            sums = torch.zeros(PARTS, dtype=torch.float64, device=term.device)
        for part, rounded in enumerate(parts_of(term, bound, count)):
            sums[part] += rounded.sum()
    return torch.zeros(PARTS, dtype=torch.float64) if sums is None else sums


def parts_of(terms: Tensor, bound: float, count: int) -> Iterator[Tensor]:
    """Split each number of a float64 tensor into PARTS multiples of units, and yield them, coarse first.

    Sums of multiples of one unit are exact in float64 while they stay below 2**52 units, so their bits do not depend on
    the order (Demmel and Nguyen, Fast reproducible floating-point summation, 2013). The remainder below the finest unit
    is dropped.
    """
    for unit in _units(bound, count):
        shift = 1.5 * 2.0**52 * unit  # the spacing of float64 around it is the unit
        rounded = (terms + shift) - shift
        yield rounded
        terms = terms - rounded


@overload
def total(parts: Tensor) -> Tensor: ...


@overload
def total(parts: list[float]) -> float: ...


def total(parts: Tensor | list[float]) -> Tensor | float:
    """Return the sum from its parts, adding the small ones first."""
    return parts[0] + (parts[1] + parts[2])


def norm(parameters: list[nn.Parameter], limit: float, columns: dict[Tensor, int] | None = None) -> Tensor:
    """Return the norm of all gradients over all ranks, in float64. If they are sharded, every rank takes part.

    Args:
        limit: from this norm on, bits depend on the order.
        columns: for weights whose rows are cut into slices, how many slices this process has of them.
    """
    if not parameters:
        return torch.zeros((), dtype=torch.float64)
    count = sum(p.numel() for p in parameters)
    apart: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        groups = tuple(_shard_groups(parameter.grad)) if isinstance(parameter.grad, DTensor) else ()
        slices, gradient = (columns or {}).get(parameter, 1), local_gradient(parameter)
        # A parameter without dimensions cannot be cut.
        apart.setdefault(groups, []).extend(gradient.chunk(slices, dim=-1) if slices > 1 else [gradient])
    sums = []
    for groups, gradients in apart.items():
        blocks = _blocks(gradients, grid_rounding.piece(gradients[0].device))
        terms = torch.cat([_squares(block).flatten() for block in blocks])
        parts = order_free([terms], bound=limit**2, count=count)
        for group in groups:
            dist.all_reduce(parts, group=group)
        sums.append(parts)
    return total(torch.stack(sums).sum(dim=0)).sqrt()


def _blocks(gradients: list[Tensor], numbers: int) -> Iterator[Tensor]:
    """Join rows of equal length to matrices of at most about `numbers` numbers; rows stay whole, which keeps bits."""
    alike: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        rows = gradient.flatten(1) if gradient.ndim > 1 else gradient.reshape(-1, 1)
        alike.setdefault((rows.shape[1], rows.dtype), []).append(rows)
    for (width, _), matrices in alike.items():
        most = max(1, numbers // max(1, width))
        block: list[Tensor] = []
        held = 0
        for rows in itertools.chain.from_iterable(matrix.split(most) for matrix in matrices):
            if block and held + len(rows) > most:
                yield torch.cat(block)
                block, held = [], 0
            block.append(rows)
            held += len(rows)
        yield torch.cat(block) if len(block) > 1 else block[0]


def _squares(rows: Tensor) -> Tensor:
    """Square in float64, and add pairs inside each row for fewer terms; no row is split over ranks, so bits agree."""
    terms = rows.double().square_()
    while terms.shape[1] > 1 and terms.shape[1] % 2 == 0:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    return terms


def _shard_groups(tensor: DTensor) -> list[dist.ProcessGroup]:
    return [tensor.device_mesh.get_group(dim) for dim in placements.cut_along(tensor)]


def _units(bound: float, count: int) -> list[float]:
    units = []
    for _ in range(PARTS):
        units.append(2.0 ** (math.ceil(math.log2(bound)) - 51))
        bound = max(count, 1) * units[-1] / 2
    return units
