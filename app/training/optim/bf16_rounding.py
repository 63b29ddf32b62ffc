"""Numbers rounded to bfloat16 up or down at random, so that small updates of weights in 16 bits are right on average.

The random bits are a hash of a key and of the number's row and column in the whole weight: they are the same however
the weight is cut.
"""

import torch
from torch import Tensor

_FACTORS = (0x7FEB352D, 0x846CA68B - 2**32)  # of lowbias32 (C. Wellons), as signed numbers


def stochastic(numbers: Tensor, rows: Tensor, columns: Tensor, key: int) -> Tensor:
    """Round float32 [rows, columns] to bfloat16: up with the probability of the part that is cut off.

    Args:
        rows: their places in the whole weight, int32.
        columns: the same.
        key: 63 bits; another one for each step and weight.
    """
    bits = random_bits(rows, columns, key)
    bits += numbers.view(torch.int32)
    bits &= -0x10000
    found = bits.view(torch.float32)
    # What is added must not make infinity of a number that is not finite, nor the other way round.
    return torch.where(numbers.isfinite(), found, numbers).bfloat16()


def random_bits(rows: Tensor, columns: Tensor, key: int) -> Tensor:
    """Return 16 random bits for each place, int32 [rows, columns]."""
    first, second = (_signed(key >> shift & 0xFFFFFFFF) for shift in (0, 31))
    return _mix(_mix(rows ^ first)[:, None] + columns ^ second).bitwise_and_(0xFFFF)


def _mix(h: Tensor) -> Tensor:
    """Hash 32 bits to 32 bits, in place; shifts of signed numbers bring in copies of the sign, which are cut off."""
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    h *= _FACTORS[0]
    h ^= (h >> 15).bitwise_and_(0x1FFFF)
    h *= _FACTORS[1]
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    return h


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
