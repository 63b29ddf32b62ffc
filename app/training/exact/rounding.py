"""Round gradients to a grid and add them up, many parameters at a time. This arithmetic is only here.

A gradient becomes a whole number of grid points, in its own precision: the product with a power of two is exact, and
the result is rounded to the nearest whole number, halves to even. Sums of these numbers are float64. If Triton works
on the GPU, one kernel does what takes torch five; both give the same bits.
"""

import functools
import types
from collections.abc import Sequence

import torch
from torch import Tensor

PIECES = {"cpu": 2**16, "cuda": 2**24}  # numbers at a time: fits in a core's cache; keeps a GPU busy


def piece(device: torch.device) -> int:
    """Return how many numbers to process at a time, whatever tensors they are from: fewer kernel launches."""
    return PIECES.get(device.type, PIECES["cpu"])


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Flatten and join tensors of one dtype; a single contiguous one gives a view."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])


def to_numbers(values: Tensor, points: Tensor | float, in_place: bool = False) -> Tensor:
    """Return the nearest grid point of each value, as a whole number in the values' dtype.

    Args:
        points: the number of grid points in 1; a power of two.
        in_place: whether to overwrite the values.
    """
    scaled = values.mul_(points) if in_place else values * points
    return scaled.round_().add_(0.0)  # -0 becomes 0: else the sign of a zero sum depends on the number of its terms


def add(values: Tensor, sums: Tensor, points: Tensor | float, fresh: bool) -> None:
    """Round values, and add them to sums, in grid points.

    Args:
        values: [n]; they are overwritten.
        sums: [n], float64.
        points: the number of grid points in 1; a power of two.
        fresh: overwrite the sums instead of adding to them.
    """
    kernels = fused(values.device)
    if kernels and values.dtype == torch.float32:
        kernels.add(values, sums, _on_device(points, values.device), fresh)
        return
    numbers = to_numbers(values, points, in_place=True)
    sums.copy_(numbers) if fresh else sums.add_(numbers)


def nearest(gradient: Tensor, points: Tensor | float) -> Tensor:
    """Round a gradient to the grid: same shape, dtype and unit."""
    kernels = fused(gradient.device)
    if kernels and gradient.dtype == torch.float32 and gradient.is_contiguous():
        return kernels.nearest(gradient, _on_device(points, gradient.device))
    return to_numbers(gradient, points).div_(points)


def how(device: torch.device) -> str:
    """Return what does the rounding on a device: "triton" or "torch"."""
    return "triton" if fused(device) else "torch"


@functools.cache
def fused(device: torch.device) -> types.ModuleType | None:
    """Return the Triton kernels if they work on the device and give torch's bits. The first call compiles."""
    if device.type != "cuda":
        return None
    try:
        from app.training.exact import triton_kernels

        return triton_kernels if agrees(triton_kernels, device) else None
    except Exception:  # no Triton, no compiler, or an unknown GPU: torch's own operations are used
        return None


def agrees(kernels: types.ModuleType, device: torch.device) -> bool:
    """Tell whether kernels give torch's bits in the hard cases: halves, signed zeros, the largest numbers, NaN."""
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
    """Tell whether two float tensors have the same bits; all NaN count as equal."""
    a, b = a.nan_to_num(12345.0, torch.inf, -torch.inf), b.nan_to_num(12345.0, torch.inf, -torch.inf)
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


@functools.lru_cache(maxsize=8)
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def _on_device(points: Tensor | float, device: torch.device) -> Tensor:
    return points if isinstance(points, Tensor) else _constant(points, device)
