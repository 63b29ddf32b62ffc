"""Whole tensors from shards, and this rank's parts of whole ones."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from app.distributed.placements import cut_dimension


def whole(part: Tensor, parameter: Tensor) -> Tensor:
    """Gather a tensor that is sharded as a parameter is. Every rank of its group takes part."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, cut, size = parameter.device_mesh, parameter.placements, parameter.shape
    return DTensor.from_local(part, mesh, cut, run_check=False, shape=size, stride=parameter.stride()).full_tensor()


def part(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a tensor that every rank has; no collective."""
    if not isinstance(parameter, DTensor):
        return whole
    return _part(whole, parameter, list(parameter.placements))


def places(parameter: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the numbers of the rows and of the columns that this rank has of a parameter, in the whole parameter.

    Of one with more than two dimensions, all but the first are one; such a parameter is cut into rows only.
    """
    rows = parameter.shape[0] if parameter.ndim else 1
    columns = parameter.numel() // max(rows, 1)
    numbers = [torch.arange(count, dtype=torch.int32, device=device) for count in (rows, columns)]
    if isinstance(parameter, DTensor):
        for dim in (0, 1):
            here = [cut_dimension(each) == dim for each in parameter.placements]
            places = zip(here, parameter.placements, strict=True)
            # Of the vector of columns too, the first dimension is cut.
            cut = [(Shard(0) if dim else each) if ours else Replicate() for ours, each in places]
            numbers[dim] = _part(numbers[dim], parameter, cut)
    rows_here, columns_here = (each.to(device) for each in numbers)
    return rows_here, columns_here


def _part(whole: Tensor, parameter: DTensor, cut: list[Placement]) -> Tensor:
    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, cut).to_local()
