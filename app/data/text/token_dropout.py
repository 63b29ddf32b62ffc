"""Token dropout: training texts with some tokens replaced, so that a model does not rely on single words."""

from typing import TYPE_CHECKING, Any

import numpy as np

from app.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenDropout:
    """Replace tokens of a row by the mask token, the unknown token, or else random ones; special tokens stay.

    Pass it to `run.batches` as `augment`.
    """

    def __init__(self, rate: float, tokenizer: "PreTrainedTokenizerBase"):
        """Prepare to replace each token with probability `rate`."""
        self.rate, self.ordinary = rate, ordinary(tokenizer)
        ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, None)
        marks = (tokenizer.mask_token_id, tokenizer.unk_token_id)
        # GPT-2's unknown token is its end-of-text token, which would end the document.
        self.mark = next((mark for mark in marks if mark not in ends), None)

    @classmethod
    def of(cls, rate: float, tokenizer: "PreTrainedTokenizerBase") -> "TokenDropout | None":
        """Return what --token-dropout asks for; None if that is nothing."""
        return cls(rate, tokenizer) if rate else None

    def __call__(self, row: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        """Return a row whose `input_ids` are changed."""
        tokens = row["input_ids"]
        dropped = (random.random(len(tokens)) < self.rate) & np.isin(tokens, self.ordinary)
        others = self.ordinary[random.integers(len(self.ordinary), size=len(tokens))]
        return {**row, "input_ids": np.where(dropped, others if self.mark is None else self.mark, tokens)}


def check_dropout(rate: float) -> None:
    """Raise a UserError if --token-dropout is out of range."""
    if not 0 <= rate < 1:
        raise UserError(f"--token-dropout {rate:g}: must be at least 0 and below 1, for example 0.1")


def ordinary(tokenizer: "PreTrainedTokenizerBase") -> np.ndarray:
    """Return the tokens that are no special ones."""
    return np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
