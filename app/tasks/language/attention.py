"""How attention tells the documents of a block apart, or need not, without reading a number from the device.

transformers 5.17 to 5.23 looks at position_ids (or at a padding mask) in each forward pass to find out whether it needs
a mask, which waits for the GPU; compiled, where it cannot look, it makes a mask of length x length always, and with a
mask no flash kernel runs. Here what there is to know is known where the batch is collated.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app.data.corpus import blocks
from app.errors import UserError
from app.tasks.language import attention_functions

KINDS = ("auto", "model", "mask", "varlen", "flex")
# What a batch holds beside the inputs of a model, by the kind that reads it.
STARTS, NUMBERS = "documents", {"mask": "documents_to_mask", "flex": "documents_to_flex"}
WIDEST = 256  # head that flash attention takes
_MARGIN = 16  # numbers of documents are rounded up to a power of two, at least this


class Attention:
    """What a language model's attention does, and the batches that it wants.

    Kinds: "model", transformers' own way. "causal": all before a token in its block, by sdpa without a mask. Documents
    that share a block are kept apart by "mask", sdpa with a mask that all layers share; by "varlen", flash attention
    over documents of their own lengths (torch.nn.attention.varlen), which holds no mask; by "flex", torch's
    flex_attention, compiled, which leaves out blocks of 128 x 128 that are masked.
    """

    def __init__(self, kind: str):
        self.kind = kind

    def collate(self, rows: Sequence[dict[str, np.ndarray]]) -> dict[str, Tensor]:
        """Stack blocks, and add what this kind of attention wants to know of their documents."""
        batch = blocks.collate(rows)
        if self.kind == "varlen":
            batch[STARTS] = starts_of(batch["position_ids"])
        elif self.kind in NUMBERS:
            batch[NUMBERS[self.kind]] = (batch["position_ids"] == 0).cumsum(1, dtype=torch.int32)
        return batch

    @classmethod
    def of(cls, model: nn.Module, asked: str, packing: str, run: Any) -> "Attention":
        """Choose the kind for a model, and have the model use it; run.json says which.

        Args:
            model: of transformers, with peft's adapters or without, before `run.prepare`.
            asked: one of KINDS.
            packing: --data.packing.

        Raises:
            UserError: what is asked for cannot be had; the message says why.
        """
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        halves = run.accelerator.mixed_precision in ("bf16", "fp16")
        if run.dry_run:  # on a CPU, whatever device the run is for
            kind = planned(model, asked)
        else:
            kind = choose(model, asked, packing, run.accelerator.device.type, halves, run.config.exact)
        if kind != "model":
            attention_functions.register()
            _leave_padding_alone(model)
            names = {"mask": "sdpa", "causal": "samestep_causal", "varlen": "samestep_varlen", "flex": "samestep_flex"}
            model.set_attn_implementation(names[kind])
        run.note(attention=kind if kind != "model" else f"model ({model.config._attn_implementation})")
        return cls(kind)


def choose(model: nn.Module, asked: str, packing: str, device: str, halves: bool, exact: bool) -> str:
    """Return the kind of attention that a model gets; see Attention.

    Left to itself that is sdpa with a mask on a CPU, and varlen on a GPU that computes in halves. Exact mode takes
    sdpa, whose kernels it settles.

    Raises:
        UserError: what is asked for cannot be had.
    """
    if asked not in KINDS:
        raise UserError(f"--attention {asked}: must be one of {', '.join(KINDS)}")
    why = _own_masks(model)
    # On a CPU too documents are kept apart here: of models that take position_ids some make their masks without them.
    if asked == "model" or (asked == "auto" and device == "cpu" and (why or packing == "concat")):
        return "model"
    if packing == "concat" and not why:
        return "causal"  # there is nothing to keep apart, so every kind is this one
    if asked == "auto":
        if why:
            return "model"
        return "varlen" if not exact and not _lacks("varlen", model, device, halves) else "mask"
    why = why or (f"--run.exact takes sdpa: leave out --attention {asked}" if exact and asked != "mask" else "")
    why = why or _lacks(asked, model, device, halves)
    if why:
        raise UserError(f"--attention {asked}: {why}")
    return asked


def planned(model: nn.Module, asked: str) -> str:
    """Return a kind that holds as much memory as what a run on a GPU takes, and that works on any device."""
    if _own_masks(model):
        return "model"
    return asked if asked in ("model", "mask") else "causal"


def _own_masks(model: nn.Module) -> str:
    """Say why a model must make its masks itself; nothing where every layer sees all that is before a token."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        return "the model has layers that do not see all that is before a token: use --attention model"
    if getattr(config, "attn_logit_softcapping", None):
        return "the model caps its attention's logits: use --attention model"
    if not getattr(model, "_supports_attention_backend", False) or model.config._attn_implementation != "sdpa":
        return "transformers does not let this model's attention be replaced: use --attention model"
    return ""


def _lacks(kind: str, model: nn.Module, device: str, halves: bool) -> str:
    """Say why a kind of attention cannot be had."""
    if kind == "mask":
        return ""
    config = model.config.get_text_config()
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    if any(getattr(config, name, 0) for name in names):
        return "it has no dropout, and the model has some in its attention: set that to 0, or use --attention mask"
    if not attention_functions.hands_on(model):
        return "the model does not hand what is known of documents on to its attention: use --attention mask"
    if kind == "flex":
        return ""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if device != "cuda" or not halves:
        return "flash attention wants a GPU and a profile with mixed_precision bf16 or fp16"
    if width > WIDEST or width % 8:
        return f"heads are {width} wide, and flash attention takes multiples of 8 up to {WIDEST}"
    if attention_functions.varlen_attention() is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen, or this GPU is older than Ampere"
    return ""


def starts_of(position_ids: Tensor) -> Tensor:
    """Return where documents begin in blocks laid end to end, and behind them the number of tokens, as int32.

    The last number is repeated up to a power of two: documents without tokens, which cost nothing, so that a compiled
    model meets few lengths.

    Args:
        position_ids: blocks x size, on the host; 0 where a document begins, as each block does.
    """
    places = position_ids.numpy().reshape(-1) == 0
    places[:: position_ids.shape[1]] = True
    found = np.flatnonzero(places)
    length = max(_MARGIN, 1 << len(found).bit_length())
    return torch.from_numpy(np.concatenate([found, np.full(length - len(found), len(places))]).astype(np.int32))


def model_inputs(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Return what a model is called with: masks made, on the device, of what a batch knows of its documents."""
    known = {name: value for name, value in inputs.items() if name not in NUMBERS.values()}
    if NUMBERS["mask"] in inputs:
        known["attention_mask"] = document_mask(inputs[NUMBERS["mask"]])
    elif NUMBERS["flex"] in inputs:
        known[STARTS] = block_mask(inputs[NUMBERS["flex"]])
    elif STARTS in inputs and "torch._dynamo" in sys.modules:
        # How many documents there are changes from batch to batch, and is nothing to compile anew for.
        torch._dynamo.maybe_mark_dynamic(known[STARTS], 0)
    return known


def document_mask(numbers: Tensor) -> Tensor:
    """Return which tokens see which: blocks x 1 x size x size, true where sdpa is to look.

    Args:
        numbers: blocks x size, the number of each token's document.
    """
    size = numbers.shape[1]
    before = torch.ones(size, size, dtype=torch.bool, device=numbers.device).tril()
    return ((numbers[:, :, None] == numbers[:, None, :]) & before)[:, None]


def block_mask(numbers: Tensor):
    """Return the same for flex_attention, as a BlockMask."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(block, head, query, key):
        return (query >= key) & (numbers[block, query] == numbers[block, key])

    count, size = numbers.shape
    return create_block_mask(sees, count, None, size, size, device=str(numbers.device))


def never_look(model: nn.Module, device: torch.device) -> None:
    """Have a model of transformers take a padding mask as it is, on a GPU: to see whether it pads waits for the device.

    Costs a mask where nothing is padded.
    """
    if device.type != "cpu" and getattr(model.config, "_attn_implementation", "") == "sdpa":
        attention_functions.register()
        model.set_attn_implementation("samestep_padded")


def _leave_padding_alone(model: nn.Module) -> None:
    """Keep models without a padding mask from looking, in each pass, whether tokens at the ends are padding."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _say_nothing


def _say_nothing(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Stand in for a warning of transformers: blocks are filled up with what no token sees."""
