"""What a model of transformers keeps of its blocks for the backward pass, and what it computes there again."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from app.distributed import environment
from app.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ActivationCheckpointing = Literal["none", "block", "ops", "offload"]
CHECKPOINTING_HELP = (
    "What the blocks of the model compute again in the backward pass, to need less memory. block: all but what goes "
    "into each block. ops: all but that and matrix products. offload: as block, and what is kept lies in the host's "
    "memory. No bit changes."
)
_aten = torch.ops.aten
# Products with weights, and fused attention. Products in attention that is not fused are computed again: they are as
# large as the square of the length, and cheap next to those with weights.
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._flash_attention_forward.default,
}


def checkpoint_activations(model: "PreTrainedModel", how: ActivationCheckpointing) -> None:
    """Have the blocks of a model compute activations again in the backward pass; no bit of a run changes.

    Args:
        how: none. block: keep what goes into each block. ops: keep matrix products too. offload: as block, with what is
            kept in the host's memory.

    Raises:
        UserError: the model has no such blocks, or the profile asks for it too.
    """
    if how == "none":
        return
    if environment.is_on("FSDP_ACTIVATION_CHECKPOINTING"):
        raise UserError(
            f"--activation-checkpointing {how}: the profile's fsdp_activation_checkpointing computes blocks again too: "
            "leave out one of the two"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "ops":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # transformers 5.17 knows only the older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable(options)
    except ValueError as error:
        raise UserError(
            f"--activation-checkpointing {how}: {error} Leave the flag out, or take an fsdp profile"
        ) from None
    if how == "offload":
        for module in model.modules():
            # transformers 5.17 to 5.23 gives each block the function that calls it.
            block = cast(Any, module)
            if "_gradient_checkpointing_func" in vars(module):
                block._gradient_checkpointing_func = partial(_offloaded, block._gradient_checkpointing_func)


def _policy(_context: Any, operation: Any, *args: Any, **more: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _offloaded(checkpointed: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """Call a block; what it keeps of its inputs lies in the host's memory until the backward pass."""
    with saved_tensors_hooks(_to_host, _to_device):
        return checkpointed(function, *args)


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    # From a GPU, this copies to pinned memory and does not wait. What is on a CPU stays where it is.
    return tensor.device, tensor.to("cpu", non_blocking=True)


def _to_device(moved: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = moved
    return tensor.to(device, non_blocking=True)
