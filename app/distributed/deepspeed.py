"""Settings of DeepSpeed, whose engine clips and updates inside the backward pass."""

import warnings

import torch
from accelerate.utils import DeepSpeedPlugin, DistributedType

from app.errors import UserError

# What a run may ask for and DeepSpeed cannot do, by its flag, with the reason and what to take.
_LACKS = {
    "--ema": "DeepSpeed's engine keeps the weights to itself: take an fsdp profile instead",
    "--run.audit": "DeepSpeed's engine keeps the weights to itself; use an fsdp or ddp profile",
    "--run.dir in a bucket": "DeepSpeed's engine reads its checkpoints from a disk; use an fsdp or ddp profile",
    "--run.inspect-every": "DeepSpeed's engine keeps gradients to itself; use an fsdp or ddp profile",
    "--data.bad skip": "no sample of a step can be read, and DeepSpeed's engine updates in its backward pass, so the "
    "step cannot be left out; use an fsdp or ddp profile, or put good copies of the shards in their place",
    "--run.nonfinite skip": "DeepSpeed's engine updates in its backward pass, so no step can be left out; use an fsdp "
    "or ddp profile",
}


def refuse(flag: str, kind: str) -> None:
    """Refuse what a flag asks for, under DeepSpeed.

    Args:
        kind: the accelerator's distributed_type.

    Raises:
        UserError: it is DeepSpeed.
    """
    if kind == DistributedType.DEEPSPEED:
        raise UserError(f"{flag}: {_LACKS[flag]}")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of ours that treats matrices by rows: DeepSpeed gives it one long vector.

    Raises:
        UserError: it is one.
    """
    if hasattr(optimizer, "begin"):
        raise UserError(
            f"--optim.name {type(optimizer).__name__} works by rows, which DeepSpeed flattens: take a ddp or fsdp "
            "profile, or AdamW with --optim.updates plain"
        )


def configure(plugin: DeepSpeedPlugin, clip: float, models: int) -> None:
    """Complete the settings of DeepSpeed before it prepares a model.

    Args:
        clip: largest norm of the gradient; 0 for no clipping.
        models: how many were prepared before this one.
    """
    if models:
        raise UserError("DeepSpeed's engine takes one model in a run: for several use an fsdp or ddp profile")
    config = plugin.deepspeed_config
    # It requires a batch size if no loader is prepared. Batches are ours, so its value has no effect.
    config.pop("train_batch_size", None)
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": clip}
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True  # for exporting the model
    # DeepSpeed 0.19 calls, at every step, functions that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
