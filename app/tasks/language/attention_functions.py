"""Attention functions in the form that transformers calls, which keep documents apart without a mask of all pairs.

Their arguments are those of transformers' own: [blocks, heads, size, width], where keys and values may have fewer
heads. `documents` is what a batch knows about its documents, or None when the model writes a text, one document.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _unregistered(*_: Any, **__: Any) -> Any:
    raise RuntimeError("flash attention is not here, or attention_functions.register was not called")


# What varlen_attention returned; compiled code does not ask again.
_kernel: tuple[Callable, bool] = (_unregistered, False)


def register() -> None:
    """Register the kinds with transformers, by the names samestep_causal, _varlen, _flex and _padded."""
    global _kernel
    _kernel = varlen_attention() or _kernel
    _known()


@functools.cache
def _known() -> None:
    # Without a function for masks, an attention function gets none (`_preprocess_mask_arguments` of transformers).
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def padded(**mask_arguments) -> Tensor | None:
        unread = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(**mask_arguments | (unread if mask_arguments.get("attention_mask") is not None else {}))

    AttentionInterface.register("samestep_causal", sdpa_attention_forward)
    AttentionInterface.register("samestep_varlen", varlen)
    AttentionInterface.register("samestep_flex", flex)
    AttentionInterface.register("samestep_padded", sdpa_attention_forward)
    AttentionMaskInterface.register("samestep_padded", padded)


def hands_on(model: "PreTrainedModel") -> bool:
    """Tell whether a model passes `documents` on to all of its attention, by a pass without weights."""
    _known()
    seen: list[bool] = []

    def probe(module, query, key, value, attention_mask, documents=None, **more):
        seen.append(documents is not None)
        return torch.empty_like(query.transpose(1, 2)), None

    from transformers import AttentionInterface

    AttentionInterface.register("samestep_probe", probe)
    before = model.config._attn_implementation
    hollow = {name: torch.empty_like(tensor, device="meta") for name, tensor in _tensors_of(model)}
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "position_ids": ids, "use_cache": False, "documents": ids}
    model.set_attn_implementation("samestep_probe")
    try:
        with torch.no_grad():
            torch.func.functional_call(model, hollow, (), inputs)
    except (RuntimeError, TypeError, ValueError):
        return False
    finally:
        model.set_attn_implementation(before)
    return bool(seen) and all(seen)


def _tensors_of(model: nn.Module):
    yield from model.named_parameters()
    yield from model.named_buffers()


def varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    documents: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend inside documents by flash attention.

    Args:
        query: [blocks, heads, size, width], like `key` and `value`, which may have fewer heads.
        documents: see `starts_of`; None when the model writes a text, which is one document.
    """
    if documents is None:
        return _one_document(module, query, key, value, dropout, scaling)
    count, heads, size, width = query.shape
    attend, grouped = _kernel
    if not grouped and key.shape[1] != heads:
        key, value = (each.repeat_interleave(heads // key.shape[1], dim=1) for each in (key, value))
    fewer = {"enable_gqa": True} if grouped else {}
    # Rotary positions make queries and keys fp32 under autocast, which casts for sdpa but not for this function.
    kind = _half(value)
    flat = [each.transpose(1, 2).reshape(count * size, -1, width).to(kind) for each in (query, key, value)]
    attended = attend(*flat, documents, documents, size, size, scale=scaling, window_size=(-1, 0), **fewer)
    return attended.view(count, size, heads, width), None


def flex(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    documents: Any = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend inside documents by flex_attention; `documents` is a BlockMask, or None when the model writes a text."""
    if documents is None:
        return _one_document(module, query, key, value, dropout, scaling)
    query, key = query.to(value.dtype), key.to(value.dtype)
    attended = _flex(query.device.type)(query, key, value, block_mask=documents, scale=scaling, enable_gqa=True)
    return attended.transpose(1, 2).contiguous(), None


def _flex(device: str):
    """Return flex_attention, compiled by itself if the model around it is not; on a CPU uncompiled, for tests."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device != "cuda" or torch.compiler.is_compiling() else _compiled_flex()


@functools.cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _one_document(module, query, key, value, dropout, scaling) -> tuple[Tensor, None]:
    if module.training:
        raise RuntimeError(
            "the model did not pass `documents` on to its attention, which would cross them: use --attention model"
        )
    causal = query.shape[2] > 1 and query.shape[2] == key.shape[2]
    query, key = query.to(value.dtype), key.to(value.dtype)
    attended = functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, scale=scaling, is_causal=causal, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


def _half(value: Tensor) -> torch.dtype:
    autocast = torch.is_autocast_enabled("cuda") and value.dtype == torch.float32
    return torch.get_autocast_dtype("cuda") if autocast else value.dtype


@functools.cache
def varlen_attention() -> tuple[Callable, bool] | None:
    """Return torch's attention over sequences of any lengths, and whether keys may have fewer heads; else None.

    torch has it from 2.10 on, and fewer heads from 2.12 or 2.13 on (2.11 lacks them).
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return None
    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters
