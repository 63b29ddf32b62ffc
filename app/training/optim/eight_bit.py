"""Numbers in eight bits: a code for each, and a scale for each block of neighbours in a row.

Codes are those of Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, 2022: steps that grow with the
number. Their blocks are of the flattened weight, and those of torchao of each rank's shard, so sharding changes them.
Here no block crosses a row, and its length follows from the whole row alone, so a shard of rows has the same blocks.
"""

import functools

import torch
from torch import Tensor

BLOCK = 256
_SMALLEST_BLOCK = 16
_SMALLEST_WEIGHT = 4096
_LEAST = 1e-30  # of a scale, so that a block of zeros divides by no zero
_DECADES = 7


def is_worth(shape: torch.Size) -> bool:
    """Tell whether a weight's state is kept in eight bits: matrices that are not small, by their whole shape."""
    return len(shape) > 1 and shape.numel() >= _SMALLEST_WEIGHT


def block_of(row: int) -> int:
    """Return the length of blocks in rows of `row` numbers.

    It divides an eighth of the row where it can, or else a quarter or a half, so that as many tensor-parallel processes
    may share the columns. Otherwise the last block of a row may be shorter.
    """
    for parts in (8, 4, 2, 1):
        part = row // parts
        dividing = part & -part  # the largest power of two
        if row % parts == 0 and dividing >= _SMALLEST_BLOCK:
            return min(BLOCK, dividing)
    return BLOCK


def count(row: int, block: int) -> int:
    """Return the number of blocks in a row, or in a part of it."""
    return -(-row // block)


def quantize(numbers: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes, uint8 [rows, numbers], and scales [rows, blocks], of float32 [rows, numbers]."""
    sizes = numbers.abs() if signed else numbers
    scales = _in_blocks(sizes, block).amax(-1)
    scaled = numbers / _spread(scales.clamp(min=_LEAST), block, numbers.shape[1])
    # A table of all numbers with 16 bits is 70 times as fast on a CPU as a search among 256.
    places = scaled.bfloat16().view(torch.int16).int() & 0xFFFF
    return _nearest(signed, numbers.device).index_select(0, places.view(-1)).view(numbers.shape), scales


def dequantize(codes: Tensor, scales: Tensor, block: int, signed: bool) -> Tensor:
    """Return float32 [rows, numbers] from what `quantize` returned."""
    numbers = _values(signed, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)
    return numbers.mul_(_spread(scales, block, codes.shape[1]))


def _in_blocks(numbers: Tensor, block: int) -> Tensor:
    """View rows as blocks, [rows, blocks, numbers]; a last one that is short is filled up with zeros."""
    rows, row = numbers.shape
    missing = -row % block
    return torch.nn.functional.pad(numbers, (0, missing)).view(rows, -1, block)


def _spread(scales: Tensor, block: int, row: int) -> Tensor:
    """Repeat each block's scale for all of its numbers, [rows, numbers]."""
    rows, blocks = scales.shape
    return scales[:, :, None].expand(rows, blocks, block).reshape(rows, -1)[:, :row]


@functools.cache
def _values(signed: bool, device: torch.device) -> Tensor:
    """Return the number of each code, in order, for a scale of 1; code 0 is the smallest number.

    Seven decades, each of twice as many steps as the one below it, and 0 and 1; with a sign, half as many.
    """
    numbers = [0.0, 1.0]
    for decade in range(_DECADES):
        steps = 2**decade * (1 if signed else 2)
        bounds = torch.linspace(0.1, 1, steps + 1, dtype=torch.float64)
        middles = ((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)).tolist()
        numbers += middles + ([-each for each in middles] if signed else [])
    return torch.tensor(sorted(numbers), device=device)


@functools.cache
def _nearest(signed: bool, device: torch.device) -> Tensor:
    """Return the code nearest to each number of the type bfloat16, by its 16 bits."""
    cpu = torch.device("cpu")
    values = _values(signed, cpu).double()
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    codes = torch.bucketize(numbers.nan_to_num(), (values[:-1] + values[1:]) / 2)
    return codes.to(torch.uint8).to(device)
