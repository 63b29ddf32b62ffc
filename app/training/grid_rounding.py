"""Gradients rounded to a grid and added up, many parameters at a time: the one owner of that arithmetic.

A number of grid points is a whole number in the gradient's own precision: the product with a power of two is exact, and
rounding goes to the nearest, halves to even. Sums of such numbers are float64. Where Triton works on a GPU, one kernel
does for each piece what torch does in five; both give the same bits.
"""

import functools
import types
from collections.abc import Sequence

import torch
from torch import Tensor

PIECES = {"cpu": 2**16, "cuda": 2**24}  # numbers at a time: what a core's cache holds; what keeps a GPU busy


def piece(device: torch.device) -> int:
    """Return how many numbers are worked on at a time: launches grow with the numbers and not with the tensors."""
    return PIECES.get(device.type, PIECES["cpu"])


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors of one type into one row of numbers; a single contiguous one is a view."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])


def to_numbers(values: Tensor, points: Tensor | float, in_place: bool = False) -> Tensor:
    """Return the numbers of the grid points nearest to values.

    Args:
        points: how many of them make 1; a power of two.
        in_place: in the memory of the values.
    """
    scaled = values.mul_(points) if in_place else values * points
    return scaled.round_().add_(0.0)  # -0 becomes 0: a sum keeps its sign or not by how many parts it has


def add(values: Tensor, sums: Tensor, points: Tensor | float, fresh: bool) -> None:
    """Round values, and add the numbers of their grid points to sums.

    Args:
        values: one row; what is in it afterwards has no meaning.
        sums: float64, of the same length; fresh: what was in it counts for nothing.
    """
    kernels = fused(values.device)
    if kernels and values.dtype == torch.float32:
        kernels.add(values, sums, _on_device(points, values.device), fresh)
        return
    numbers = to_numbers(values, points, in_place=True)
    sums.copy_(numbers) if fresh else sums.add_(numbers)


def nearest(gradient: Tensor, points: Tensor | float) -> Tensor:
    """Return the grid points nearest to a gradient's values."""
    kernels = fused(gradient.device)
    if kernels and gradient.dtype == torch.float32 and gradient.is_contiguous():
        return kernels.nearest(gradient, _on_device(points, gradient.device))
    return to_numbers(gradient, points).div_(points)


def how(device: torch.device) -> str:
    """Name what does the rounding on a device."""
    return "triton" if fused(device) else "torch"


@functools.cache
def fused(device: torch.device) -> types.ModuleType | None:
    """Return the kernels that do it in one launch, where they work and give torch's bits; compiled when first asked."""
    if device.type != "cuda":
        return None
    try:
        from app.training import triton_kernels

        return triton_kernels if agrees(triton_kernels, device) else None
    except Exception:  # no Triton, no compiler, a GPU that it does not know: torch's own operations do
        return None


def agrees(kernels: types.ModuleType, device: torch.device) -> bool:
    """Tell whether kernels have torch's bits where they might not: halves, zeros with a sign, the largest, NaN."""
    halves = torch.arange(-9, 10, device=device) / 2
    edges = torch.tensor([2.0**22 + 0.5, 2.0**23 - 0.5, 2.0**23 + 1, 2.0**40, 3e38, 1e-45, 0.0], device=device)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], device=device)
    values = torch.cat([halves, edges, -edges, odd])
    for points in (torch.full((), size, device=device) for size in (1.0, 2.0**24, 2.0**40)):
        scaled = values / points
        for fresh in (True, False):
            ours, theirs = (torch.full_like(scaled, 0.25, dtype=torch.float64) for _ in range(2))
            numbers = to_numbers(scaled, points)
            theirs.copy_(numbers) if fresh else theirs.add_(numbers)
            kernels.add(scaled.clone(), ours, points, fresh)
            if not same(ours, theirs):
                return False
        if not same(kernels.nearest(scaled, points), to_numbers(scaled, points).div_(points)):
            return False
    return True


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors of floats have the same bits; any NaN is like any other."""
    a, b = a.nan_to_num(12345.0, torch.inf, -torch.inf), b.nan_to_num(12345.0, torch.inf, -torch.inf)
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


@functools.lru_cache(maxsize=8)
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def _on_device(points: Tensor | float, device: torch.device) -> Tensor:
    return points if isinstance(points, Tensor) else _constant(points, device)
