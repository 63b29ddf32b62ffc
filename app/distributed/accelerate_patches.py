"""Every touch of accelerate's private parts, and of torch's that accelerate's engines are made of.

Each says the version that it was written for, and tests/test_patches.py says when one of them has moved.
"""

import datetime
import functools

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs, ParallelismConfig
from accelerate.utils import imports as accelerate_imports
from torch import Tensor, nn


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


def settle_buckets(model: nn.parallel.DistributedDataParallel) -> None:
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
