"""BatchNorm, which normalises each micro-batch by itself, and SyncBatchNorm, which depends on the layout."""

from typing import NamedTuple

from torch import nn

from app.config import RunConfig
from app.distributed.accelerator import Accelerator
from app.errors import UserError


def is_batch_norm(module: nn.Module) -> bool:
    """Tell whether a module is a BatchNorm of any number of dimensions, a SyncBatchNorm included."""
    # torch 2.11 to 2.13 have no public name for what these classes have in common.
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def synchronised(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Turn a model's BatchNorm into SyncBatchNorm; the parameters stay the same objects.

    Raises:
        UserError: on CPU, where torch has no SyncBatchNorm.
    """
    if accelerator.device.type == "cpu":
        raise UserError(
            "--run.sync-bn: torch's SyncBatchNorm works on GPUs alone; on CPU leave out the flag, or use a model with "
            "GroupNorm or LayerNorm"
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


class Note(NamedTuple):
    """What the user is told of a model; a warning goes to standard error."""

    text: str
    warns: bool = False


def note(model: nn.Module, accelerator: Accelerator, config: RunConfig) -> Note | None:
    """Say what the first BatchNorm or SyncBatchNorm of a model means for the run; None where there is none."""
    count, ranks = -(-config.global_batch // config.micro_batch), accelerator.data_ranks
    first: dict[bool, str] = {}
    for name, module in model.named_modules():
        if is_batch_norm(module):
            first.setdefault(isinstance(module, nn.SyncBatchNorm), name)
    if True in first and count > 1:
        return Note(
            f"warning: {first[True]} is a SyncBatchNorm: it takes statistics of the {ranks} of {count} micro-batches "
            "that are computed at a time, so losses and scores depend on the number of processes",
            warns=True,
        )
    if False in first and count > 1:
        return Note(
            f"{first[False]} is a BatchNorm: each micro-batch is normalised by itself, so --run.micro-batch is part of "
            "the model"
        )
    return None
