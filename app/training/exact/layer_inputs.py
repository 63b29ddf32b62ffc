"""One gradient for each input of a layer, on every layout: what the layer's own uses of it add up to.

FSDP2 puts an operation before each layer that it shards, to learn when the layer's backward pass has ended. So where a
layer uses an input several times, and other layers use it too (positions that are added in each layer, an encoder's
output in each layer of a decoder), gradients are added within each layer first. Without FSDP2 they are added use by
use, which is another order and rounds otherwise. Exact mode puts such an operation there on every layout.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from app.distributed import fsdp
from app.errors import UserError


class LayerInputs(torch.autograd.Function):
    """Pass tensors on; in the backward pass, wait until all their gradients within the layer have been added."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the same tensors."""
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return the same gradients."""
        return gradients


def add_within_layers(model: nn.Module) -> None:
    """Have gradients of a model's inputs, and of its layers' inputs, added as they are under FSDP2.

    The layers are those that FSDP2 shards where the profile names none. A profile may also shard larger parts. Tensors
    in lists, tuples and dicts count, and those in plain dataclasses do not.
    """
    layers = fsdp.layer_classes(model, set())
    for module in model.modules():
        if module is model or type(module).__name__ in layers:
            module.register_forward_pre_hook(_passed_on, with_kwargs=True)


def explained(error: BaseException | None) -> UserError | None:
    """Return advice for a layer that overwrites its input, which has no gradient then; None for other errors."""
    if not isinstance(error, RuntimeError) or f"{LayerInputs.__name__} is a view and is being mod" not in str(error):
        return None
    return UserError(
        "--run.exact: a layer of the model changes its own input in place, which FSDP2 refuses too: use "
        "operations that return a new tensor (relu for relu_, inplace=False)"
    )


def _passed_on(_: nn.Module, args: Any, kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return None
    leaves, shape = tree_flatten((args, kwargs))
    learning = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not learning:
        return None
    passed = LayerInputs.apply(*(leaves[index] for index in learning))
    for index, tensor in zip(learning, passed, strict=True):
        leaves[index] = tensor
    return tree_unflatten(leaves, shape)
