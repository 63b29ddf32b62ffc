"""Names for all that a run must remember, the same on every layout.

A tensor is known by the name of its parameter in the plain model, whatever wraps it: DDP, FSDP2, torch.compile,
activation checkpointing. What is not a tensor is kept apart, as JSON.
"""

from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from app.errors import UserError

# How the arithmetic is carried out depends on the hardware, not on the run.
_IMPLEMENTATION = {"params", "fused", "foreach", "capturable", "differentiable"}
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def model_tensors(models: list[nn.Module]) -> dict[str, Tensor]:
    """Collect parameters and persistent buffers by name: the tensors themselves, sharded ones as DTensor."""
    tensors = {}
    for index, model in enumerate(models):
        for name, value in get_model_state_dict(model).items():
            tensors[f"models.{index}.{name}"] = value
    return tensors


def parameter_names(models: list[nn.Module]) -> dict[nn.Parameter, str]:
    """Map each parameter to its name; one that is shared has its first name."""
    names: dict[nn.Parameter, str] = {}
    for index, model in enumerate(models):
        plain = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False)
        for name, parameter in plain.named_parameters():
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            names.setdefault(parameter, f"models.{index}.{name}")
    return names


def optimizer_state(index: int, optimizer: torch.optim.Optimizer, names: dict) -> tuple[dict[str, Tensor], dict]:
    """Split what an optimizer remembers into tensors by name and plain values (hyper-parameters, counters).

    A parameter that has had no gradient yet has no state, and gets none by being saved.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"{names[parameter]}.{key}"
            if isinstance(value, Tensor):
                tensors[f"optimizers.{index}.{name}"] = value
            else:
                values[name] = value
    groups = [{k: v for k, v in group.items() if k not in _IMPLEMENTATION} for group in optimizer.param_groups]
    return tensors, {"groups": groups, "values": values}


def optimizer_targets(
    index: int, optimizer: torch.optim.Optimizer, names: dict, saved: dict[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """Make empty tensors for an optimizer's saved state, sharded like its parameters.

    Args:
        saved: shape and type of every tensor in the checkpoint, by name.
    """
    targets = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        prefix = f"optimizers.{index}.{names[parameter]}."
        for name in (n for n in saved if n.startswith(prefix) and "." not in n.removeprefix(prefix)):
            shape, dtype = saved[name]
            if shape == parameter.shape:
                targets[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                targets[name] = torch.zeros(shape, dtype=dtype)
    return targets


def restore_optimizer(
    index: int, optimizer: torch.optim.Optimizer, names: dict, tensors: dict[str, Tensor], plain: dict
) -> None:
    """Put loaded state in place; the kernels (fused, foreach) stay those of the machine at hand."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    position = 0
    for group, saved in zip(optimizer.param_groups, plain["groups"], strict=True):
        members = []
        for parameter in group["params"]:
            prefix = f"{names[parameter]}."
            found = _under(f"optimizers.{index}.{prefix}", tensors) | _under(prefix, plain["values"])
            if found:
                state[position] = found
            members.append(position)
            position += 1
        groups.append({**group, **_as_before(group, saved), "params": members})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _under(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {
        k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix) and "." not in k[len(prefix) :]
    }


def _as_before(group: dict, saved: dict) -> dict:
    """Give values from JSON the types they had: it has no tuples."""
    return {k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in saved.items()}


def split_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Move the tensors inside nested dicts and lists to `tensors`, leaving their names in place."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"items": [[key, split_tensors(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [split_tensors(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"{name} holds a {type(value).__name__}: a checkpoint keeps tensors, numbers, text, lists and dicts"
    )


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
