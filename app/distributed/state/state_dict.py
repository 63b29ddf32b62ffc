"""The state of a run by names that are the same on every layout.

A tensor has the name of its parameter in the plain model, whatever wraps the model: DDP, FSDP2, torch.compile,
activation checkpointing. State that is not a tensor is kept apart, as JSON.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from app.distributed import naming
from app.errors import UserError

# Keys of an optimizer's group that are not saved: the kernels they choose depend on the hardware.
_IMPLEMENTATION = {"params", "fused", "foreach", "capturable", "differentiable"}


def model_tensors(models: list[nn.Module]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Collect parameters and persistent buffers by name, sharded ones as DTensor; and the modules' extra state."""
    tensors: dict[str, Tensor] = {}
    extras: dict[str, Any] = {}
    for index, model in enumerate(models):
        for name, value in get_model_state_dict(model).items():
            held: dict[str, Any] = tensors if isinstance(value, Tensor) else extras
            held[f"models.{index}.{name}"] = value
    return tensors, extras


def size(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> int:
    """Count the bytes of the tensors of models and optimizers, over all ranks."""
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    tensors += [v for o in optimizers for values in o.state.values() for v in values.values() if isinstance(v, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def restore_extras(models: list[nn.Module], extras: dict[str, Any]) -> None:
    """Give modules back what their get_extra_state returned."""
    for name, value in extras.items():
        _, index, path = name.split(".", 2)
        (model,) = naming.plain([models[int(index)]])
        model.get_submodule(path.rpartition(".")[0]).set_extra_state(value)


def optimizer_state(index: int, optimizer: torch.optim.Optimizer, names: dict) -> tuple[dict[str, Tensor], dict]:
    """Split an optimizer's state into tensors by name and plain values (hyper-parameters, counters).

    A parameter that has had no gradient yet has no state, and saving makes none.
    """
    tensors: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    for parameter, values in optimizer.state.items():
        if parameter not in names:
            raise UserError(
                f"optimizer {index} updates a parameter of shape {tuple(parameter.shape)} that no prepared model has: "
                "it cannot be saved; make it part of a model that is given to prepare"
            )
        of_parameter: dict[str, Tensor] = {}
        state[names[parameter]] = split_tensors(values, f"optimizers.{index}.{names[parameter]}", of_parameter)
        if isinstance(parameter, DTensor):
            _check_sharded(index, of_parameter)
        tensors |= of_parameter
    groups = [{k: v for k, v in group.items() if k not in _IMPLEMENTATION} for group in optimizer.param_groups]
    return tensors, {"groups": split_tensors(groups, f"optimizers.{index}.groups", tensors), "state": state}


def _check_sharded(index: int, state: dict[str, Tensor]) -> None:
    """Refuse state of a sharded parameter that each rank has made for its own shard: one rank's would be saved."""
    for name, value in state.items():
        if value.numel() != 1 and not isinstance(value, DTensor):
            raise UserError(
                f"optimizer {index} keeps {name}, of shape {tuple(value.shape)}, apart from FSDP2's shards, so "
                "it cannot be saved: take a profile without FSDP, or another optimizer"
            )


def optimizer_targets(
    index: int, optimizer: torch.optim.Optimizer, names: dict, saved: dict[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """Make empty tensors for an optimizer's saved state, sharded like its parameters.

    Args:
        saved: shape and type of every tensor in the checkpoint, by name.
    """
    prefix = f"optimizers.{index}."
    by_name = {names[p]: p for group in optimizer.param_groups for p in group["params"] if p in names}
    targets = {}
    for name in (name for name in saved if name.startswith(prefix)):
        shape, dtype = saved[name]
        owner, begun = name.removeprefix(prefix), {}
        while owner and owner not in by_name:
            owner = owner.rpartition(".")[0]
        if owner and callable(begin := getattr(optimizer, "begin", None)):  # one of ours, which knows how it cuts
            begun = begin(by_name[owner])
        ready = begun.get(name.removeprefix(f"{prefix}{owner}."))
        if ready is not None and (ready.shape, ready.dtype) == (shape, dtype):
            targets[name] = ready
        elif owner and shape == by_name[owner].shape:
            targets[name] = torch.zeros_like(by_name[owner], dtype=dtype, requires_grad=False)
        else:
            targets[name] = torch.zeros(shape, dtype=dtype)
    return targets


def switches(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer trains with other weights than are to be scored, and changes between the two."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def restore_optimizer(optimizer: torch.optim.Optimizer, names: dict, tensors: dict[str, Tensor], plain: dict) -> None:
    """Put loaded state into an optimizer, which keeps its own kernels (fused, foreach).

    torch's load_state_dict would cast the state to the type of its parameter.
    """
    groups = join_tensors(plain["groups"], tensors)
    if [set(g) for g in groups] != [set(g) - _IMPLEMENTATION for g in optimizer.param_groups]:
        raise UserError(
            f"the optimizer that was saved has {len(groups)} parameter groups, this one {len(optimizer.param_groups)}, "
            "or their settings have other names: build it as it was built then"
        )
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)
        for parameter in group["params"]:
            if names.get(parameter) in plain["state"]:  # one that no model has was saved only if it had no state
                state = join_tensors(plain["state"][names[parameter]], tensors)
                moved = {
                    k: _on_device_of(parameter, k, v, group) if isinstance(v, Tensor) else v for k, v in state.items()
                }
                optimizer.state[parameter] = moved


def _on_device_of(parameter: Tensor, key: str, value: Tensor, group: dict) -> Tensor:
    """Move a tensor of state to its parameter's device; step counts stay on the CPU unless a kernel reads them."""
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return value
    return value.to(parameter.device)


def split_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Move the tensors inside nested dicts and lists into `tensors`, and leave their names in their places."""
    if isinstance(value, Tensor):
        while name in tensors:  # the keys "a.b" and "a", "b" make one name
            name += "'"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        for key in value:
            if not (key is None or isinstance(key, bool | int | float | str)):
                raise UserError(f"{name} has the key {key!r}: keys that are saved are numbers or text")
        return {"items": [[key, split_tensors(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [split_tensors(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    allowed = "tensors, numbers, text, lists and dicts"
    raise UserError(f"{name} is of type {type(value).__name__}: what is saved must consist of {allowed}")


def join_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `split_tensors`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "items":
        return {key: join_tensors(item, tensors) for key, item in content}
    items = [join_tensors(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
