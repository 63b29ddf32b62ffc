"""Losses of segmentation. Each is a mean over images, so that it does not depend on how a batch is cut."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from app.data.rows import IGNORED

LossOf = Callable[[Tensor, Tensor], Tensor]


def dice_loss(kind: str, channels: int, ignores: bool = False) -> LossOf:
    """Return the function from logits [images, channels, *sides] and truth [images, 1, *sides] to their mean loss.

    Args:
        kind: ce-dice, for classes of which each voxel has one; bce-dice, for each class against all others.
        channels: channels of the logits: one for each class, or a single one for the second of two classes.
        ignores: voxels whose truth is IGNORED are left out, see `_over_counted`.
    """
    from monai.losses import DiceCELoss, DiceLoss

    if ignores:
        return _over_counted(kind, channels)
    # batch=False: Dice of each image, not of all voxels in the batch, so that micro-batches can be averaged.
    if kind == "ce-dice":
        combined = DiceCELoss(softmax=True, batch=False)
        return lambda logits, truth: combined(logits.float(), one_hot(truth, channels))
    dice, entropy = DiceLoss(sigmoid=True, batch=False), nn.BCEWithLogitsLoss()

    def loss(logits: Tensor, truth: Tensor) -> Tensor:
        logits, target = logits.float(), one_hot(truth, channels)
        return dice(logits, target) + entropy(logits, target)

    return loss


def _over_counted(kind: str, channels: int) -> LossOf:
    """Return a loss that is, for each image, a mean over its own voxels that count, and then a mean over images.

    So the share of an image does not depend on the others in its micro-batch, and the number of images is weight
    enough. An image without a voxel that counts has the loss 0.
    """
    from monai.losses import DiceLoss

    # MONAI's own masked losses take cross-entropy over the voxels of all images together.
    dice = DiceLoss(batch=False)

    def loss(logits: Tensor, truth: Tensor) -> Tensor:
        logits, target = logits.float(), one_hot(truth, channels)
        counted = (truth != IGNORED).float()
        if kind == "ce-dice":
            shares, entropies = logits.softmax(1), -(target * logits.log_softmax(1)).sum(1, keepdim=True)
        else:
            shares = logits.sigmoid()
            entropies = binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1, keepdim=True)
        voxels = counted.flatten(1).sum(1).clamp(min=1)
        entropy = (entropies * counted).flatten(1).sum(1) / voxels
        return dice(shares * counted, target) + entropy.mean()

    return loss


def channels_of(kind: str, classes: int) -> int:
    """Return how many channels a loss needs for this number of classes."""
    return 1 if kind == "bce-dice" and classes == 2 else classes


def one_hot(truth: Tensor, channels: int) -> Tensor:
    """Give each class a channel of 0 and 1, by comparing, which is deterministic on GPUs; IGNORED is 0 in all."""
    if channels == 1:
        return (truth == 1).float()
    classes = torch.arange(channels, device=truth.device).reshape(1, -1, *(1,) * (truth.ndim - 2))
    return (truth == classes).float()


def classes_of(logits: Tensor) -> Tensor:
    """Return the predicted classes [images, 1, *sides] of logits [images, channels, *sides]."""
    return logits.argmax(1, keepdim=True) if logits.shape[1] > 1 else (logits > 0).long()
