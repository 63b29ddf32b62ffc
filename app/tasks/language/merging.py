"""Merging adapters into the model that they are for, and making sure that nothing else has become of it."""

import math
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from app.errors import UserError
from app.tasks.pretrained import longest_input

# Tokens of the row that is compared: some from all over the vocabulary, and those that adapted embeddings change most.
SPREAD, CHANGED = 48, 16


class Merged:
    """A model with its adapters merged into its weights, which still has to compute what they computed together."""

    def __init__(self, model: nn.Module):
        """Merge the adapters of a model of peft, in place.

        Raises:
            UserError: there are none.
        """
        if not hasattr(model, "merge_and_unload"):
            raise UserError(f"--merge: {type(model).__name__} has no adapters: leave it out")
        self._row = _row(cast(Any, model))
        self._expected = _logits(cast(Any, model).get_base_model(), self._row)
        _part(cast(Any, model).get_base_model())
        with warnings.catch_warnings():  # that embeddings and last layer are apart now
            warnings.simplefilter("ignore", UserWarning)
            self.model: nn.Module = cast(Any, model).merge_and_unload()

    def check(self, folder: Path) -> None:
        """Load what was written of the model, and compare its logits. It gives its own weights away for that.

        They may differ by what rounding explains: the root of the smallest step from 1 to a number of the weights'
        type, 0.03 % in fp32, of the largest logit.

        Raises:
            UserError: they differ by more.
        """
        dtype = next(self.model.parameters()).dtype
        kind = cast(Any, type(self.model))
        self.model.to("meta")
        merged_logits = _logits(kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False), self._row)
        apart = (
            float((merged_logits - self._expected).abs().max())
            if merged_logits.shape == self._expected.shape
            else math.nan
        )
        allowed = math.sqrt(torch.finfo(dtype).eps) * float(self._expected.abs().max())
        if not apart <= allowed:  # it may be NaN
            raise UserError(
                "--merge: the merged model is another one: its logits differ from those of the model with its adapters "
                f"by {apart:.3g}, where rounding explains {allowed:.3g}; nothing was written. Leave out --merge, and "
                "use the adapters with the model that they are for"
            )


def _row(model: Any) -> Tensor:
    """Return token ids to compare models by, [1, length]."""
    from peft.tuners.lora import Embedding

    base = model.get_base_model()
    tokens = base.get_input_embeddings().weight.shape[0]
    chosen = torch.linspace(0, tokens - 1, min(SPREAD, tokens)).long().tolist()
    for module in base.modules():
        if isinstance(module, Embedding):
            for adapter in module.lora_embedding_A.values():  # [rank, tokens]
                chosen += adapter.detach().abs().sum(0).topk(min(CHANGED, adapter.shape[1])).indices.tolist()
    longest = longest_input(base.config)
    return torch.tensor([chosen[-longest:] if longest else chosen])


def _logits(model: Any, row: Tensor) -> Tensor:
    """Return the logits of a row, in fp32, with the attention that all models have."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model.eval()(input_ids=row.to(model.device)).logits.float().cpu()


def _part(model: Any) -> None:
    """Give every layer weights of its own, where an adapted one shares them: its adapters are not for the others.

    The model is then saved and loaded as one whose embeddings and last layer are apart.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = list(model.modules())
    owned = [(module, name, value) for module in modules for name, value in module.named_parameters(recurse=False)]
    owners: dict[Tensor, int] = {}
    for _, _, value in owned:
        owners[value] = owners.get(value, 0) + 1
    adapted = [module.get_base_layer() for module in modules if isinstance(module, BaseTunerLayer)]
    if not any(owners[value] > 1 for layer in adapted for value in layer.parameters(recurse=False)):
        return
    seen: set[Tensor] = set()
    for module, name, value in owned:
        if value in seen:
            setattr(module, name, nn.Parameter(value.detach().clone(), value.requires_grad))
        seen.add(value)
    for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    for module in modules:
        if getattr(module, "all_tied_weights_keys", None):
            module.all_tied_weights_keys = {}
