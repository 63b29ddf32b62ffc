"""DeepSpeed, whose engine clips and updates inside the backward pass: told what a loop of our own needs."""

import os
import warnings

from accelerate.utils import DeepSpeedPlugin

from app.errors import UserError


def check(on_cpu: bool) -> None:
    """Refuse DeepSpeed on CPU, where accelerate 1.15 would take DDP without a word."""
    if on_cpu and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise UserError("a DeepSpeed profile needs GPUs: on CPU use accelerate_configs/fsdp_cpu.yaml")


def configure(plugin: DeepSpeedPlugin, clip: float, models: int) -> None:
    """Complete DeepSpeed's settings before it takes a model.

    Args:
        clip: largest norm of the gradient; 0 for no clipping.
        models: prepared before this one.
    """
    if models:
        raise UserError("DeepSpeed's engine takes one model a run: for several use an fsdp or ddp profile")
    config = plugin.deepspeed_config
    # It wants a batch size where no loader is prepared. Batches are ours, and nothing follows from it.
    config.pop("train_batch_size", None)
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": clip}
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True  # or nothing could be exported
    # DeepSpeed 0.19 calls what torch 2.13 has renamed, at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
