"""Sliding-window inference over images of any size, with as many forward passes on every rank."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from app.distributed import collectives


def sliding_window(
    predict: Callable[[Tensor], Tensor], images: Tensor, window: Sequence[int], at_once: int, overlap: float
) -> Tensor:
    """Predict images window by window, and blend what overlaps, the middle of a window counting most.

    Every rank calls it as often, each with an image of its own size: those with fewer windows make empty passes, which
    FSDP needs, whose every pass is a collective.

    Args:
        predict: from windows [windows, channels, *sides] to logits of these sides.
        images: [images, channels, *sides]; smaller ones than the window are padded with 0.
        at_once: windows of one forward pass.
        overlap: share of its sides by which a window overlaps the next one.
    """
    from monai.inferers import sliding_window_inference

    own = passes(len(images), images.shape[2:], window, at_once, overlap)
    most = max(collectives.gather(own))
    logits = sliding_window_inference(images, window, at_once, predict, overlap, mode="gaussian")
    for _ in range(most - own):
        predict(images.new_zeros(1, images.shape[1], *window))
    return logits


def passes(count: int, sides: Sequence[int], window: Sequence[int], at_once: int, overlap: float) -> int:
    """Count the forward passes that MONAI makes over `count` images of these sides."""
    windows = count
    for side, own in zip(sides, window, strict=True):
        step = max(1, int(own * (1 - overlap)))
        windows *= math.ceil(max(side - own, 0) / step) + 1
    return math.ceil(windows / at_once)
