"""Tell, by trying it on small weights, whether an optimizer of another package suits shards and checkpoints.

An optimizer that treats each number alone computes the same for the rows of a shard as for the whole weight. One that
looks at a whole weight or at all of them (norms, inverses, a step size that it finds itself), or that keeps its state
in blocks of numbers that cross rows, may not, and could differ under FSDP2 without a word.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from app.distributed.state import state_dict
from app.errors import UserError
from app.sampling.seeding import aside

# Rows that two and three ranks cut unevenly; blocks of 256 numbers that cuts cross, or do not; and many that fill no
# vector of up to 16.
_SHAPES = ((97, 113), (96, 128), (5, 7), *((count,) for count in range(17, 49)))
_STEPS, _RANKS = 4, (2, 3)
_FAR = 1e-3  # of an update: more than rounding

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def check(name: str, make: Make, device: torch.device, sharded: bool, exact: bool) -> None:
    """Try an optimizer.

    Args:
        name: as --optim.name gives it.
        make: makes one for some parameters.
        sharded: whether FSDP2 shards the weights of this run.
        exact: whether all layouts must compute the same bits.

    Raises:
        UserError: it cannot be right here; it names the optimizer.
    """
    with aside(device):
        try:
            start, whole, state = _train(make, device, 1)
            cut = [_train(make, device, ranks)[1] for ranks in _RANKS] if sharded else []
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"--optim.name {name} fails on small weights on {device.type}: {type(error).__name__}: {error}"
            ) from error
    _check_state(name, state, sharded)
    for joined in cut:
        same = all(torch.equal(a, b) for a, b in zip(whole, joined, strict=True))
        near = all(_near(*each) for each in zip(start, whole, joined, strict=True))
        if not near or (exact and not same):
            bits = " to the last bit, which --run.exact needs" if near else ""
            raise UserError(
                f"--optim.name {name} does not update shards as it updates whole weights{bits}: take a profile without "
                "FSDP, or another optimizer"
            )


def _near(start: Tensor, whole: Tensor, cut: Tensor) -> bool:
    return bool((whole - cut).abs().max() <= _FAR * (whole - start).abs().max())


def _check_state(name: str, state: dict[nn.Parameter, dict[str, Any]], sharded: bool) -> None:
    """Refuse state that checkpoints cannot keep, or that has no place in shards."""
    for parameter, values in state.items():
        tensors: dict[str, Tensor] = {}
        state_dict.split_tensors(values, f"--optim.name {name}: state", tensors)
        for place, tensor in tensors.items():
            if type(tensor) not in (Tensor, nn.Parameter):
                raise UserError(
                    f"{place} is a {type(tensor).__name__}: checkpoints keep plain tensors, so take another optimizer"
                )
            if sharded and tensor.numel() != 1 and tensor.shape != parameter.shape:
                raise UserError(
                    f"{place} has the shape {tuple(tensor.shape)} for a weight of {tuple(parameter.shape)}, and FSDP2 "
                    "shards only state of the weight's own shape: take a profile without FSDP, or another optimizer"
                )


def _train(make: Make, device: torch.device, ranks: int) -> tuple[list[Tensor], list[Tensor], dict]:
    """Train weights as ranks would that share their rows, each with an optimizer of its own.

    Returns:
        The whole weights before and after, and the state of the first optimizer.
    """
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=draw) for shape in _SHAPES]
    # Of many sizes, so that updates of any size change their last bits.
    start = [(weight * 10 ** (-5 * torch.rand(weight.shape, generator=draw))).to(device) for weight in start]
    shards = [[nn.Parameter(part.clone()) for part in parts] for parts in _of_ranks(start, ranks)]
    optimizers = [make(parameters) for parameters in shards]
    for optimizer in optimizers:
        if state_dict.switches(optimizer):
            cast(Any, optimizer).train()
    for step in range(_STEPS):
        whole = [(torch.randn(shape, generator=draw) * 10.0**-step).to(device) for shape in _SHAPES]
        for parameters, gradients, optimizer in zip(shards, _of_ranks(whole, ranks), optimizers, strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    after = [torch.cat([part.detach() for part in parts]) for parts in zip(*shards, strict=True)]
    return start, after, dict(optimizers[0].state)


def _of_ranks(tensors: list[Tensor], ranks: int) -> list[tuple[Tensor, ...]]:
    """Cut tensors along their rows, as FSDP2 does; return each rank's parts of all."""
    return list(zip(*(tensor.chunk(ranks) for tensor in tensors), strict=True))
