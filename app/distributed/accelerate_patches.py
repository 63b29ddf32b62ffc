"""Every use of private parts of accelerate, and of DDP, FSDP2, DTensor and the process groups under it.

Each function names the versions that it was written for. tests/distributed/test_patches.py has a canary for each
private name, and a list of the private names that other modules of app use, such as those of torch.serialization.
"""

import dataclasses
import datetime
import functools
import logging
import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
    is_available = accelerate_imports._is_package_available
    if not hasattr(is_available, "cache_info"):
        accelerate_imports._is_package_available = functools.cache(is_available)


def process_group(timeout: datetime.timedelta, device: torch.device | None) -> InitProcessGroupKwargs:
    """Describe the process group; with a device, NCCL connects at once and never asks which device is meant.

    accelerate 1.15 knows such handlers by their very class, which lacks `device_id`, and hands on what they give.
    """
    group = InitProcessGroupKwargs(timeout=timeout)
    settings = group.to_kwargs() | ({"device_id": device} if device is not None else {})
    group.to_kwargs = lambda: settings
    return group


def keep_fsdp(state: AcceleratorState) -> None:
    """Stay with FSDP on CPU ranks, where accelerate 1.15 turns it into DDP without a word."""
    if state.distributed_type == DistributedType.MULTI_CPU:
        _set_kind(state, DistributedType.FSDP)


def hide_mesh() -> ParallelismConfig | None:
    """Have accelerate 1.15 forget the mesh of this process's last run until `take_mesh`; return it, or None."""
    shared = AcceleratorState._shared_state
    mesh = shared.get("parallelism_config")
    if mesh is not None:
        shared["parallelism_config"] = None
    return mesh


def take_mesh(accelerator: Accelerator, last_mesh: ParallelismConfig | None) -> None:
    """Make the mesh of processes that the profile asks for, which accelerate 1.15 would refuse on CPU ranks.

    Args:
        last_mesh: of this process's last run, which had the same profile.
    """
    mesh = last_mesh or ParallelismConfig()
    accelerator.state.parallelism_config = mesh
    accelerator.state.device_mesh = mesh.get_device_mesh(accelerator.device.type)
    if accelerator.is_fsdp2:
        mesh._validate_accelerator(accelerator)


@contextmanager
def split_already(accelerator: Accelerator) -> Iterator[None]:
    """Have `prepare` of accelerate 1.15 leave tensor parallelism alone.

    It would want a model that transformers has split as it was loaded, and without FSDP2 it would wrap models on CPU
    ranks in DDP.
    """
    accelerator._prepare_tp = lambda *args: args
    state, fields_before = accelerator.state, {}
    if accelerator.distributed_type != DistributedType.FSDP and accelerator.parallelism_config:
        fields_before = {"distributed_type": state.distributed_type, "parallelism_config": state.parallelism_config}
        _set_kind(state, DistributedType.NO)
        state.parallelism_config = None
    try:
        yield
    finally:
        if fields_before:
            _set_kind(state, fields_before["distributed_type"])
            state.parallelism_config = fields_before["parallelism_config"]


def _set_kind(state: AcceleratorState, kind: DistributedType) -> None:
    """Set the kind of processes, also where accelerate 1.15 reads it again when it prepares for autocast."""
    state.distributed_type = PartialState._shared_state["distributed_type"] = kind


def quieten_meshes() -> None:
    """Silence what torch 2.13 warns of on each rank where FSDP2 shards split layers, and nobody can act on.

    accelerate 1.15 slices the mesh in a way that it wants to give up; norms over both dimensions take two sums, in the
    same order on all ranks; and split layers return views, which no model changes in place.
    """
    warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@contextmanager
def before_sharding(fill: Callable[[Iterable[nn.Parameter]], list[nn.Parameter]]) -> Iterator[None]:
    """Have `prepare` of accelerate 1.15 call a function with the parameters of modules just before it shards them.

    It imports FSDP2's `fully_shard` when it is called. The memory of the whole weights that the function returns is
    freed after they are sharded; accelerate would keep it until all are.
    """
    fsdp: Any = torch.distributed.fsdp
    shard = fsdp.fully_shard

    def filling(modules: Any, **kwargs: Any) -> Any:
        each = modules if isinstance(modules, list | tuple) else [modules]
        filled = fill(p for module in each for p in module.parameters() if not isinstance(p, DTensor))
        storages = [parameter.untyped_storage() for parameter in filled]
        result = shard(modules, **kwargs)
        for storage in storages:
            if storage.resizable():  # not a file's pages, which the system can free
                storage.resize_(0)
        return result

    fsdp.fully_shard = filling
    try:
        yield
    finally:
        fsdp.fully_shard = shard


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
    total = sum((p * 0).sum().real for p in model.module.parameters() if p.requires_grad)
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


@contextmanager
def before_backward(check: Callable[[Any], None]) -> Iterator[None]:
    """Have torch (2.11 to 2.13) pass what gradients are asked for to a function, before a backward pass in this block.

    That is what torch.autograd.grad, by whichever name it was imported, and Tensor.backward are given as inputs.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def checked(outputs: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        check(inputs)
        return run(outputs, gradients, keep, create, inputs, *args, **kwargs)

    autograd._engine_run_backward = checked
    try:
        yield
    finally:
        autograd._engine_run_backward = run


class _Watched:
    """FSDP2's gathering of a layer's weights (torch 2.11 to 2.13), which tells before it begins."""

    def __init__(self, gather: Any, tell: Callable[[str], None]):
        self.gather, self.tell = gather, tell

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Make room for the weights."""
        return self.gather.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.tell("gathers")
        return self.gather(*args, **kwargs)


def watch_fsdp(module: nn.Module, tell: Callable[[str], None]) -> None:
    """Have FSDP2 (torch 2.11 to 2.13) tell before it gathers a layer's weights, and before it reduces its gradients."""
    group: Any = cast("FSDPModule", module)._get_fsdp_state()._fsdp_param_group
    group._all_gather_comm = _Watched(group._all_gather_comm, tell)
    post_backward = group.post_backward

    def watched(*args: Any) -> None:
        present = [_has_gradient(parameter) for parameter in group.fsdp_params]
        if group.reduce_grads and any(present):
            trained = [parameter.sharded_param.requires_grad for parameter in group.fsdp_params]
            names = [parameter._param_fqn or "?" for parameter in group.fsdp_params]
            left = [n for n, there, needed in zip(names, present, trained, strict=True) if needed and not there]
            tell(f"reduces the gradients{' (but for ' * bool(left)}{', '.join(left)}{')' * bool(left)} of")
        post_backward(*args)

    group.post_backward = watched


def _has_gradient(parameter: Any) -> bool:
    """Tell whether FSDP2 (torch 2.11 to 2.13) will reduce a gradient of one of its parameters."""
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def take_gradients(module: nn.Module, reduce: bool) -> None:
    """Have FSDP2 (torch 2.11 to 2.13) take the gradients that a backward pass has left in a layer's whole weights.

    It would do so in the backward pass itself, as soon as the pass is through one of the layer's uses.

    Args:
        reduce: sum them over ranks now, with those of earlier micro-batches. Every rank takes part.
    """
    layer = cast("FSDPModule", module)
    group: Any = layer._get_fsdp_state()._fsdp_param_group
    if group is None:  # all its weights are in layers of its own
        return
    before = group._training_state
    for reduces in (False, True) if reduce else (False,):  # first, the last gradients are added to the earlier ones
        layer.set_requires_gradient_sync(reduces, recurse=False)
        group.post_backward()
    group._training_state = before
    group.finalize_backward()


def sharded_like(original: DTensor, shard: Tensor, shape: torch.Size | None = None) -> DTensor:
    """Make a DTensor of this rank's shard, laid out as another one is, and leave the shard on its device.

    The public DTensor.from_local (torch 2.11 and 2.13) would move it to the device of the mesh.

    Args:
        shape: of the whole, a matrix; default: that of the other one.
    """
    spec = original._spec
    if shape is not None and spec.tensor_meta is not None:
        whole = torch.empty(shape, dtype=shard.dtype, device="meta")
        described = spec.tensor_meta._replace(shape=shape, stride=whole.stride(), dtype=shard.dtype)
        spec = dataclasses.replace(spec, tensor_meta=described)
    return DTensor(shard, spec, requires_grad=False)


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
