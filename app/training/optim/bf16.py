"""Weights that are kept in bfloat16, and how updates round them without losing small ones.

Numbers are rounded up or down at random, so that small updates of weights in 16 bits are right on average. The random
bits are a hash of a key and of the number's row and column in the whole weight: they are the same however the weight is
cut.
"""

import torch
from torch import Tensor, nn

from app.config import OptimConfig
from app.errors import UserError

_FACTORS = (0x7FEB352D, 0x846CA68B - 2**32)  # of lowbias32 (C. Wellons), as signed numbers


def keep_weights(model: nn.Module, settings: OptimConfig, precision: str | None) -> None:
    """Turn a model's weights into bfloat16 in place, where --optim.updates asks for it; buffers stay as they are.

    Args:
        precision: the profile's mixed_precision; None where nothing is trained.

    Raises:
        UserError: passes would not compute in bf16.
    """
    if settings.updates == "plain":
        return
    if precision is not None:
        check(settings, precision)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def check(settings: OptimConfig, precision: str) -> None:
    """Refuse weights in bfloat16 under a profile that computes in another type.

    Raises:
        UserError: it does.
    """
    if settings.updates != "plain" and precision != "bf16":
        raise UserError(
            f"--optim.updates {settings.updates} keeps weights in bf16, and passes compute in another type "
            f"(mixed_precision {precision}): take a profile with mixed_precision bf16"
            " (accelerate launch --mixed_precision bf16)"
        )


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
    cut_off = bits.view(torch.float32)
    # What is added must not make infinity of a number that is not finite, nor the other way round.
    return torch.where(numbers.isfinite(), cut_off, numbers).bfloat16()


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
