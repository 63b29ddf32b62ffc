"""torch.compile of a model's repeated blocks, each by itself: every layout runs the same graphs.

Compiled as a whole, a model is cut into other graphs by DDP's buckets and by FSDP2's hooks. Here the forward method of
each block is compiled, inside all hooks, and all blocks of a class share one graph.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from accelerate.utils.other import is_repeated_blocks
from torch import nn

from app.errors import UserError

# Shapes of a block's inputs that may be compiled apart. torch's own limit is 8, beyond which it stops compiling.
MOST_SHAPES = 512


def is_asked_for(plugin: TorchDynamoPlugin) -> bool:
    """Tell whether the profile compiles by region."""
    return plugin.backend != DynamoBackend.NO and bool(plugin.use_regional_compilation)


def compile_blocks(model: nn.Module, options: dict[str, Any]) -> None:
    """Compile the forward method of each repeated block; names of weights stay.

    Args:
        options: of torch.compile.

    Raises:
        UserError: the model has no repeated blocks.
    """
    blocks = list(_blocks(model))
    if not blocks:
        raise UserError(
            f"dynamo_use_regional_compilation in the profile: {type(model).__name__} has no list of blocks of one "
            "class (nn.ModuleList): without it in dynamo_config the model is compiled as a whole, which --run.exact "
            "refuses"
        )
    for block in blocks:
        block.forward = CompiledForward(block, torch.compile(block.forward, **options))


def compiled(function: Callable[..., Any], plugin: TorchDynamoPlugin) -> Callable[..., Any]:
    """Return a function of tensors compiled, if the profile compiles by region; otherwise as it is."""
    return torch.compile(function, **options_of(plugin)) if is_asked_for(plugin) else function


def options_of(plugin: TorchDynamoPlugin) -> dict[str, Any]:
    """Return the options of torch.compile that the profile asks for."""
    return plugin.to_kwargs() | {"dynamic": plugin.dynamic}


class CompiledForward:
    """A block's compiled forward method. A copy of the block, such as an average of its weights, gets the plain one."""

    def __init__(self, block: nn.Module, compiled: Callable[..., Any]):
        self.block, self.compiled = block, compiled
        functools.update_wrapper(self, compiled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def __deepcopy__(self, copies: dict[int, Any]) -> Any:
        return _plain_forward(copies[id(self.block)])  # where blocks are copied, before what they hold

    def __reduce__(self) -> tuple:
        return _plain_forward, (self.block,)


def _plain_forward(block: nn.Module) -> Any:
    return types.MethodType(type(block).forward, block)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of all lists of blocks, but for lists inside of blocks."""
    for child in module.children():
        if is_repeated_blocks(child):
            yield from child.children()
        else:
            yield from _blocks(child)


@contextmanager
def settings(plugin: TorchDynamoPlugin, exact: bool) -> Iterator[None]:
    """Set for a run what torch.compile depends on, and restore it after the block.

    Args:
        plugin: of the profile.
        exact: compile each shape by itself, so that its graph does not depend on the shapes that came before; choose
            kernels without measuring their speed; and refuse to go on without compiling.

    Raises:
        UserError: the profile has kernels chosen by their speed, and `exact`.
    """
    import torch._dynamo
    import torch._inductor.config

    if exact and "autotune" in plugin.mode:
        raise UserError(
            f"--run.exact: dynamo_mode {plugin.mode} in the profile chooses kernels by their speed, on each rank "
            "another one: take it out of dynamo_config"
        )
    # Its cache belongs to the code of a layer, not to a model: an earlier run in this process may have filled it.
    torch._dynamo.reset()
    before = plugin.dynamic
    # accelerate's launcher asks for fixed shapes where the profile says nothing.
    plugin.dynamic = False if exact else plugin.dynamic or None
    # DDP would cut the graph of a block at its buckets, which one process does not have.
    chosen = {"optimize_ddp": False, "recompile_limit": MOST_SHAPES, "accumulated_recompile_limit": 8 * MOST_SHAPES}
    try:
        kernels = torch._inductor.config.patch(deterministic=exact or torch._inductor.config.deterministic)
        with kernels, torch._dynamo.config.patch(chosen | {"fail_on_recompile_limit_hit": exact}):
            yield
    finally:
        plugin.dynamic = before
