"""Attention to both sides, for models that find masked tokens: documents that share a block do not see each other."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from app.data.rows import stack
from app.distributed import collectives
from app.distributed.fsdp_calls import allow_views
from app.errors import UserError
from app.tasks.language.attention import BOTH_WAYS, NUMBERS, PADDING, document_mask, named, numbers_of
from app.tasks.pretrained import AFTER_PADDING
from app.training.scores.collecting import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BothWays:
    """What attention to both sides is, and the batches that it needs."""

    def __init__(self, apart: bool, first: int = 0):
        """Describe it.

        Args:
            apart: whether attention stays inside a document.
            first: the position of a document's first token.
        """
        self.apart, self.first = apart, first

    def collate(self, rows: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
        """Stack rows of MaskedBlocks, and say which tokens are seen."""
        batch: dict[str, Any] = {**stack(rows), BOTH_WAYS: True}
        numbers = numbers_of(positions := batch.pop("position_ids"))
        if self.apart:
            return batch | {"position_ids": positions + self.first, NUMBERS["both"]: numbers}
        # Without padding there is no mask, and nothing is read from the device to see that none is needed.
        return batch | ({PADDING: (numbers == 1).long()} if (numbers > 1).any() else {})

    @classmethod
    def of(cls, model: "PreTrainedModel", asked: str, packing: str, run: Any) -> "BothWays":
        """Make sure that a model can do it, and note it in run.json. Every rank takes part.

        Args:
            model: a model of transformers, with or without adapters of peft, before `run.prepare`.
            asked: --attention.
            packing: --data.packing.

        Raises:
            UserError: the model does not support it; the message says why.
        """
        apart = packing == "documents"
        if asked in ("varlen", "flex"):
            raise UserError(f"--attention {asked} sees earlier tokens only: leave it out with --mask.rate")
        if asked == "model" and apart:
            raise UserError(
                "--attention model: with --mask.rate, transformers does not keep documents apart by itself; leave it "
                "out, or use --data.packing concat"
            )
        model = getattr(model, "get_base_model", lambda: model)()
        # Rank 0 tries it, which may be the only one that has the model's contents.
        if apart and (why := collectives.from_main(lambda: _lacks(model))):
            raise UserError(f"--data.packing documents: {why}: use --data.packing concat")
        allow_views()  # of logits, which the loss only reads
        run.note(attention=named("mask" if apart else "model", model))
        after = model.config.model_type in AFTER_PADDING
        return cls(apart, model.config.pad_token_id + 1 if after else 0)


def _lacks(model: "PreTrainedModel") -> str:
    """Say why documents cannot be kept apart by a mask; return nothing if they can."""
    config = model.config.get_text_config()
    near = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    if set(getattr(config, "layer_types", None) or [near]) != {"full_attention"}:
        return "the model has layers that see near tokens only, which a mask for all layers would change"
    if any(p.is_meta for p in model.parameters()):  # for a plan: there is nothing to try
        return ""
    try:
        apart = _stay_apart(model)
    except (TypeError, ValueError, RuntimeError, IndexError):
        apart = False
    return "" if apart else "the model takes no mask that says which token sees which"


def _stay_apart(model: "PreTrainedModel") -> bool:
    """Tell whether a document's logits are the same whatever stands next to it, by a pass over a few tokens."""
    places = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 1]])
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 10]])
    seen = document_mask(numbers_of(places), causal=False)
    with evaluating(model):
        first, second = model(input_ids=ids, position_ids=places, attention_mask=seen).logits[:, :2]
    return torch.equal(first, second)
