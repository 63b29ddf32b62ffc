"""Arithmetic settings of torch and CUDA's libraries: fixed for exact mode, recorded, and restored afterwards."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch.backends import cuda, cudnn, mha, mkldnn


class Choice(NamedTuple):
    """A setting of torch for the whole process, and the value that exact mode wants."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    wanted: Any


def _attribute(holder: Any, name: str, wanted: Any) -> Choice:
    return Choice(lambda: getattr(holder, name), lambda value: setattr(holder, name, value), wanted)


def _reduction(name: str) -> Choice:
    """Return the setting for sums in products of 16-bit matrices; it is read as two values and restored as a pair."""

    def read() -> tuple[bool, bool]:
        return getattr(cuda.matmul, name), getattr(cuda.matmul, f"{name}_split_k")

    return Choice(read, lambda value: setattr(cuda.matmul, name, value), False)


_cudnn: Any = cudnn  # torch sets these settings when it is imported, and declares no types of them
_mkldnn: Any = mkldnn

# Set and restored in this order: torch's older settings also write the newer ones, and if the two disagree, reading an
# older one raises an error.
CHOICES = {
    "matmul": Choice(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    "cudnn_tf32": _attribute(cudnn, "allow_tf32", False),
    "float32_matmul": _attribute(cuda.matmul, "fp32_precision", "ieee"),
    "float32_matmul_cpu": _attribute(_mkldnn.matmul, "fp32_precision", "ieee"),
    "float32_convolution_cpu": _attribute(_mkldnn.conv, "fp32_precision", "ieee"),
    "float32_recurrent_cpu": _attribute(_mkldnn.rnn, "fp32_precision", "ieee"),
    "float32_convolution": _attribute(_cudnn.conv, "fp32_precision", "ieee"),
    "float32_recurrent": _attribute(_cudnn.rnn, "fp32_precision", "ieee"),
    "fp16_reduced_sums": _reduction("allow_fp16_reduced_precision_reduction"),
    "bf16_reduced_sums": _reduction("allow_bf16_reduced_precision_reduction"),
    "fp16_accumulation": _attribute(cuda.matmul, "allow_fp16_accumulation", False),
    "cudnn_benchmark": _attribute(cudnn, "benchmark", False),
    "cudnn_deterministic": _attribute(cudnn, "deterministic", True),
    # Flash and memory-efficient attention sum in a fixed order in backward when deterministic kernels are requested.
    "cudnn_attention": Choice(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
    # TransformerEncoderLayer's fast path in evaluation gives other bits, and is not used with FSDP2's hooks.
    "attention_short_cut": Choice(mha.get_fastpath_enabled, mha.set_fastpath_enabled, False),
    "attention_reduced_sums": Choice(
        cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp, False
    ),
}


@contextmanager
def fixed() -> Iterator[None]:
    """Choose settings that give the same bits each time, and restore the earlier ones after the block."""
    before = {}
    for name, choice in CHOICES.items():
        with suppress(RuntimeError):  # older and newer settings disagree: the newer ones are the true ones
            before[name] = choice.read()
    try:
        for choice in CHOICES.values():
            choice.write(choice.wanted)
        yield
    finally:
        for name, value in before.items():
            CHOICES[name].write(value)


def in_force() -> dict[str, Any]:
    """Return the current settings by name, for run.json."""
    setting_by_name = {name: choice.read() for name, choice in CHOICES.items() if name not in ("matmul", "cudnn_tf32")}
    setting_by_name |= {name: value[0] for name, value in setting_by_name.items() if isinstance(value, tuple)}
    setting_by_name["deterministic"] = torch.are_deterministic_algorithms_enabled()
    setting_by_name["cublas_workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    return setting_by_name
