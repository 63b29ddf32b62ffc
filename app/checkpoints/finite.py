"""Numbers that are not finite: no checkpoint and no finished model has one that training made, in any tensor."""

from collections.abc import Callable, Iterable

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from app.distributed import collectives, naming
from app.distributed.accelerator import Accelerator
from app.distributed.naming import local_shard
from app.distributed.state import sharded, state_dict
from app.errors import UserError
from app.launching import program

Kinds = dict[str, list[str]]
"""By a tensor's name in checkpoints, which numbers it may have that are not finite: nan, inf, -inf."""


def constants(models: list[nn.Module]) -> Kinds:
    """Find the buffers and frozen weights that are not finite before training, such as masks with -inf.

    They may keep numbers of these kinds. Every rank takes part.
    """
    trained = {name for p, name in naming.parameter_names(models).items() if p.requires_grad}
    tensors = {n: tensor for n, tensor in state_dict.model_tensors(models)[0].items() if n not in trained}
    kinds_by_name: Kinds = {}
    for of_rank in collectives.gather(_kinds(tensors)):
        for name, kinds in of_rank.items():
            kinds_by_name[name] = sorted({*kinds_by_name.get(name, []), *kinds})
    return kinds_by_name


def check_state(accelerator: Accelerator, step: int, allowed: Kinds, checkpoints: Callable[[], str]) -> None:
    """Refuse to save a state in which a tensor is not finite on any rank. Every rank takes part, and waits once.

    Args:
        allowed: what `constants` found before the first step.
        checkpoints: says which checkpoints there are.

    Raises:
        UserError: on every rank; it names the tensor.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # which hides the rest
        tensors = {name: tensor for tensor, name in naming.tensor_names(accelerator.models).items()}
    else:
        tensors, _ = sharded.collect(accelerator)
    trained = {name for p, name in naming.parameter_names(accelerator.models).items() if p.requires_grad}
    if (first := _first(tensors, allowed)) is None:
        return
    name, kinds = first
    if name in trained:
        raise UserError(
            f"the weights after step {step} are not finite ({_shown(name)}), and were not saved; {checkpoints()}: "
            "repeat the command with a lower --optim.lr (and --run.changed accept, where the run has a checkpoint)"
        )
    raise UserError(
        f"{_shown(name)} after step {step} has {' and '.join(kinds)} in it, and nothing of it was saved; "
        f"{checkpoints()}. Look at the samples since then and at what the model computes it from; --run.nonfinite skip "
        "leaves steps out whose gradient is not finite, with all that they changed"
    )


def check_model(accelerator: Accelerator, model: nn.Module, allowed: Kinds | None, checkpoints: str) -> None:
    """Refuse to write a model in which a tensor is not finite on any rank. Every rank takes part.

    Args:
        allowed: what `constants` found when its run began; None: not known, so any buffer may have infinities.
        checkpoints: says which checkpoints there are.

    Raises:
        UserError: on every rank; it names the tensor.
    """
    (plain,) = naming.plain([model])
    place = next((i for i, each in enumerate(naming.plain(accelerator.models)) if each is plain), 0)
    tensors = {f"models.{place}.{n.split('.', 2)[2]}": t for n, t in state_dict.model_tensors([model])[0].items()}
    if allowed is None:
        weights = {naming.in_plain_model(place, name) for name, _ in plain.named_parameters(remove_duplicate=False)}
        allowed = {name: ["-inf", "inf"] for name in tensors.keys() - weights}
    if first := _first(tensors, allowed):
        raise UserError(
            f"the model is not written: {_shown(first[0])} has {' and '.join(first[1])} in it; {checkpoints}. Take an "
            f"earlier checkpoint ({program.typed('export RUN --step N')}), or train with a lower --optim.lr"
        )


def _first(tensors: dict[str, Tensor], allowed: Kinds) -> tuple[str, list[str]] | None:
    """Return the first tensor with a number that is not allowed on any rank, and the kinds of them."""
    refused = ((n, sorted(set(kinds) - {*allowed.get(n, ())})) for n, kinds in _kinds(tensors).items())
    first_by_rank = collectives.gather(next((each for each in refused if each[1]), None))
    return next((each for each in first_by_rank if each), None)


def _kinds(tensors: dict[str, Tensor]) -> Kinds:
    """Find the tensors whose part on this rank is not finite; waits for each device once."""
    parts = {n: local_shard(t.detach()) for n, t in tensors.items() if t.is_floating_point() and not t.is_meta}
    # A sum is not finite if one of its terms is not, and takes a tenth of the time of checking each term.
    flags: dict[torch.device, list[Tensor]] = {}
    for part in parts.values():
        flags.setdefault(part.device, []).append(_summable(part).sum().isfinite())
    good = {device: iter(torch.stack(of_device).tolist()) for device, of_device in flags.items()}
    suspects = [name for name, part in parts.items() if not next(good[part.device])]
    return {name: kinds for name in suspects if (kinds := [*_kinds_in(_summable(parts[name]))])}


def _summable(part: Tensor) -> Tensor:
    return part.float() if part.element_size() == 1 else part  # torch cannot sum numbers of 8 bits


def _kinds_in(part: Tensor) -> Iterable[str]:
    mask_by_kind = {"nan": part.isnan(), "inf": part.isposinf(), "-inf": part.isneginf()}
    return (kind for kind, there in mask_by_kind.items() if bool(there.any()))


def _shown(name: str) -> str:
    """Write a tensor's name in a checkpoint for a user."""
    kind, _, rest = name.partition(".")
    if kind == "models":
        return name.removeprefix("models.0.")
    if kind == "averages":
        return f"the average of {_shown(rest)}"
    return name
