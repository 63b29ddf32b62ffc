"""Large models that rank 0 alone makes, where weights are sharded or split: the other ranks get them one by one.

On those, a parameter has its shape from the beginning, and memory that is not touched, so that the machine does not
spend any. It gets its contents from rank 0 just before it is cut, and afterwards only the rank's own part stays.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.distributed import collectives, environment

LARGE = 2**30  # bytes of weights, from which on a model is made once
_ON_RANK_0 = "on_rank_0"  # the attribute of a parameter whose contents only rank 0 has
M = TypeVar("M", bound=nn.Module)


class _Rest(NamedTuple):
    """What other ranks get at once: all but parameters."""

    training: bool
    buffers: dict[str, Tensor]
    generation: Any
    random_state: Tensor


def make(build: Callable[[], M], shapes: Callable[[], M]) -> M:
    """Make a model: on every rank, or, if it is large and its weights will be cut, on rank 0. Every rank takes part.

    All ranks draw the same random numbers afterwards, wherever it was made.

    Args:
        build: makes it.
        shapes: makes it on torch's meta device.
    """
    if collectives.alone() or not _cuts_weights():
        return build()
    with torch.random.fork_rng(devices=[]):
        hollow = shapes()
    if sum(p.nbytes for p in hollow.parameters()) < LARGE:
        return build()
    made: list[M] = []

    def on_rank_0() -> _Rest:
        made.append(build())
        generation = getattr(made[0], "generation_config", None)
        return _Rest(made[0].training, dict(made[0].named_buffers()), generation, torch.get_rng_state())

    rest = collectives.from_main(on_rank_0, long=True)
    if not made:
        made.append(_with_memory(hollow, rest))
        torch.set_rng_state(rest.random_state)
    for parameter in made[0].parameters():
        setattr(parameter, _ON_RANK_0, True)
    return made[0]


def fill(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Give parameters that only rank 0 has the contents of their contents; return those. Every rank takes part."""
    only_on_rank_0 = [parameter for parameter in dict.fromkeys(parameters) if hasattr(parameter, _ON_RANK_0)]
    for parameter in only_on_rank_0:
        delattr(parameter, _ON_RANK_0)
        dist.broadcast(parameter.data, 0, group=collectives.background())  # its tensors are on the CPU
    return only_on_rank_0


def _cuts_weights() -> bool:
    """Tell whether the profile has ranks keep parts of weights."""
    sharded = environment.is_on("ACCELERATE_USE_FSDP")
    return sharded or int(os.environ.get("PARALLELISM_CONFIG_TP_SIZE", "1")) > 1


def _with_memory(hollow: M, rest: _Rest) -> M:
    """Give a model on the meta device memory for its parameters, which nobody touches, and the rest of rank 0's."""
    model = hollow.to_empty(device="cpu").train(rest.training)
    if tie := getattr(model, "tie_weights", None):  # a weight that modules share has become several
        tie()
    for name, buffer in rest.buffers.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, buffer)
    if rest.generation is not None:
        cast(Any, model).generation_config = rest.generation
    return model
