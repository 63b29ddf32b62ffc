"""Whether all ranks use the same layers in the same order, as FSDP2 needs.

FSDP2 pairs what ranks send each other by its order alone. Where a rank leaves out a layer, or takes two in another
order, the ranks mix up their weights or gradients; and if those have the same sizes, nothing fails.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from app.distributed import collectives
from app.errors import UserError

ALL_LAYERS = (
    "Have every micro-batch use all weights in one order (add 0 times the output of a layer that it does not need); "
    "or take a profile without FSDP"
)
_BITS = 52  # of a fingerprint: float64 holds it


def is_sharded(module: nn.Module) -> bool:
    """Tell whether FSDP2 gathers a module's parameters for its forward pass."""
    return hasattr(module, "set_gradient_divide_factor")


def is_gathered(parameter: Tensor) -> bool:
    """Tell whether a parameter is not FSDP2's shard. One of a layer that is split stays a DTensor of that mesh."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh.mesh_dim_names == ("tp",)


def own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parameters that FSDP2 gathers with a module: its own, and those of modules in it without FSDP2."""
    yield from ((module, name) for name, parameter in module._parameters.items() if parameter is not None)
    for inner in module.children():
        if not is_sharded(inner):
            yield from own_parameters(inner)


def allow_views(classes: str = ".*") -> None:
    """Silence FSDP2's warning of layers that return views, where nothing changes what they return in place.

    Args:
        classes: a regular expression for the names of the layers' classes.
    """
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({classes}\) returned a view tensor")


class CallOrder:
    """A fingerprint of what FSDP2 has gathered and reduced in this rank's training steps, in order."""

    def __init__(self):
        self._modules, self._so_far, self._counting = 0, 0, False

    def watch(self, model: nn.Module) -> None:
        """Count the forward and backward passes of a prepared model for which FSDP2 gathers weights."""
        for module in filter(is_sharded, model.modules()):
            if place := next(own_parameters(module), None):
                self._modules += 1
                gathers = partial(self._gathers, self._modules, *place)
                # All before FSDP2's own hooks, which replace the shards by whole parameters.
                module.register_forward_pre_hook(gathers, prepend=True)
                module.register_forward_hook(partial(self._watch_backward, gathers), prepend=True)

    def _gathers(self, number: int, inner: nn.Module, name: str, *_: Any) -> None:
        if self._counting and not is_gathered(inner._parameters[name]):
            self._add(number)

    def _watch_backward(self, gathers: Callable[..., None], module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Have the backward pass through a module count too: a loss may not use all outputs."""
        if self._counting and torch.is_grad_enabled():
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(gathers)

    def _add(self, number: int) -> None:
        self._so_far = (self._so_far * 1_000_003 + number) % 2**_BITS

    @contextmanager
    def turn(self, models: Sequence[nn.Module], last: bool) -> Iterator[None]:
        """Count the calls in this block, and after a step's last turn the gradients that there are."""
        self._counting = bool(self._modules)
        try:
            yield
        finally:
            self._counting = False
        if last and self._modules:
            for model in models:
                self._add(hash(tuple(parameter.grad is None for parameter in model.parameters())) % 2**_BITS)

    def slots(self) -> Tensor:
        """Return a number for each rank, all 0 but this rank's, to be summed over ranks; empty without FSDP2."""
        slots = torch.zeros(torch.distributed.get_world_size() if self._modules else 0, dtype=torch.float64)
        if self._modules:
            slots[collectives.rank()] = self._so_far
        return slots

    def compare(self, slots: list[float], step: int) -> None:
        """Compare the numbers of all ranks. Every rank takes part, with the same numbers.

        Raises:
            UserError: ranks differ; it names the first that differs from rank 0.
        """
        apart = [rank for rank, number in enumerate(slots) if number != slots[0]]
        if apart:
            raise UserError(
                f"rank {apart[0]} has used other layers than rank 0 by step {step}, or the same in another order, so "
                f"FSDP2 has mixed up their weights or gradients; nothing of it was saved. {ALL_LAYERS}"
            )
