"""Losses of segmentation. Each is a mean over images, so that it does not depend on how a batch is cut."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def dice_loss(kind: str, channels: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function from logits [images, channels, *sides] and truth [images, 1, *sides] to their mean loss.

    Args:
        kind: ce-dice, for classes of which each voxel has one; bce-dice, for each class against all others.
        channels: channels of the logits: one for each class, or a single one for the second of two classes.
    """
    from monai.losses import DiceCELoss, DiceLoss

    # batch=False: Dice of each image, not of all voxels in the batch, so that micro-batches can be averaged.
    if kind == "ce-dice":
        combined = DiceCELoss(softmax=True, batch=False)
        return lambda logits, truth: combined(logits.float(), one_hot(truth, channels))
    dice, entropy = DiceLoss(sigmoid=True, batch=False), nn.BCEWithLogitsLoss()

    def loss(logits: Tensor, truth: Tensor) -> Tensor:
        logits, target = logits.float(), one_hot(truth, channels)
        return dice(logits, target) + entropy(logits, target)

    return loss


def channels_of(kind: str, classes: int) -> int:
    """Return how many channels a loss needs for this number of classes."""
    return 1 if kind == "bce-dice" and classes == 2 else classes


def one_hot(truth: Tensor, channels: int) -> Tensor:
    """Give each class a channel of 0 and 1, by comparing, which is deterministic on GPUs."""
    if channels == 1:
        return truth.float()
    classes = torch.arange(channels, device=truth.device).reshape(1, -1, *(1,) * (truth.ndim - 2))
    return (truth == classes).float()


def classes_of(logits: Tensor) -> Tensor:
    """Return the predicted classes [images, 1, *sides] of logits [images, channels, *sides]."""
    return logits.argmax(1, keepdim=True) if logits.shape[1] > 1 else (logits > 0).long()
