"""Weights that are kept in bfloat16, with optimizers that update them without losing small updates."""

import torch
from torch import nn

from app.config import OptimConfig
from app.errors import UserError


def keep(model: nn.Module, settings: OptimConfig, precision: str | None) -> None:
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
