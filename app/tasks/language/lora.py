"""Low-rank adapters, by peft: small trained matrices next to frozen ones (Hu et al. 2021)."""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from accelerate.utils import DistributedType

from app.config import setting
from app.config.needs import EVERYTHING, Needs
from app.errors import UserError
from app.tasks.language import four_bits
from app.tasks.pretrained import check_installed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Lora:
    """Train small matrices next to the pretrained ones, which do not change."""

    rank: int = setting(0, at_least=0)
    """Rank of the adapters. 0: train the whole model."""
    alpha: float = 0.0
    """Adapters are scaled by alpha / rank. 0: twice the rank."""
    dropout: float = 0.0
    """Dropout probability of an adapter's input."""
    targets: tuple[str, ...] = ()
    """Layers that get an adapter, by the ends of their names, such as q_proj v_proj. Default: all linear layers but the
    last."""
    base: Literal["whole", "4bit"] = "whole"
    """How the pretrained weights under the adapters are held. 4bit: linear layers but the last in 4 bits a number, by
    bitsandbytes (QLoRA), on one process or under DDP."""


def check_lora(lora: Lora, model: str, accelerator: Any, needs: Needs = EVERYTHING) -> None:
    """Check the settings of adapters, before data is read.

    Args:
        model: the pretrained model, as --model names it; empty if there is none.
        needs: of the run, `run.needs`.

    Raises:
        UserError: peft or bitsandbytes is not installed, a setting is out of range, or one does not fit another.
    """
    _check_range(lora)
    if lora.base == "whole":
        return
    if not lora.rank:
        raise UserError("--lora.base 4bit: packed weights cannot be trained themselves: give --lora.rank 8 as well")
    if not model:
        raise UserError("--lora.base 4bit: there are no pretrained weights to pack: give --model, or leave it out")
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    four_bits.check_layout(accelerator.is_fsdp2, accelerator.split is not None, zero, accelerator.compiles)
    if needs.weights and needs.computing:  # a plan and an export pack nothing
        check_installed("bitsandbytes", "--lora.base 4bit: ")


def _check_range(lora: Lora) -> None:
    """Raise a UserError if a setting of adapters is out of range, or peft is not installed."""
    if lora.rank < 0 or not 0 <= lora.dropout < 1:
        raise UserError(
            f"--lora.rank {lora.rank}, --lora.dropout {lora.dropout}: the rank must be 0 (no "
            "adapters) or more, and dropout at least 0 and below 1"
        )
    if lora.rank:
        check_installed("peft", f"--lora.rank {lora.rank}: ")


def hold_base(model: "PreTrainedModel", lora: Lora, accelerator: Any, needs: Needs = EVERYTHING) -> None:
    """Hold the weights under adapters as --lora.base says, in place, before `run.prepare`.

    Call it after what looks at the whole model, such as its cost, and before what is computed with it.
    """
    if lora.base == "4bit" and needs.computing:  # an export leaves them whole, and so can merge them
        four_bits.hold(model, accelerator)


def add_adapters(model: "PreTrainedModel", lora: Lora, masked: bool = False) -> "PreTrainedModel":
    """Return the model with adapters, the only parameters that are trained; with rank 0, the model itself.

    Args:
        masked: whether it predicts masked tokens, a task without a name in peft.

    Raises:
        UserError: a setting is out of range, peft is not installed, or the model has no such layers.
    """
    _check_range(lora)
    if not lora.rank:
        return model
    import peft

    settings = peft.LoraConfig(
        task_type=None if masked else "CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * lora.rank,  # type: ignore[arg-type]  # peft takes fractions too
        lora_dropout=lora.dropout,
        target_modules="all-linear" if lora.targets in ((), ("all-linear",)) else list(lora.targets),
    )
    try:
        with warnings.catch_warnings():  # peft 0.21 uses a name that transformers 5.23 deprecates
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # peft corrects it for GPT-2
            warnings.filterwarnings(
                "ignore", "Model with `tie_word_embeddings=True`"
            )  # an export with --merge parts them
            wrapped = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise UserError(f"--lora.targets {' '.join(lora.targets)}: {' '.join(str(error).split())}") from None
    for adapter_config in wrapped.peft_config.values():  # a set, which would be saved in another order each time
        cast(Any, adapter_config).target_modules = sorted(cast(Any, adapter_config).target_modules)
    # What it wraps, `from_pretrained` has left in evaluation mode, without dropout.
    return cast("PreTrainedModel", wrapped.train())
