"""Gradients that a loss takes itself, such as a penalty's, under FSDP2.

FSDP2 frees a layer's whole weights when a backward pass is through it. The backward pass of a loss that has such a
gradient in it needs them once more, so they stay until the micro-batch is over.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from app.distributed import accelerate_patches
from app.distributed.fsdp_calls import is_gathered, is_sharded
from app.errors import UserError

_ADVICE = (
    "under FSDP2 a weight is whole only while its layer computes: take the penalty of gradients of the inputs or of "
    "what layers return, use weight decay (--optim.weight-decay) for one of the weights themselves, or take a profile "
    "without FSDP"
)


class InnerGradients:
    """Keeps whole weights where a micro-batch's loss has a gradient in it."""

    def __init__(self) -> None:
        self._modules: list[Any] = []  # whose parameters FSDP2 gathers
        self._watching = self._kept = False

    def watch(self, model: nn.Module) -> None:
        """Keep the weights of a prepared model where that is needed."""
        for parameter in model.parameters():
            # FSDP2 computes with whole weights, and gives their shards gradients itself: autograd has none for a shard.
            if parameter.requires_grad and not is_gathered(parameter):
                parameter.register_hook(_outside)
        for module in filter(is_sharded, model.modules()):
            self._modules.append(module)
            # Before FSDP2's own hook, so that this one sees a gradient before it.
            module.register_forward_hook(self._watch, prepend=True)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Watch for gradients in the loss of the micro-batch in this block."""
        if not self._modules:
            yield
            return
        self._watching = True
        try:
            with _shards_refused():
                yield
        finally:
            self._watching = False
            if self._kept:
                self._kept = False
                for module in self._modules:
                    module.set_reshard_after_backward(True, recurse=False)
                    module.reshard()

    def _watch(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._watching and torch.is_grad_enabled():
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._keep)

    def _keep(self, _: Tensor) -> None:
        # In a backward pass, gradients are enabled if it is itself to be differentiated.
        if torch.is_grad_enabled() and not self._kept:
            self._kept = True
            for module in self._modules:
                module.set_reshard_after_backward(False, recurse=False)


def _shards_refused() -> AbstractContextManager[None]:
    """Refuse gradients with respect to shards, which are None or an error: the graph has the whole weights."""

    def check(inputs: Any) -> None:
        if any(isinstance(tensor, Tensor) and not is_gathered(tensor) for tensor in tree_leaves(inputs)):
            raise UserError(f"torch.autograd.grad with respect to a model's weights: {_ADVICE}")

    return accelerate_patches.before_backward(check)


def _outside(_: Tensor) -> NoReturn:
    raise UserError(f"a loss uses weights outside the model's forward pass: {_ADVICE}")


def explained(error: BaseException | None) -> UserError | None:
    """Return advice for a loss that uses shards, or layers, past the forward pass of the model; None for others."""
    if not isinstance(error, RuntimeError):
        return None
    if "mixed torch.Tensor and DTensor" in str(error):
        return UserError(f"a loss uses weights outside the model's forward pass: {_ADVICE}")
    if "requires running forward through the root module first" in str(error):
        return UserError(
            "a layer was called by itself before the model was, and FSDP2 begins with the whole model: call the model, "
            "and have its forward call the rest; or take a profile without FSDP"
        )
    return None
