"""Sliding-window inference over images of any size, with the same number of forward passes on every rank."""

import math
from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from app.distributed import collectives


def sliding_window(
    predict: Callable[[Tensor], Tensor], images: Tensor, window: Sequence[int], at_once: int, overlap: float
) -> Tensor:
    """Predict images window by window, and blend overlapping windows, whose middle counts most.

    A collective: every rank calls it equally often, with images of any size. Ranks with fewer windows make passes over
    zeros, because with FSDP each pass is a collective.

    Args:
        predict: from windows [windows, channels, *sides] to logits [windows, classes, *sides].
        images: [images, channels, *sides]; images smaller than the window are padded with 0.
        window: sides of a window, in voxels.
        at_once: windows in one forward pass.
        overlap: fraction of its sides by which a window overlaps the next one.
    """
    from monai.inferers import sliding_window_inference

    passes_here = passes(len(images), images.shape[2:], window, at_once, overlap)
    most = max(collectives.gather(passes_here))
    logits = sliding_window_inference(images, window, at_once, predict, overlap, mode="gaussian")
    for _ in range(most - passes_here):
        predict(images.new_zeros(1, images.shape[1], *window))
    return cast(Tensor, logits)  # as `predict` returns tensors


def passes(count: int, sides: Sequence[int], window: Sequence[int], at_once: int, overlap: float) -> int:
    """Count the forward passes that MONAI makes over `count` images with these sides, in voxels."""
    windows = count
    for side, window_side in zip(sides, window, strict=True):
        step = max(1, int(window_side * (1 - overlap)))
        windows *= math.ceil(max(side - window_side, 0) / step) + 1
    return math.ceil(windows / at_once)
