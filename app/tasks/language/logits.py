"""Whether a language model returns logits, or losses that are computed without holding all logits in memory.

A micro-batch of 4,096 tokens has 2 GB of logits over a vocabulary of 128k, and the loss needs them several times.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.func import functional_call

from app.distributed import naming, regional_compilation
from app.distributed.tensor_parallel.last_layer import LAST, LastLayer
from app.errors import UserError
from app.tasks.no_numbers import NoNumbers
from app.training.scores.collecting import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Logits = Literal["auto", "whole", "chunked"]
HELP = (
    "How losses over the vocabulary are computed. whole: from all logits of a micro-batch. chunked: a part of the "
    "vocabulary at a time, and once more in the backward pass, which takes little memory. auto: chunked where that is "
    "more than 2**28 logits, or where layers are split, if the model can do it."
)


def choose(model: "PreTrainedModel", asked: Logits, run: Any, needed: str = "") -> None:
    """Have a model's last layer compute losses where that is asked for, and note it in run.json.

    Args:
        model: a model of transformers, with or without adapters of peft, before `run.prepare`.
        asked: auto takes what the model can do.
        needed: the flag that needs logits; empty if none does.

    Raises:
        UserError: "chunked" is asked for, and the model or the profile does not support it; the message says why.
    """
    if asked != "whole" and (why := f"{needed} needs logits" if needed else _lacks(model, run.accelerator)):
        if asked == "chunked":
            raise UserError(f"--logits chunked: {why}: use --logits whole")
        asked = "whole"
    if asked != "whole":
        LastLayer(cast(nn.Linear, _last(model)), asked)
    run.note(logits=asked)


def told(model: Callable[..., Any], targets: Tensor, smoothing: float = 0.0) -> AbstractContextManager[None]:
    """Tell a model which tokens are right. Inside this block, its `logits` may be their losses.

    They are where `choose` has said so: fp32, in the shape of the targets, 0 where a target is below 0.
    """
    last = _known(model)
    return last.told(targets, smoothing) if last else nullcontext()


def kind(model: nn.Module) -> Logits:
    """Return what was chosen for a model."""
    last = _known(model)
    return last.kind if last else "whole"


def likeliest(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function from what a model has just returned as its `logits` to the likeliest tokens."""

    def tokens(predicted: Tensor) -> Tensor:
        last = _known(model)
        computed = last.likeliest if last else None
        return predicted.argmax(-1) if computed is None else computed

    return tokens


def _known(model: Any) -> LastLayer | None:
    if not isinstance(model, nn.Module):  # a function that calls one
        return None
    (model,) = naming.plain([model])
    return getattr(_last(model), LAST, None)


def _last(model: Any) -> nn.Module | None:
    """Return the layer that predicts tokens."""
    find = getattr(getattr(model, "get_base_model", lambda: model)(), "get_output_embeddings", lambda: None)
    try:
        return find()
    except NotImplementedError:
        return None


def _lacks(model: "PreTrainedModel", accelerator: Any) -> str:
    """Say why losses cannot be computed in chunks; return nothing if they can."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "it has not been tried with DeepSpeed"
    if accelerator.compiles and not regional_compilation.is_asked_for(accelerator.state.dynamo_plugin):
        return "a model that is compiled as one cannot do it; add dynamo_use_regional_compilation: true to the profile"
    last, kind = _last(model), model.config.model_type
    if type(last) is not nn.Linear:
        return f"the last layer of this {kind} is a {type(last).__name__}, and only Linear is supported"
    return "" if _returns(model, last) else f"this {kind} changes logits after its last layer"


def _returns(model: Any, last: nn.Module) -> bool:
    """Tell whether the logits of a model are what its last layer returns, by a pass over tensors without contents."""
    model = getattr(model, "get_base_model", lambda: model)()
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    hollow = {name: tensor.detach().to("meta") for name, tensor in tensors}
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
    seen: list[Tensor] = []
    hook = last.register_forward_hook(lambda module, args, returned: seen.append(returned))
    try:
        with evaluating(model), NoNumbers():  # checkpointed blocks would say that they use no cache
            logits = functional_call(model, hollow, (), inputs, tie_weights=False).logits
    except Exception:  # of any kind: models ask tensors for numbers, which these do not have
        return False
    finally:
        hook.remove()
    return len(seen) == 1 and logits is seen[0]
