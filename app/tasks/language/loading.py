"""Pretrained language models: those that predict the next token, and those that find masked ones."""

import inspect
from typing import TYPE_CHECKING

from app.config.needs import EVERYTHING, Needs
from app.errors import UserError
from app.tasks.pretrained import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_language_model(name: str, masked: bool, trained: bool = True, needs: Needs = EVERYTHING) -> "PreTrainedModel":
    """Load the language model that --model names.

    Args:
        masked: whether it finds masked tokens.
        trained: whether it goes to `run.prepare`; if not, every process loads it whole.

    Raises:
        UserError: it cannot be loaded, or shall predict the next token although it sees it.
    """
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM

    if masked:
        return load_model(AutoModelForMaskedLM, name, once=trained, needs=needs)
    model = load_model(AutoModelForCausalLM, name, once=trained, needs=needs)
    if type(model.config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(model.config, "is_decoder", False):
        raise UserError(
            f"--model {name} sees the tokens on both sides, and so cannot learn to predict the next one: give "
            "--mask.rate 0.15, or a model that writes texts"
        )
    return model


def check_positions(model: "PreTrainedModel", name: str) -> None:
    """Raise a UserError if a model takes no positions, which restart with each document in a block."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UserError(
            f"--model {name} takes no position_ids, so attention would cross the documents in a block: use "
            "--data.packing concat, which allows that"
        )
