"""The kernels and casts of a device that this machine need not have, for tensors without contents.

Kernels of torch's meta device allocate what real kernels would return. What differs between devices is decided above
them: which attention is used, what a dropout keeps, what autocast casts. This module decides it, at a dispatch key that
no device of torch uses (torch 2.13; tests/commands/test_footprint.py compares with real tensors).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from app.commands.plan.live_storage import LiveStorages
from app.tasks.no_numbers import NoNumbers

# What autocast computes in 16 bits on a GPU, ... (torch 2.13, ATen/autocast_mode.h; test_footprint.py compares)
LOWER = (
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"
)
# ... in 32, ...
HIGHER = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
# ... and with sums in 32.
SUMMED = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
# On a CPU, of what recipes use.
LOWER_ON_CPU = (
    "conv1d conv2d conv3d bmm mm linalg_vecdot baddbmm addmm addbmm linear matmul _convolution.deprecated conv_tbc "
    "conv_transpose1d conv_transpose2d.input conv_transpose3d.input prelu scaled_dot_product_attention"
)
HIGHER_ON_CPU = (
    "avg_pool3d binary_cross_entropy grid_sampler cdist mse_loss cosine_embedding_loss poisson_nll_loss "
    "smooth_l1_loss l1_loss kl_div multilabel_margin_loss huber_loss soft_margin_loss nll_loss nll_loss2d"
)

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_KEY = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]  # torch's stub lacks it
_DEVICE = "privateuseone"
_aten = torch.ops.aten


class SimulatedDevice:
    """A device whose kernels meta tensors use in place of those of the meta device."""

    def __init__(self, device: str, precision: str, storages: LiveStorages):
        """Choose a device.

        Args:
            device: cpu or cuda.
            precision: fp32, bf16 or fp16.
            storages: is told which tensors are copies of weights.
        """
        self.device, self.dtype, self.storages = device, _TYPES.get(precision), storages
        # By id; for one forward pass. What the backward pass casts again, it uses once.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._keeping = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Use these kernels for meta tensors inside the block."""
        library, others = (torch.library.Library(name, "IMPL", _KEY.name) for name in ("aten", "_"))
        on_gpu = self.device == "cuda"
        try:
            others.fallback(torch.library.fallthrough_kernel)
            if self.dtype is not None:
                for name in (LOWER if on_gpu else LOWER_ON_CPU).split():
                    self._register(library, name, self._lowered)
                for name in (HIGHER if on_gpu else HIGHER_ON_CPU).split():
                    self._register(library, name, self._raised)
                for name in SUMMED.split() if on_gpu else ():
                    self._register(library, name, self._summed)
            library.impl("scaled_dot_product_attention", self._attention)
            library.impl("_to_copy", self._copied)
            if on_gpu:
                library.impl("dropout", self._dropout)
            before = torch.is_autocast_enabled(_DEVICE)
            torch.set_autocast_enabled(_DEVICE, True)
            try:
                with torch._C._IncludeDispatchKeyGuard(_KEY), NoNumbers():
                    yield
            finally:
                torch.set_autocast_enabled(_DEVICE, before)
        finally:
            library._destroy()
            others._destroy()

    @contextmanager
    def casting(self, models: list[nn.Module]) -> Iterator[None]:
        """Inside the block, have the forward passes of models cast as accelerate's prepare does."""
        from accelerate.utils import convert_outputs_to_fp32

        if self.dtype is None:
            yield
            return
        with ExitStack() as stack:
            for model in models:
                instance_forward = model.__dict__.get("forward")
                model.forward = convert_outputs_to_fp32(self._cast_inside(model.forward))
                stack.callback(_restore_forward, model, instance_forward)
            yield

    def _cast_inside(self, forward: Callable) -> Callable:
        def inside(*args, **kwargs):
            # It has no effect on meta tensors by itself. Activation checkpointing restores it in the backward pass.
            with torch.autocast("cpu", self.dtype):
                self._keeping = True
                try:
                    return forward(*args, **kwargs)
                finally:
                    self._keeping = False
                    self._copies.clear()

        return inside

    def _register(self, library: torch.library.Library, name: str, change: Callable) -> None:
        # Attention has its own kernel below; autocast of torch 2.11 does not know rms_norm.
        if name == "scaled_dot_product_attention" or not known(name, self.device):
            return
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(_aten, packet), overload or "default")

        def changed(*args, **kwargs):
            with _below():
                if torch.is_autocast_enabled("cpu"):
                    args, kwargs = change(args, kwargs, operation)
                return operation(*args, **kwargs)

        library.impl(name, changed)

    def _lowered(self, args: tuple, kwargs: dict, _) -> tuple[tuple, dict]:
        return _each(self._lower, args, kwargs)

    def _lower(self, tensor: Tensor) -> Tensor:
        if not _castable(tensor):
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf and tensor.dtype == torch.float32) or tensor._is_view():
            return tensor.to(self.dtype)
        tensor_and_copy = self._copies.get(id(tensor))
        if tensor_and_copy is None:
            with self.storages.copying():
                tensor_and_copy = tensor, tensor.to(self.dtype)
            if self._keeping:
                self._copies[id(tensor)] = tensor_and_copy
        return tensor_and_copy[1]

    def _raised(self, args: tuple, kwargs: dict, _) -> tuple[tuple, dict]:
        return _each(lambda t: t.float() if _castable(t) else t, args, kwargs)

    def _summed(self, args: tuple, kwargs: dict, operation: Any) -> tuple[tuple, dict]:
        if not _castable(args[0]) or args[0].dtype == torch.float32:
            return args, kwargs
        place = [argument.name for argument in operation._schema.arguments].index("dtype")
        if len(args) > place:
            return (*args[:place], args[place] or torch.float32, *args[place + 1 :]), kwargs
        return args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}

    def _copied(self, tensor: Tensor, *, device: Any = None, non_blocking: bool = False, **settings: Any) -> Tensor:
        """Leave this device, for the host's memory, with what nobody waits for, such as activations that go there."""
        with _below():
            if not (non_blocking and tensor.is_meta and device is not None and torch.device(device).type == "cpu"):
                return _aten._to_copy(tensor, device=device, non_blocking=non_blocking, **settings)
            # A tensor that is on a CPU already is not copied.
            return tensor if self.device == "cpu" else torch.empty((), dtype=tensor.dtype).expand(tensor.shape)

    def _dropout(self, tensor: Tensor, p: float, train: bool) -> Tensor:
        """Keep one byte for each number, as the fused kernel of a GPU does."""
        with _below():
            if 0 < p < 1 and train:
                return torch.native_dropout(tensor, p, train)[0]
            return torch.dropout(tensor, p, train)

    def _attention(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        with _below():
            if torch.is_autocast_enabled("cpu"):
                q, k, v = map(self._lower, (q, k, v))
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                attn_mask = torch.empty_like(attn_mask, dtype=q.dtype)
            elif attn_mask is not None and torch.is_autocast_enabled("cpu"):
                attn_mask = self._lower(attn_mask)
            taken = self._on_gpu if self.device == "cuda" else self._on_cpu
            return taken(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def _on_gpu(self, q, k, v, mask, dropout, causal, scale, grouped) -> Tensor:
        """Use flash attention in 16 bits without a mask, else memory-efficient attention; neither keeps the matrix."""
        if mask is None and q.dtype != torch.float32 and q.shape[-1] <= 256 and q.ndim == 4:
            width = q.shape[-1]
            if width % 8:
                q, k, v = (nn.functional.pad(t, (0, 8 - width % 8)) for t in (q, k, v))
            attended = _aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)[0]
            return attended[..., :width]
        if q.ndim == 4 and (not grouped or q.shape[1] == k.shape[1]):
            if mask is not None:
                mask = mask.expand(*q.shape[:3], k.shape[2])
            wanted = any(t.requires_grad for t in (q, k, v)) and torch.is_grad_enabled()
            operation = _aten._scaled_dot_product_efficient_attention
            return operation(q, k, v, mask, wanted, dropout, causal, scale=scale)[0]
        return _plain(q, k, v, mask, dropout, causal, scale, grouped)

    def _on_cpu(self, q, k, v, mask, dropout, causal, scale, grouped) -> Tensor:
        """Use flash attention if there is no dropout; otherwise the matrix of scores is kept."""
        if dropout or q.ndim != 4 or (mask is not None and mask.requires_grad):
            return _plain(q, k, v, mask, dropout, causal, scale, grouped)
        operation = _aten._scaled_dot_product_flash_attention_for_cpu
        return operation(q, k, v, dropout, causal, attn_mask=mask, scale=scale)[0]


def _restore_forward(model: nn.Module, instance_forward: Any) -> None:
    del model.forward
    if instance_forward is not None:
        model.forward = instance_forward


def known(name: str, device: str) -> bool:
    """Tell whether this torch's autocast casts for an operation on a type of device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", f"Autocast{device.upper()}")


def _below():
    """Leave out this dispatch key, to run the operation itself."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY))


def _castable(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64


def _each(change: Callable[[Tensor], Tensor], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    def one(value):
        if isinstance(value, Tensor):
            return change(value)
        return [one(item) for item in value] if isinstance(value, list | tuple) and value else value

    return tuple(map(one, args)), {name: one(value) for name, value in kwargs.items()}


def _plain(q, k, v, mask, dropout, causal, scale, grouped) -> Tensor:
    return _aten._scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)[0]
