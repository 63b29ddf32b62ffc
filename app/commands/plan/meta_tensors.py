"""Tensors without contents, on torch's meta device, in place of a model's weights and its optimizer's state."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class NoNumbers(TorchFunctionMode):
    """Answers no to questions about numbers that do not exist, such as whether a mask hides nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__bool__ and args[0].device.type == "meta":
            return False
        return func(*args, **(kwargs or {}))


@contextmanager
def emptied(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Give models and their optimizers meta tensors in place of weights and buffers, and their own after the block."""
    hollow: dict[Tensor, Tensor] = {}
    with ExitStack() as stack:
        for model in models:
            for module in model.modules():
                held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for own in held:
                    stack.callback(partial(own.update, dict(own)))
                    own.update({n: _hollow(t, hollow) for n, t in own.items() if t is not None})
        for optimizer in optimizers:
            stack.callback(setattr, optimizer, "state", optimizer.state)
            optimizer.state = type(optimizer.state)(dict)
            for group in optimizer.param_groups:
                stack.callback(group.update, params=group["params"])
                group["params"] = [_hollow(p, hollow) for p in group["params"]]
        yield


def _hollow(tensor: Tensor, known: dict[Tensor, Tensor]) -> Tensor:
    if tensor not in known:
        twin = torch.empty_like(tensor, device="meta")
        known[tensor] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    return known[tensor]
