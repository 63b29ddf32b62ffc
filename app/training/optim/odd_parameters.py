"""Parameters that few models have, and some layouts cannot train: what to do about each is said before anything is."""

import re
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from app.distributed.fsdp_calls import is_sharded, own_parameters
from app.errors import UserError


class Where(NamedTuple):
    """Where parameters are to be trained."""

    processes: int
    sharded: bool
    """Whether FSDP2 shards them."""
    exact: bool


class Oddity(NamedTuple):
    """A kind of parameter."""

    has: Callable[[nn.Parameter], bool]
    where: Callable[[Where], bool]
    """Tells where it cannot be trained."""
    advice: str
    """What is the matter, and what to do; `{shape}` is that of the parameter."""


_SPARSE = re.compile("sparse gradient|SparseTensorImpl|'Sparse(CPU|CUDA)'")


def _is_dense(parameter: nn.Parameter) -> bool:
    """Tell whether the numbers lie side by side in memory, in some order of dimensions; kernels of optimizers ask."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and step != expected and parameter.numel():
            return False
        expected *= size
    return True


# In this order: what has a later oddity may not be asked for it where it has an earlier one.
ODDITIES = (
    Oddity(
        lambda p: isinstance(p, UninitializedParameter),
        lambda where: where.processes > 1 or where.exact,
        "has no size yet: pass one row through the model before run.prepare, or take a layer that is not lazy",
    ),
    Oddity(
        lambda p: p.requires_grad and not _is_dense(p),
        lambda where: True,
        "of shape {shape} has gaps or repetitions in memory, which optimizers update wrongly: give it memory of its "
        "own before run.prepare, as in nn.Parameter(weight.contiguous())",
    ),
    Oddity(
        lambda p: p.requires_grad and p.is_complex(),
        lambda where: where.exact or where.sharded,
        "is complex, which --run.exact does not round and FSDP2 does not gather with real ones: hold its real view "
        "(torch.view_as_real), and use torch.view_as_complex in the forward pass",
    ),
    Oddity(
        lambda p: not p.ndim,
        lambda where: where.sharded,
        "has no dimensions, and FSDP2 cannot shard it: give it the shape (1,), as in torch.ones(1)",
    ),
    Oddity(
        lambda p: p.requires_grad and not p.numel(),
        lambda where: where.sharded,
        "has the shape {shape}, without a number in it, which FSDP2 cannot sum: leave it out, or freeze it "
        "(requires_grad_(False))",
    ),
    Oddity(
        lambda p: not p.is_contiguous(),
        lambda where: where.sharded,
        "of shape {shape} does not lie in memory row by row, as FSDP2 needs: make it contiguous before run.prepare "
        "(nn.Parameter(weight.contiguous()); for channels_last, model.to(memory_format=torch.contiguous_format))",
    ),
)


def check(model: nn.Module, where: Where) -> None:
    """Refuse what cannot be trained there.

    Raises:
        UserError: the model has it; it names the parameter, or the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UserError(
                f"{name or 'the model'} is {_article(module)} with sparse=True, whose gradients are sparse: nothing "
                "here sums or clips those; use sparse=False"
            )
    for name, parameter in model.named_parameters():
        for oddity in ODDITIES:
            if oddity.has(parameter):
                if oddity.where(where):
                    raise UserError(f"the parameter {name} {oddity.advice.format(shape=_shape(parameter))}")
                break
    _check_buffers(model, where)


def _check_buffers(model: nn.Module, where: Where) -> None:
    """Refuse buffers that no checkpoint can hold, or that DDP cannot send to the other processes."""
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if buffer.layout == torch.strided:
            continue
        if where.processes > 1 and not where.sharded:
            raise UserError(
                f"the buffer {name} is sparse, which DDP cannot send to other processes: register its indices and its "
                "values, and build the sparse tensor of them in the forward pass"
            )
        if name in saved:
            raise UserError(
                f"the buffer {name} is sparse, which no checkpoint can hold: register it with persistent=False"
            )


def give_memory(model: nn.Module) -> None:
    """Give buffers memory of their own that have one number in several places of it, as torch can write none such."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_lazy(buffer) or buffer.layout != torch.strided:
                continue
            if any(not step and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)):
                setattr(module, name, buffer.contiguous())


def check_layers(model: nn.Module) -> None:
    """Refuse a layer that FSDP2 has sharded and cannot gather or reduce: its weights have several types.

    Raises:
        UserError: there is one; it names a parameter of each type.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for module in filter(is_sharded, model.modules()):
        first: dict[torch.dtype, str] = {}
        for parameter in _own(module):
            if parameter.requires_grad:
                first.setdefault(parameter.dtype, names[parameter])
        if len(first) > 1:
            told = " and ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in first.items())
            raise UserError(
                f"{told} have different types, and FSDP2 shards them together: give all trained weights one type "
                "before run.prepare, as in model.float()"
            )


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return (p for inner, name in own_parameters(module) if (p := inner._parameters[name]) is not None)


def _shape(parameter: nn.Parameter) -> str:
    return "" if isinstance(parameter, UninitializedParameter) else str(tuple(parameter.shape))


def _article(module: nn.Module) -> str:
    kind = type(module).__name__
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def explained(error: BaseException | None) -> UserError | None:
    """Return advice for a sparse gradient of a weight that no module says it of; None for other errors."""
    if not isinstance(error, RuntimeError) or not _SPARSE.search(str(error)):  # NotImplementedError is one too
        return None
    # A model's own operations on sparse tensors are another matter.
    calls = (frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__))
    if not {"CurrentStep.backward", "Updates.make"}.intersection(calls):
        return None
    return UserError(
        "a gradient is sparse, and nothing here sums or clips those: leave out sparse=True, as of "
        "torch.nn.functional.embedding and embedding_bag"
    )
