"""Low-rank adapters, by peft: small matrices beside frozen ones (Hu et al. 2021)."""

import warnings
from dataclasses import dataclass

from app.errors import UserError
from app.tasks.pretrained import check_installed


@dataclass
class Lora:
    """Train small matrices beside the pretrained ones, which stay as they are."""

    rank: int = 0
    """Rank of the adapters. 0: train the whole model."""
    alpha: float = 0.0
    """Adapters count alpha / rank. 0: twice the rank."""
    dropout: float = 0.0
    """Dropout of what goes into an adapter."""
    targets: tuple[str, ...] = ()
    """Layers that get one, by the ends of their names, such as q_proj v_proj. Nothing: all linear ones but the last."""


def check_lora(lora: Lora) -> None:
    """Refuse adapters that cannot be had, before data is read.

    Raises:
        UserError: peft is not installed, or a setting is out of range.
    """
    if lora.rank < 0 or not 0 <= lora.dropout < 1:
        raise UserError(
            f"--lora.rank {lora.rank}, --lora.dropout {lora.dropout}: a rank is at least 1, dropout below 1"
        )
    if lora.rank:
        check_installed("peft", f"--lora.rank {lora.rank}: ")


def add_adapters(model, lora: Lora):
    """Return the model with adapters, the only parameters that are trained; with rank 0, the model itself.

    Raises:
        UserError: as `check_lora`, or the model has no such layers.
    """
    check_lora(lora)
    if not lora.rank:
        return model
    import peft

    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * lora.rank,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
    )
    try:
        with warnings.catch_warnings():  # peft 0.21 asks transformers 5.23 by a name that is about to go
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # of GPT-2's layers; peft sets it right
            return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise UserError(f"--lora.targets {' '.join(lora.targets)}: {' '.join(str(error).split())}") from None
