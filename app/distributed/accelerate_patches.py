"""Every use of private parts of accelerate, and of DDP, FSDP2, DTensor and the process groups under it.

Each function names the versions that it was written for. tests/test_patches.py has a canary for each private name, and
a list of the private names that other modules of app use, such as those of torch.serialization.
"""

import datetime
import functools
import re
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs, ParallelismConfig
from accelerate.utils import imports as accelerate_imports
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Prepared(NamedTuple):
    """What accelerate has taken over of a run, in the order in which it was given."""

    models: list[nn.Module]
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[Any]
    registered: list[Any]


def prepared(accelerator: Accelerator) -> Prepared:
    """Return what `prepare` and `register_for_checkpointing` of accelerate 1.15 were given, as it is wrapped."""
    return Prepared(accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._custom_objects)


def remember_packages() -> None:
    """Have accelerate 1.15 look once for each optional package, and not on disk at each backward pass and update."""
    found = accelerate_imports._is_package_available
    if not hasattr(found, "cache_info"):
        accelerate_imports._is_package_available = functools.cache(found)


def process_group(timeout: datetime.timedelta, device: torch.device | None) -> InitProcessGroupKwargs:
    """Describe the process group; with a device, NCCL connects at once and never asks which device is meant.

    accelerate 1.15 knows such handlers by their very class, which lacks `device_id`, and hands on what they give.
    """
    group = InitProcessGroupKwargs(timeout=timeout)
    given = group.to_kwargs() | ({"device_id": device} if device is not None else {})
    group.to_kwargs = lambda: given
    return group


def keep_fsdp(state: AcceleratorState) -> None:
    """Stay with FSDP on CPU ranks, where accelerate 1.15 turns it into DDP without a word."""
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def take_mesh(accelerator: Accelerator) -> None:
    """Make the mesh of processes that the profile asks for, which accelerate 1.15 would check before `keep_fsdp`."""
    accelerator.state.parallelism_config = ParallelismConfig()
    accelerator.state.device_mesh = accelerator.parallelism_config.get_device_mesh(accelerator.device.type)
    accelerator.parallelism_config._validate_accelerator(accelerator)


def clip_norm(accelerator: Accelerator, parameters: list[nn.Parameter], largest: float) -> Tensor:
    """Clip the gradients of any parameters, and return their norm before that, over all shards.

    The public clip_grad_norm_ of accelerate 1.15 wants all parameters of one model in their order.
    """
    norm = accelerator._clip_grad_norm_dtensor_aware(parameters, largest)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def fix_buckets(model: nn.parallel.DistributedDataParallel) -> None:
    """Make DDP (torch 2.11 to 2.13) arrange its buckets now.

    It does so after its first backward pass; sums over three or more ranks depend on the place in a bucket, so a
    resumed run's first step would differ in the last bit from the same step of a run that never stopped. One that looks
    for unused parameters keeps the buckets that it began with.
    """
    if model.find_unused_parameters:
        return
    model.reducer.prepare_for_backward([])
    total = sum((p * 0).sum() for p in model.module.parameters() if p.requires_grad)
    total.backward()
    model.reducer._rebuild_buckets()
    model.zero_grad(set_to_none=True)


def unreduced(model: nn.parallel.DistributedDataParallel) -> list[str] | None:
    """Name the parameters that a synchronising backward pass of DDP (torch 2.11 to 2.13) has not reached.

    Returns:
        None if it has reduced all gradients; empty if torch does not say which it has not.
    """
    try:
        model._check_reducer_finalized()
    except RuntimeError as error:
        names = [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]
        told = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        return [names[int(index)] for index in told[1].split()] if told else []
    return None


def start_fsdp(model: nn.Module) -> None:
    """Have a model under FSDP2 (torch 2.11 to 2.13) choose now what it would choose in its first forward pass.

    Among this is the type in which a layer's gradients are reduced.
    """
    cast("FSDPModule", model)._get_fsdp_state()._lazy_init()


def sharded_like(original: DTensor, shard: Tensor) -> DTensor:
    """Make a DTensor of this rank's shard, laid out as another one is, and leave the shard on its device.

    The public DTensor.from_local (torch 2.11 and 2.13) would move it to the device of the mesh.
    """
    return DTensor(shard, original._spec, requires_grad=False)


def forked_after_cuda() -> bool:
    """Tell whether this process was forked from one that had used a GPU (torch 2.11 to 2.13), so it cannot use any."""
    return torch.cuda._is_in_bad_fork()


def store() -> dist.Store:
    """Return the rendezvous store of the process group (torch 2.11 to 2.13)."""
    return dist.distributed_c10d._get_default_store()


def set_time_limit(limit: datetime.timedelta, without: dist.ProcessGroup | None) -> None:
    """Set the time limit of all process groups but one (torch 2.11 to 2.13)."""
    for group in dist.distributed_c10d._world.pg_map:
        if group is not without:
            dist.distributed_c10d._set_pg_timeout(limit, group)


def last_collectives() -> bytes:
    """Return what the flight recorder of torch 2.11 to 2.13 knows of this rank's last collectives, a pickle.

    NCCL keeps a record of its own, which knows its communicators too. A torch built with NCCL has both records.
    """
    recorder: Any = torch._C._distributed_c10d
    dump: Callable[[], bytes] = recorder._dump_fr_trace if dist.get_backend() == "gloo" else recorder._dump_nccl_trace
    return dump()


def complete(arguments: Namespace) -> Namespace:
    """Fill in, from its profile, what the arguments of `accelerate launch` leave open (accelerate 1.15)."""
    from accelerate.commands.launch import _validate_launch_command

    return _validate_launch_command(arguments)[0]
