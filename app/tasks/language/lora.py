"""Low-rank adapters, by peft: small trained matrices next to frozen ones (Hu et al. 2021)."""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from app.errors import UserError
from app.tasks.pretrained import check_installed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Lora:
    """Train small matrices next to the pretrained ones, which do not change."""

    rank: int = 0
    """Rank of the adapters. 0: train the whole model."""
    alpha: float = 0.0
    """Adapters are scaled by alpha / rank. 0: twice the rank."""
    dropout: float = 0.0
    """Dropout probability of an adapter's input."""
    targets: tuple[str, ...] = ()
    """Layers that get an adapter, by the ends of their names, such as q_proj v_proj. Default: all linear layers but the
    last."""


def check_lora(lora: Lora) -> None:
    """Check the settings of adapters, before data is read.

    Raises:
        UserError: peft is not installed, or a setting is out of range.
    """
    if lora.rank < 0 or not 0 <= lora.dropout < 1:
        raise UserError(
            f"--lora.rank {lora.rank}, --lora.dropout {lora.dropout}: the rank must be 0 (no "
            "adapters) or more, and dropout at least 0 and below 1"
        )
    if lora.rank:
        check_installed("peft", f"--lora.rank {lora.rank}: ")


def add_adapters(model: "PreTrainedModel", lora: Lora, masked: bool = False) -> "PreTrainedModel":
    """Return the model with adapters, the only parameters that are trained; with rank 0, the model itself.

    Args:
        masked: whether it predicts masked tokens, a task without a name in peft.

    Raises:
        UserError: see `check_lora`; or the model has no such layers.
    """
    check_lora(lora)
    if not lora.rank:
        return model
    import peft

    settings = peft.LoraConfig(
        task_type=None if masked else "CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * lora.rank,  # type: ignore[arg-type]  # peft takes fractions too
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
    )
    try:
        with warnings.catch_warnings():  # peft 0.21 uses a name that transformers 5.23 deprecates
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # peft corrects it for GPT-2
            return cast("PreTrainedModel", peft.get_peft_model(model, settings))  # which it wraps
    except ValueError as error:
        raise UserError(f"--lora.targets {' '.join(lora.targets)}: {' '.join(str(error).split())}") from None
