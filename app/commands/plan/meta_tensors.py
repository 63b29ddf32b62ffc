"""Tensors without contents, on torch's meta device, in place of a model's weights and its optimizer's state."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Cut = Mapping[Tensor, tuple[int, int]]
"""Weights of which a process has one part: the dimension that is cut, and how many parts there are."""


@contextmanager
def emptied(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], cut: Cut | None = None) -> Iterator[None]:
    """Give models and their optimizers meta tensors in place of weights and buffers, and their own after the block."""
    cut = cut or {}
    hollow: dict[Tensor, Tensor] = {}
    with ExitStack() as stack:
        for model in models:
            for module in model.modules():
                held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for tensors in held:
                    stack.callback(partial(tensors.update, dict(tensors)))
                    tensors.update({n: _hollow(t, hollow, cut) for n, t in tensors.items() if t is not None})
        for optimizer in optimizers:
            stack.callback(setattr, optimizer, "state", optimizer.state)
            optimizer.state = type(optimizer.state)(dict)
            for group in optimizer.param_groups:
                stack.callback(group.update, params=group["params"])
                group["params"] = [_hollow(p, hollow, cut) for p in group["params"]]
        yield


def part(tensor: Tensor, cut: tuple[int, int] | None) -> Tensor:
    """Return a meta tensor like another one, or like a part of it: the dimension, and how many parts there are."""
    twin = torch.empty_like(tensor, device="meta")
    return twin if cut is None else twin.chunk(cut[1], cut[0])[0].clone()


def _hollow(tensor: Tensor, twins: dict[Tensor, Tensor], cut: Cut) -> Tensor:
    if tensor not in twins:
        twin = part(tensor, cut.get(tensor))
        twins[tensor] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    return twins[tensor]
