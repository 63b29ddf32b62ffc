"""Autocast under FSDP2 without copies that outlive their layer: weights that are gathered again are cast again too.

Autocast (torch 2.13) casts a weight once in a forward pass. It keeps the copy until the pass is over, and the graph
keeps it until the backward pass. FSDP2 frees a layer's weights after its forward pass, but the copies would stay on
every process: half the bytes of the whole model. Here, layers cast their own weights, with the same rounding, and the
graph keeps the weight itself in place of the copy. Of a layer that tensor parallelism splits, that is this process's
part.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from app.distributed.naming import local_shard
from app.distributed.tensor_parallel.layers import adds_bias_itself, is_split

# Layers whose weights and biases autocast always casts, on every device.
_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LateCasts:
    """Cast the weights of a model's layers where they are used, and once more for the backward pass."""

    def __init__(self, model: nn.Module, device: str):
        """Take over the casts of a model that FSDP2 has prepared.

        Args:
            device: type of the device that autocast is for.
        """
        self.device = device
        self._sources: dict[int, Tensor] = {}  # by the address of the copy, while its layer computes
        self._roots: dict[nn.Parameter, Tensor] | None = None  # of this forward pass of the model
        for module in model.modules():
            if isinstance(module, _KINDS) and type(module).forward in {kind.forward for kind in _KINDS}:
                module.forward = self._casting(module, module.forward)  # type: ignore[method-assign]  # only of this one

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside this block, a forward pass, have the graph keep no copies."""
        self._roots = {}
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._roots = None

    def _casting(self, module: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap a layer's forward pass; hooks before and after it still see the weights themselves."""
        uncast = {"bias"} if adds_bias_itself(module) else set()
        # What is cut is not a weight to autocast, which then casts it at each use.
        apart = is_split(module)

        @functools.wraps(forward)
        def casting(*args: Any, **kwargs: Any) -> Tensor:
            if not torch.is_autocast_enabled(self.device):
                return forward(*args, **kwargs)
            held: dict[str, Any] = module._parameters
            weights = dict(held)
            cast = {n: p for n, p in weights.items() if p is not None and p.dtype == torch.float32 and n not in uncast}
            copies = {name: self._cast(weight, apart) for name, weight in cast.items()}
            places = {copy.untyped_storage().data_ptr(): local_shard(cast[n]).detach() for n, copy in copies.items()}
            held.update(copies)
            self._sources |= places
            try:
                return forward(*args, **kwargs)
            finally:
                held.update(weights)
                for place in places:
                    self._sources.pop(place, None)

        return casting

    def _cast(self, weight: nn.Parameter, apart: bool) -> Tensor:
        """Cast what is here of a weight.

        Args:
            apart: whether the gradients of its uses in a forward pass are summed in fp32; if not, in the type of the
                cast, as autocast does.
        """
        dtype, here = torch.get_autocast_dtype(self.device), local_shard(weight)
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return here.detach().to(dtype)
        root = None if self._roots is None or apart else self._roots.get(weight)
        if root is None:
            root = _Root.apply(here, dtype)
            if self._roots is not None and not apart:
                self._roots[weight] = root
        return _Use.apply(root, here)

    def _pack(self, saved: Tensor) -> Any:
        source = self._sources.get(saved.untyped_storage().data_ptr())
        if source is None:
            return saved
        return source, saved.dtype, saved.size(), saved.stride(), saved.storage_offset()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    source, dtype, size, stride, offset = packed
    return source.detach().to(dtype).as_strided(size, stride, offset)


class _Root(torch.autograd.Function):
    """The cast of a weight in the graph, without its numbers."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_empty((), dtype=dtype).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class _Use(torch.autograd.Function):
    """The numbers of a cast, for one use."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, weight: Tensor) -> Tensor:
        return weight.to(root.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
