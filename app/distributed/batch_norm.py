"""BatchNorm, the one layer of torch whose results depend on how samples are spread over processes."""

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


def depends_on_layout(model: nn.Module, accelerator: Accelerator, config: RunConfig) -> list[str]:
    """Warn of a model whose results on another layout would differ, naming its first BatchNorm and SyncBatchNorm."""
    count, ranks = -(-config.global_batch // config.micro_batch), accelerator.data_ranks
    if count == 1:
        return []
    first: dict[bool, str] = {}
    for name, module in model.named_modules():
        if is_batch_norm(module):
            first.setdefault(isinstance(module, nn.SyncBatchNorm), name)
    notes = []
    if True in first:
        notes.append(
            f"warning: {first[True]} is a SyncBatchNorm: it takes statistics of the {ranks} of {count} micro-batches "
            "that are computed at a time, so losses and scores depend on the number of processes"
        )
    if False in first:
        share = "all" if ranks == 1 else f"the main process's {-(-count // ranks)} of"
        notes.append(
            f"warning: {first[False]} is a BatchNorm: each micro-batch is normalised by itself, and running statistics "
            f"are those of {share} {count} micro-batches of a step, so scores (not losses) depend on the number of "
            "processes; with GroupNorm or LayerNorm nothing does"
        )
    return notes
