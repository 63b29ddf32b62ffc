"""FSDP2 as a profile asks for it: its settings, and the layers to shard one by one."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.tensor import DTensor

from app.distributed import naming
from app.distributed.environment import gpus_here, is_main_process
from app.distributed.supported import SHARDING
from app.errors import UserError

ENDS = ("get_input_embeddings", "get_output_embeddings")


def read_plugin() -> FullyShardedDataParallelPlugin:
    """Read the profile's FSDP settings as FSDP2 settings."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    if os.environ.get("FSDP_VERSION", "1") != "2":
        keep_sharded = SHARDING[os.environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()]
        os.environ |= {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": str(keep_sharded).lower()}
    os.environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"
    os.environ.pop("FSDP_BACKWARD_PREFETCH", None)
    if not gpus_here():
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    plugin = FullyShardedDataParallelPlugin()
    # Autocast chooses the type to compute in, as under DDP; weights are gathered and gradients reduced in their own.
    plugin.mixed_precision_policy = MixedPrecisionPolicy()
    if offloads(plugin) and not gpus_here():
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # memory is pinned for a GPU
    return plugin


def offloads(plugin: FullyShardedDataParallelPlugin) -> bool:
    """Tell whether shards are kept in the host's memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return isinstance(plugin.cpu_offload, CPUOffloadPolicy)


def check_optimizer(optimizer: torch.optim.Optimizer, on_host: bool = False) -> None:
    """Refuse an optimizer that needs whole weights, and so fails on shards (torch 2.13) in its first step.

    Args:
        on_host: whether shards are kept in the host's memory.

    Raises:
        UserError: it does; or it gathers them itself, which it cannot on the host.
    """
    if on_host and getattr(optimizer, "gathers", False):
        raise UserError(
            f"--optim.name {type(optimizer).__name__} gathers weights for their update, which fsdp_offload_params "
            "keeps on the host: take AdamW or AdamW8bit, or a profile without offload"
        )
    if optimizer.state:
        raise UserError(
            f"{type(optimizer).__name__} keeps numbers about weights from the moment it is made, before FSDP2 or "
            "tp_size makes shards of them: take AdamW or SGD, for example, or a profile with neither"
        )
    if type(optimizer) is torch.optim.Rprop:
        raise UserError(
            "--optim.name Rprop does not work on shards, and FSDP2 or tp_size make some: take AdamW or SGD, for "
            "example, or a profile with neither"
        )
    if type(optimizer) is torch.optim.Adafactor:
        raise UserError(
            "torch.optim.Adafactor works on whole weights, which FSDP2 shards and tp_size splits: give run.prepare "
            "settings with the name Adafactor, which gathers them, or take a profile with neither"
        )


def check_split(optimizer: torch.optim.Optimizer, cuts: dict[nn.Parameter, int], parts: int) -> None:
    """Refuse an optimizer that can work on parts of weights, but not on these.

    Args:
        cuts: the dimension along which tensor parallelism cuts each weight.
        parts: into how many.
    """
    if check := getattr(optimizer, "check_split", None):  # one of ours
        check(cuts, parts)


def name_layers(plugin: FullyShardedDataParallelPlugin, asked: set[str], model: nn.Module) -> None:
    """Tell FSDP2 which layer classes to shard one by one, as `layer_classes` chooses them.

    Args:
        asked: classes that the profile names.

    Raises:
        UserError: the model has no such class.
    """
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    if plugin.auto_wrap_policy is not transformer_auto_wrap_policy:
        return
    present = {type(module).__name__ for module in model.modules()}
    if asked - present:
        raise UserError(
            f"fsdp_transformer_layer_cls_to_wrap {', '.join(sorted(asked - present))}: the model has no such class; "
            f"it has {', '.join(sorted(present))}"
        )
    layers = layer_classes(model, asked)
    if not layers and is_main_process():
        print(
            "warning: FSDP found no repeated layers in this model, so it is sharded as one piece and gathered whole; "
            "name its layer classes in the profile's fsdp_transformer_layer_cls_to_wrap",
            file=sys.stderr,
        )
    plugin.transformer_cls_names_to_wrap = sorted(layers)


def layer_classes(model: nn.Module, asked: set[str]) -> set[str]:
    """Choose layer classes to shard one by one: those asked for, else the model's own list, else repeated layers."""
    layers = asked or set(getattr(model, "_no_split_modules", None) or ())
    layers = layers & {type(module).__name__ for module in model.modules()}
    if not layers:
        stacks = (Counter(type(layer).__name__ for layer in m) for m in model.modules() if isinstance(m, nn.ModuleList))
        layers = {name for stack in stacks for name, count in stack.items() if count > 1}
    return layers - _around_embeddings(model)


@contextmanager
def shared_weights_kept(model: nn.Module) -> Iterator[None]:
    """Refuse if the block splits a weight that modules share, as torch 2.13 does if they are in two FSDP groups.

    It splits it in silence; but if the modules that share it are one and the same, it fails.
    """
    before = naming.shared_names(model)
    try:
        yield
    except TypeError:
        (plain,) = naming.plain([model])
        split = [name for name in before if isinstance(plain.get_parameter(name), DTensor)]
        if not split:
            raise
        lost = split
    else:
        after = naming.shared_names(model)
        lost = [name for name in before if name not in after]
    if lost:
        raise UserError(
            f"FSDP would train {lost[0]} and {before[lost[0]]}, which are one weight, as two: let "
            "fsdp_transformer_layer_cls_to_wrap in the profile name classes of which none holds one of them, or set "
            "fsdp_auto_wrap_policy: NO_WRAP; on GPUs a model without tie_weights also needs "
            "fsdp_cpu_ram_efficient_loading: false"
        )


def gather_to_generate(model: Any) -> None:
    """Have FSDP2 gather the outermost weights of a model with adapters while it generates.

    Its generate calls the model inside it, past the forward pass at which FSDP2 gathers them.
    """
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    if isinstance(model, FSDPModule) and hasattr(model, "peft_config"):
        register_fsdp_forward_method(cast(nn.Module, model), "generate")


@contextmanager
def embeddings_known(model: nn.Module) -> Iterator[None]:
    """Have a model return None for embeddings that accelerate 1.15 should not ask for.

    It may have none, and transformers 5.23 would raise. Or they share a weight with another module, as BERT's last
    layer does its bias: accelerate would shard them apart, so they stay with the rest of the model.
    """
    silenced = [name for name in ENDS if _raises(model, name)]
    if not silenced and _shared_elsewhere(model):
        silenced = [*ENDS]
    for name in silenced:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in silenced:
            delattr(model, name)


def _shared_elsewhere(model: nn.Module) -> bool:
    """Tell whether a module other than the embeddings, at both ends of a model, holds one of their weights."""
    ends = [end for name in ENDS if (end := getattr(model, name, lambda: None)()) is not None]
    inside = {module for end in ends for module in end.modules()}
    held = {parameter for end in ends for parameter in end.parameters()}
    others = (module for module in model.modules() if module not in inside)
    return any(parameter in held for module in others for parameter in module.parameters(recurse=False))


def _raises(model: nn.Module, name: str) -> bool:
    try:
        getattr(model, name, lambda: None)()
    except NotImplementedError:
        return True
    return False


def _around_embeddings(model: nn.Module) -> set[str]:
    """Find the classes that contain an embedding, which accelerate 1.15 shards by itself; twice would be an error."""
    asked = [name for name in ENDS if not _raises(model, name)]
    ends = [getattr(model, name, lambda: None)() for name in asked]
    return {
        type(module).__name__
        for module in model.modules()
        if any(inner is end for inner in list(module.modules())[1:] for end in ends if end is not None)
    }
