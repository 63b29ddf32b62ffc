"""Triton kernels for grid_rounding.py, with the same bits as torch's operations, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
WHOLE = tl.constexpr(8388608.0)  # 2**23: a float32 of this size or more is a whole number


@triton.jit
def _numbers(values, points):
    """Round to whole numbers, halves to even: after adding 2**23, float32 has no bits for a fraction."""
    scaled = values * points
    size = tl.abs(scaled)
    rounded = tl.where(size < WHOLE, (size + WHOLE) - WHOLE, size)
    return tl.where(rounded == 0.0, 0.0, tl.where(scaled < 0.0, -rounded, rounded))


@triton.jit
def _add(values, sums, points, count, fresh: tl.constexpr, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = places < count
    numbers = _numbers(tl.load(values + places, there, other=0.0), tl.load(points)).to(tl.float64)
    if not fresh:
        numbers += tl.load(sums + places, there, other=0.0)
    tl.store(sums + places, numbers, there)


@triton.jit
def _nearest(values, rounded, points, count, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = places < count
    unit = tl.load(points)
    numbers = _numbers(tl.load(values + places, there, other=0.0), unit)
    tl.store(rounded + places, tl.div_rn(numbers, tl.zeros_like(numbers) + unit), there)


def add(values: Tensor, sums: Tensor, points: Tensor, fresh: bool) -> None:
    """Round float32 values [n], and add them, in grid points, to float64 sums [n]; both contiguous."""
    count = values.numel()
    if count:
        # No fused multiply-add: it rounds once where torch's operations round twice.
        _add[(triton.cdiv(count, BLOCK),)](values, sums, points, count, fresh, BLOCK, enable_fp_fusion=False)


def nearest(values: Tensor, points: Tensor) -> Tensor:
    """Round contiguous float32 values to the grid."""
    rounded, count = torch.empty_like(values), values.numel()
    if count:
        _nearest[(triton.cdiv(count, BLOCK),)](values, rounded, points, count, BLOCK, enable_fp_fusion=False)
    return rounded
