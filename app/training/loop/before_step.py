"""What a step changes, as it was before the step: put back where the step is left out, or where its body runs again."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from app.distributed import naming
from app.distributed.accelerator import Accelerator
from app.distributed.naming import local_shard
from app.distributed.running_statistics import RunningStatistics
from app.distributed.state import base_model

_PLAIN = (bool, int, float, str, type(None))
_TORCHS_OWN = frozenset(vars(nn.Module()))  # such as `training`, which is the caller's


class BeforeStep:
    """The models before a step; and optimizers, each before its update.

    The models' part is every buffer, also one that a forward pass replaces or makes; frozen weights, which may follow
    the trained ones as a teacher's do (not those under adapters); the modules' extra state; their attributes that are
    plain numbers, words or None; and running statistics that wait to be folded. Trained weights change in their
    optimizer's update alone, but for those of embeddings with a `max_norm`.
    """

    def __init__(self, accelerator: Accelerator, statistics: RunningStatistics):
        """Copy what belongs to the models."""
        self._modules = [module for model in naming.plain(accelerator.models) for module in model.modules()]
        constant, changing = base_model.parameters(accelerator.models), _changed_in_forward(self._modules)
        weights = {p: None for module in self._modules for p in module._parameters.values() if p is not None}
        changeable = [p for p in weights if p not in constant and (p in changing or not p.requires_grad)]
        buffers = [b for module in self._modules for b in module._buffers.values() if b is not None]
        self._tensors = [(tensor, _copied(tensor)) for tensor in dict.fromkeys((*changeable, *buffers))]
        self._places = [dict(module._buffers) for module in self._modules]
        self._temporary = [set(module._non_persistent_buffers_set) for module in self._modules]
        self._attributes = [_attributes(module) for module in self._modules]
        self._extras = [
            (module, copy.deepcopy(module.get_extra_state()))
            for module in self._modules
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]
        self._put_statistics_back = statistics.remember()
        self._updates: dict[torch.optim.Optimizer, Callable[[], None]] = {}

    def keep(self, optimizer: torch.optim.Optimizer, average: Callable[[], None]) -> None:
        """Copy an optimizer and its weights before its first update in the step.

        Args:
            average: puts the average of these weights back.
        """
        if optimizer in self._updates:
            return
        weights = [(p, _copied(p)) for group in optimizer.param_groups for p in group["params"]]
        state = {parameter: _copied(values) for parameter, values in optimizer.state.items()}
        groups = [{k: _copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

        def put_back() -> None:
            _write(weights)
            optimizer.state.clear()
            optimizer.state.update(_copied(state))
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                for name in group.keys() - before.keys() - {"params"}:
                    del group[name]
                group.update(_copied(before))
            average()

        self._updates[optimizer] = put_back

    def keeps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether there is a copy of an optimizer."""
        return optimizer in self._updates

    def put_back(self) -> None:
        """Put all of it back; it may be called again, after more forward passes."""
        for module, places, temporary, attributes in zip(
            self._modules, self._places, self._temporary, self._attributes, strict=True
        ):
            module._buffers.clear()
            module._buffers.update(places)
            module._non_persistent_buffers_set = set(temporary)
            # One that became a weight or a module is no attribute any more.
            vars(module).update({name: value for name, value in attributes.items() if name in vars(module)})
        _write(self._tensors)
        for module, extra in self._extras:
            module.set_extra_state(copy.deepcopy(extra))
        self._put_statistics_back()
        for put_back in self._updates.values():
            put_back()


def _changed_in_forward(modules: list[nn.Module]) -> set[Tensor]:
    """Return trained weights that torch's own forward passes change."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {module.weight for module in modules if isinstance(module, kinds) and module.max_norm is not None}


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if type(v) in _PLAIN and k not in _TORCHS_OWN}


def _copied(value: Any) -> Any:
    """Copy a value with the tensors in it; a sharded one stays sharded."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return copy.deepcopy(value)


@torch.no_grad()
def _write(copies: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, before in copies:
        local_shard(tensor.detach()).copy_(local_shard(before))
