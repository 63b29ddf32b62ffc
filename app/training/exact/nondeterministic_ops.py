"""Operations without a deterministic kernel on GPUs, and what to use in their place.

Exact mode calls `torch.use_deterministic_algorithms(True)`, under which torch refuses them, in the first step, before
any weight has changed. torch's error does not say what to do.
"""

import re
from typing import NamedTuple

from app.errors import UserError

REFUSED = "does not have a deterministic implementation"


class Operation(NamedTuple):
    """An operation that torch refuses on GPUs.

    Args:
        documented: its name in the documentation of torch.use_deterministic_algorithms.
        pattern: matches its name in torch's error, and among torch's operations, forward or backward.
        instead: a replacement that is not refused.
    """

    documented: str
    pattern: str
    instead: str


_POOL = "pool with a fixed size and stride (AvgPool2d, MaxPool2d)"
OPERATIONS = (
    Operation("AvgPool3d", "avg_pool3d_backward", "use a Conv3d with stride, or average over reshaped axes"),
    Operation("AdaptiveAvgPool2d", "adaptive_avg_pool2d_backward", f"average with .mean((2, 3)), or {_POOL}"),
    Operation("AdaptiveAvgPool3d", "adaptive_avg_pool3d_backward", "average with .mean((2, 3, 4))"),
    Operation("AdaptiveMaxPool2d", "adaptive_max_pool[23]d_backward", f"use .amax((2, 3)), or {_POOL}"),
    Operation("FractionalMaxPool2d", "fractional_max_pool2d_backward", _POOL),
    Operation("FractionalMaxPool3d", "fractional_max_pool3d_backward", "pool with a fixed size and stride (MaxPool3d)"),
    Operation("MaxPool3d", "max_pool3d_with_indices_backward", "use torch 2.13, whose MaxPool3d has such a kernel"),
    *(
        Operation(f"MaxUnpool{d}d", f"max_unpool(ing)?{d}d", f"enlarge with ConvTranspose{d}d or mode='nearest'")
        for d in (1, 2, 3)
    ),
    Operation("linear", "upsample_linear1d_backward", "interpolate with mode='nearest', or as images of height 1"),
    Operation("bilinear", "upsample_bilinear2d(_aa)?_backward", "call nn.functional.interpolate, antialias=False"),
    Operation("bicubic", "upsample_bicubic2d(_aa)?_backward", "interpolate with mode='bilinear'"),
    Operation("trilinear", "upsample_trilinear3d_backward", "call nn.functional.interpolate"),
    *(
        Operation(f"ReflectionPad{d}d", f"reflection_pad{d}d_backward", "pad with zeros, or with mode='replicate'")
        for d in (1, 2, 3)
    ),
    Operation("NLLLoss", "nll_loss2d", "flatten pixels into rows: cross_entropy of [pixels, classes] and [pixels]"),
    Operation("CTCLoss", "ctc_loss_backward", "compute the loss on the CPU"),
    Operation("EmbeddingBag", "embedding_bag(_dense)?_backward", "use an Embedding and .amax or .sum over its rows"),
    Operation("put_", "^put_", "assign with an index, or use scatter_"),
    Operation("histc", "histc", "count with torch.bucketize and one_hot(...).sum(0)"),
    Operation("bincount", "bincount", "multiply one_hot by the weights and sum"),
    Operation("median", "^(nan)?median|median CUDA", "use the values without the indices, or .sort"),
    Operation("kthvalue", "kthvalue", "use .sort or .topk"),
    Operation("grid_sample", "grid_sampler", "sample on the CPU, as augmentation does"),
    Operation("cumsum", "^_?cumsum", "sum integers, or multiply by a triangular matrix"),
    Operation("scatter_reduce", "scatter_reduce", "use reduce='sum', or scatter_add"),
    Operation("resize_", "quantized_resize", "train without quantized tensors"),
)


def find(name: str) -> Operation | None:
    """Return the operation for torch's name of it or of its kernel; None if there is none."""
    return next((operation for operation in OPERATIONS if re.search(operation.pattern, name)), None)


def explained(error: BaseException | None) -> UserError | None:
    """Return advice for an operation that torch has refused; None for other errors."""
    if not isinstance(error, RuntimeError) or REFUSED not in str(error):
        return None
    name = str(error).partition(REFUSED)[0].split("\n")[-1].strip()
    operation = find(name)
    advice = f"{operation.documented}: {operation.instead}" if operation else "use another torch operation"
    return UserError(
        f"--run.exact: the model or the loss uses {name}, which sums in a different order each time on GPUs; {advice}; "
        "or use --run.exact false"
    )
