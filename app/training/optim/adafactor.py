"""torch's Adafactor for weights that are sharded or split: each is gathered for its update, one after the other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from app.distributed.naming import local_gradient, local_shard
from app.training.optim import wholes


class Adafactor(torch.optim.Adafactor):
    """Update weights by torch's Adafactor (Shazeer and Stern, 2018), the same on every layout.

    It divides by means over rows, columns and the whole weight, so every rank computes the update of the whole, and
    takes its part. What it keeps is small, and every rank has all of it.
    """

    gathers = True
    """Whether it gathers shards."""
    held_whole = frozenset({"row_var", "col_var", "variance"})
    """State that is not cut where its parameter is."""

    def begin(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Make the state of a parameter before its first update."""
        shape, shard = parameter.shape, local_shard(parameter.detach())
        sizes: dict[str, tuple[int, ...]] = {"variance": (*shape,)}
        if len(shape) > 1:
            sizes = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
        state = {name: _everywhere(shard.new_zeros(size), parameter) for name, size in sizes.items()}
        return {"step": torch.zeros(()), **state}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no loss to return
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.begin(parameter))
        shard, whole = local_shard(parameter.detach()), parameter
        if isinstance(parameter, DTensor):
            whole = nn.Parameter(wholes.whole(shard, parameter).clone())
            whole.grad = wholes.whole(local_gradient(parameter), parameter)
        # torch's own step, of one weight that is whole; it writes into the tensors of the state.
        alone = torch.optim.Adafactor([whole], foreach=False)
        alone.param_groups = [{**group, "params": [whole], "foreach": False}]
        alone.state[whole] = {name: local_shard(tensor) for name, tensor in state.items()}
        alone.step()
        if whole is not parameter:
            shard.copy_(wholes.part(whole.detach(), parameter))


def _everywhere(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """Mark a tensor as one that every rank has, where the parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
