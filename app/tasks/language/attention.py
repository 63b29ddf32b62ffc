"""Attention that keeps the documents of a block apart without reading a number from the device.

transformers 5.17 to 5.23 reads position_ids (or a padding mask) in each forward pass to find out whether it needs a
mask, which waits for the GPU. Compiled, it cannot read them, and always makes a mask of length x length; with a mask,
no flash kernel runs. Here, this is found out where the batch is collated, on the CPU.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from app.data.rows import stack
from app.distributed.accelerator import Accelerator
from app.errors import UserError
from app.tasks.language import attention_functions

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedModel

KINDS = ("auto", "model", "mask", "varlen", "flex")
# Entries of a batch that are not inputs of a model, by the kind of attention that reads them.
STARTS = "documents"
NUMBERS = {"mask": "documents_to_mask", "flex": "documents_to_flex", "both": "documents_both_ways"}
PADDING = "attention_mask"
BOTH_WAYS = "sees_later_tokens"  # in a batch for models that do
WIDEST = 256  # length of a head's vectors, at most, for flash attention
_MARGIN = 16  # numbers of documents are rounded up to a power of two, at least this


class Attention:
    """What a language model's attention does, and the batches that it needs.

    Kinds: "model": what transformers does itself. "causal": all tokens before a token in its block, by sdpa without a
    mask. The others keep documents that share a block apart. "mask": sdpa with a mask that all layers share. "varlen":
    flash attention over documents of any lengths (torch.nn.attention.varlen), without a mask. "flex": torch's
    flex_attention, compiled, which skips blocks of 128 x 128 that are masked.
    """

    def __init__(self, kind: str):
        self.kind = kind

    def collate(self, rows: Sequence[dict[str, np.ndarray]]) -> dict[str, Tensor]:
        """Stack blocks, and add what this kind of attention needs to know about their documents."""
        batch = stack(rows)
        if self.kind == "varlen":
            batch[STARTS] = starts_of(batch["position_ids"])
        elif self.kind in NUMBERS:
            batch[NUMBERS[self.kind]] = numbers_of(batch["position_ids"])
        return batch

    @classmethod
    def of(cls, model: "PreTrainedModel", asked: str, packing: str, run: Any) -> "Attention":
        """Choose the kind for a model, make the model use it, and note it in run.json.

        Args:
            model: a model of transformers, with or without adapters of peft, before `run.prepare`.
            asked: one of KINDS.
            packing: --data.packing.

        Raises:
            UserError: the model or device does not support it; the message says why.
        """
        model = getattr(model, "get_base_model", lambda: model)()
        halves = run.accelerator.mixed_precision in ("bf16", "fp16")
        if run.for_other_device:
            kind = planned(model, asked)
        else:
            kind = choose(model, asked, packing, run.accelerator.device.type, halves, run.config.exact)
        if kind != "model":
            attention_functions.register()
            _leave_padding_alone(model)
            names = {"mask": "sdpa", "causal": "samestep_causal", "varlen": "samestep_varlen", "flex": "samestep_flex"}
            model.set_attn_implementation(names[kind])
        run.note(attention=named(kind, model))
        return cls(kind)


def named(kind: str, model: "PreTrainedModel") -> str:
    """Name a kind of attention for run.json."""
    return kind if kind != "model" else f"model ({model.config._attn_implementation})"


def choose(model: "PreTrainedModel", asked: str, packing: str, device: str, halves: bool, exact: bool) -> str:
    """Return the kind of attention that a model gets; see Attention.

    For "auto", that is sdpa with a mask on a CPU, and varlen on a GPU that computes in bf16 or fp16. Exact mode uses
    sdpa, whose kernels it fixes.

    Raises:
        UserError: the model or device does not support what is asked for.
    """
    if asked not in KINDS:
        raise UserError(f"--attention {asked}: must be one of {', '.join(KINDS)}")
    why = _own_masks(model)
    # Documents are kept apart here on a CPU too: some models take position_ids, but make their masks without them.
    if asked == "model" or (asked == "auto" and device == "cpu" and (why or packing == "concat")):
        return "model"
    if packing == "concat" and not why:
        return "causal"  # there is nothing to keep apart, so every kind would do this
    if asked == "auto":
        if why:
            return "model"
        return "varlen" if not exact and not _lacks("varlen", model, device, halves) else "mask"
    why = why or (f"--run.exact uses sdpa: leave out --attention {asked}" if exact and asked != "mask" else "")
    why = why or _lacks(asked, model, device, halves)
    if why:
        raise UserError(f"--attention {asked}: {why}")
    return asked


def planned(model: "PreTrainedModel", asked: str) -> str:
    """Return a kind that needs as much memory as the one that a run on a GPU uses, and that works on any device."""
    if _own_masks(model):
        return "model"
    return asked if asked in ("model", "mask") else "causal"


def _own_masks(model: "PreTrainedModel") -> str:
    """Say why a model must make its masks itself; return nothing if every layer sees all tokens before a token."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        return "the model has layers that do not see all earlier tokens: use --attention model"
    if getattr(config, "attn_logit_softcapping", None):
        return "the model caps its attention's logits: use --attention model"
    if not getattr(model, "_supports_attention_backend", False) or model.config._attn_implementation != "sdpa":
        return "transformers does not let this model's attention be replaced: use --attention model"
    return ""


def _lacks(kind: str, model: "PreTrainedModel", device: str, halves: bool) -> str:
    """Say why a kind of attention is not available; return nothing if it is."""
    if kind == "mask":
        return ""
    config = model.config.get_text_config()
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    if any(getattr(config, name, 0) for name in names):
        return "it has no dropout, but the model's attention has some: set that to 0, or use --attention mask"
    if not attention_functions.hands_on(model):
        return "the model does not pass `documents` on to its attention: use --attention mask"
    if kind == "flex":
        return ""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if device != "cuda" or not halves:
        return "flash attention needs a GPU and a profile with mixed_precision bf16 or fp16"
    if width > WIDEST or width % 8:
        return f"its heads have {width} numbers, but flash attention takes multiples of 8 up to {WIDEST}"
    if attention_functions.varlen_attention() is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen, or this GPU is older than Ampere"
    return ""


def numbers_of(position_ids: Tensor) -> Tensor:
    """Return the number of each token's document in its block, [blocks, size]; positions are 0 where one begins."""
    return (position_ids == 0).cumsum(1, dtype=torch.int32)


def starts_of(position_ids: Tensor) -> Tensor:
    """Return where documents begin in blocks that follow each other, and at the end the number of tokens, as int32.

    The last number is repeated up to a power of two, so that a compiled model sees few lengths. This adds documents
    without tokens, which cost nothing.

    Args:
        position_ids: [blocks, size], on the CPU; 0 where a document begins, and so at the start of each block.
    """
    places = position_ids.numpy().reshape(-1) == 0
    places[:: position_ids.shape[1]] = True
    starts = np.flatnonzero(places)
    length = max(_MARGIN, 1 << len(starts).bit_length())
    return torch.from_numpy(np.concatenate([starts, np.full(length - len(starts), len(places))]).astype(np.int32))


def model_inputs(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of a model: masks are made on the device from what a batch knows about its documents."""
    of_masks = (*NUMBERS.values(), BOTH_WAYS)
    arguments: dict[str, Any] = {name: value for name, value in inputs.items() if name not in of_masks}
    if BOTH_WAYS not in inputs:
        arguments["use_cache"] = False  # with a cache, transformers would ignore where documents begin
    if NUMBERS["both"] in inputs:
        arguments["attention_mask"] = document_mask(inputs[NUMBERS["both"]], causal=False)
    elif NUMBERS["mask"] in inputs:
        arguments["attention_mask"] = document_mask(inputs[NUMBERS["mask"]])
    elif NUMBERS["flex"] in inputs:
        arguments[STARTS] = block_mask(inputs[NUMBERS["flex"]])
    elif STARTS in inputs and "torch._dynamo" in sys.modules:
        # The number of documents changes from batch to batch, which must not compile the model again.
        torch._dynamo.maybe_mark_dynamic(arguments[STARTS], 0)
    return arguments


def document_mask(numbers: Tensor, causal: bool = True) -> Tensor:
    """Return which tokens see which, bool [blocks, 1, size, size], for sdpa.

    Args:
        numbers: [blocks, size], the number of each token's document.
        causal: whether no token sees later ones.
    """
    size, same = numbers.shape[1], numbers[:, :, None] == numbers[:, None, :]
    if causal:
        same = same & torch.ones(size, size, dtype=torch.bool, device=numbers.device).tril()
    return same[:, None]


def block_mask(numbers: Tensor) -> "BlockMask":
    """Return the same as `document_mask`, as flex_attention takes it."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(block, head, query, key):
        return (query >= key) & (numbers[block, query] == numbers[block, key])

    count, size = numbers.shape
    return create_block_mask(sees, count, None, size, size, device=str(numbers.device))


def never_look(model: "PreTrainedModel", accelerator: Accelerator) -> None:
    """Have a model of transformers use its padding mask without reading it first, on a GPU or if it is compiled.

    The host would wait for the GPU, and a graph would be compiled with a mask and one without. The price is a mask also
    where nothing is padded.
    """
    looks = accelerator.device.type == "cpu" and not accelerator.compiles
    if not looks and getattr(model.config, "_attn_implementation", "") == "sdpa":
        attention_functions.register()
        model.set_attn_implementation("samestep_padded")


def _leave_padding_alone(model: nn.Module) -> None:
    """Keep models without a padding mask from checking, in each pass, whether the last tokens are padding."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            vars(module)["warn_if_padding_and_no_attention_mask"] = _say_nothing


def _say_nothing(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Replace a warning of transformers, which has no use here: no token sees what fills up a block."""
