"""The arithmetic of AdamW, number by number, for optimizers that keep weights or state in their own ways."""

from typing import Any

from torch import Tensor


def update(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, group: dict[str, Any], count: float) -> None:
    """Update a weight and both averages in place (Loshchilov and Hutter, 2019).

    Each operation rounds once, so that bits do not depend on how a weight is cut into shards or pieces.

    Args:
        mean: the average of the gradient.
        square: the average of its square.
        group: the options lr, betas, eps and weight_decay.
        count: of this weight's updates, with this one.
    """
    slow, slower = group["betas"]
    mean.mul_(slow).add_(gradient * (1 - slow))
    square.mul_(slower).add_((gradient * gradient).mul_(1 - slower))
    size = (square / (1 - slower**count)).sqrt_().add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.sub_((mean / size).mul_(group["lr"] / (1 - slow**count)))
