"""Weights that a run never changes: the model under adapters. Checkpoints hold their digest instead of them."""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.distributed import naming
from app.distributed.desync import bits_of
from app.errors import UserError
from app.sampling.hashing import hash_of

_AT_ONCE = 2**24  # numbers that are summed together: 128 MiB of products
_digests: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def names(models: list[nn.Module]) -> set[str]:
    """Return the checkpoint names of the weights under adapters of peft, which its users load from elsewhere."""
    return {naming.in_plain_model(i, n) for i, model in enumerate(naming.plain(models)) for n, _ in _under(model)}


def parameters(models: list[nn.Module]) -> set[Tensor]:
    """Return the weights under adapters of peft."""
    return {parameter for model in naming.plain(models) for _, parameter in _under(model)}


def _under(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    if hasattr(model, "peft_config"):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad and "lora_" not in name and "modules_to_save" not in name:
                yield name, parameter


def leave_out(tensors: dict[str, Tensor], models: list[nn.Module]) -> None:
    """Take the weights under adapters out of tensors by their checkpoint names, and what packed ones keep by theirs."""
    base_names = names(models)
    packed = tuple(f"{name}." for name in base_names)  # scales and codes of bitsandbytes
    for name in [name for name in tensors if name in base_names or name.startswith(packed)]:
        del tensors[name]


def remember(model: nn.Module) -> None:
    """Digest the weights under adapters now, as checkpoints describe them, before they are packed into fewer bits."""
    _digest(model)


def describe(models: list[nn.Module]) -> dict[str, Any]:
    """Return what a checkpoint says of the weights under adapters. Every rank takes part, once in a run.

    Returns:
        Their digest, and where they are from; empty if there are none.
    """
    with_base = [model for model in naming.plain(models) if names([model])]
    if not with_base:
        return {}
    sources = [getattr(each, "base_model_name_or_path", None) for m in with_base for each in _configs(m)]
    return {"digests": [_digest(model) for model in with_base], "from": [source or "" for source in sources]}


def check(models: list[nn.Module], said: dict[str, Any], folder: str) -> None:
    """Refuse to put adapters on another model than the one that they were trained on. Every rank takes part.

    Args:
        said: what `describe` returned for the checkpoint.

    Raises:
        UserError: the weights here are others.
    """
    if describe(models).get("digests") != said["digests"]:
        before = ", ".join(filter(None, said["from"])) or "built in code"
        raise UserError(
            f"{folder} has adapters of a model ({before}) whose weights were others than those here: load the "
            "model that training began with (--model of a recipe), because adapters are saved without it"
        )


def _configs(model: nn.Module) -> list[Any]:
    config_by_adapter: Any = model.peft_config
    return list(config_by_adapter.values())


def _digest(model: nn.Module) -> str:
    """Digest the weights of the model under adapters, the same on every layout."""
    if model not in _digests:
        base_names, described = names([model]), []
        for name, parameter in sorted(model.named_parameters()):
            if (plain_name := naming.in_plain_model(0, name)) in base_names:
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                described.append([plain_name, str(whole.dtype), list(whole.shape), *_sums(whole.detach())])
        _digests[model] = hash_of(described)
    return _digests[model]


def _sums(tensor: Tensor) -> list[int]:
    """Return sums of a tensor's bits, and of the bits times their places; modulo 2**64. Waits for the device."""
    flat = bits_of(tensor)
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE].long()
        places = torch.arange(start, start + len(part), device=flat.device)
        total += torch.stack([part.sum(), (part * (2 * places + 1)).sum()])
    return total.tolist()
