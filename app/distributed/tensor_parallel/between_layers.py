"""Attention and dropout between split layers: what one process would compute, of the heads or columns that are here."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from app.distributed.tensor_parallel.split import cut, joined

if TYPE_CHECKING:
    from app.distributed.tensor_parallel.split import Split


class BetweenLayers(TorchFunctionMode):
    """Draw dropout's mask for all heads or columns on every process, and use this process's part.

    So the generators of all processes stay alike, and masks are those of one process. Where the sums of slices are
    added in a fixed tree, attention is computed slice by slice too.
    """

    def __init__(self, split: "Split"):
        super().__init__()
        self.split = split

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.split.inside:
            return function(*args, **kwargs)
        if function is functional.dropout:
            return self._dropout(*args, **kwargs)
        if function is functional.scaled_dot_product_attention and kwargs.get("dropout_p"):
            return self._attention(*args, **kwargs)
        if function is functional.scaled_dot_product_attention and self.split.fixed_tree:
            return self._kernels(*args, **kwargs)
        if function is torch.matmul and self.split.fixed_tree and args[0].ndim == 4:
            return self._matmul(*args)
        return function(*args, **kwargs)

    def _slices(self, heads: Tensor) -> list[Tensor]:
        """Cut [rows, heads, ..] into the heads of each slice, so that their arithmetic does not depend on the layout.

        Kernels choose their way by the number of matrices, and by how these lie in memory.
        """
        return cut(heads, self.split.here, 1)

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if not self.split.fixed_tree:
            return a @ b
        return joined([x @ y for x, y in zip(self._slices(a), self._slices(b), strict=True)], 1)

    def _kernels(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Attend with torch's kernels, slice by slice."""
        slices = zip(*map(self._slices, (query, key, value)), strict=True)
        masks: list[Tensor | None] = [attn_mask] * self.split.here
        if attn_mask is not None and attn_mask.ndim == 4 and attn_mask.shape[1] > 1:
            masks = [*self._slices(attn_mask)]
        attend = functional.scaled_dot_product_attention
        attended = [attend(q, k, v, mask, **options) for (q, k, v), mask in zip(slices, masks, strict=True)]
        return joined(attended, 1)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return x
        # Of attention, [rows, heads, size, size]; or [.., columns].
        dim = 1 if x.ndim == 4 else x.ndim - 1
        shape = list(x.shape)
        shape[dim] *= self.split.processes
        mask = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
        return x * mask.narrow(dim, self.split.rank * x.shape[dim], x.shape[dim]).div_(1 - p)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend as torch's function does, [rows, heads, size, width]; kernels draw masks that cannot be cut."""
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        scores = self._matmul(query, key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._matmul(self._dropout(scores.softmax(dim=-1), dropout_p).to(value.dtype), value)
