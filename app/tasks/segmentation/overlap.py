"""How well predicted classes cover the true ones: Dice and IoU, from counts of voxels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from app.training.metrics import Measure

# Each image's Dice is rounded to a multiple of this, so that the sum over eight million does not depend on its order.
GRID = 2.0**-30


class Overlap(Measure):
    """Dice and IoU of each class, and their means over the classes.

    `dice` is the mean over images, of those that have the class in their truth, as MONAI's DiceMetric and the medical
    literature have it; `iou` is over all voxels of all images together, as the mIoU of scene segmentation.
    """

    def __init__(self, names: Sequence[str]):
        """Score classes of these names."""
        # By class: images that have it, the sum of their Dice in steps of GRID, and voxels of intersection and union.
        super().__init__(4 * len(names))
        self.names = list(names)

    def update(self, predicted: Tensor, truth: Tensor) -> None:
        """Add images.

        Args:
            predicted, truth: classes, [images, *sides] or [images, 1, *sides].
        """
        for own, real in zip(predicted.long().flatten(1), truth.long().flatten(1), strict=True):
            classes = len(self.names)
            both = torch.bincount(own[own == real], minlength=classes)
            sizes = torch.bincount(own, minlength=classes) + torch.bincount(real, minlength=classes)
            present = torch.bincount(real, minlength=classes) > 0
            dice = (2.0 * both.double() / sizes.clamp(min=1) / GRID).round()
            self.state += torch.cat([present, dice, both, sizes - both])

    def scores(self) -> dict[str, float]:
        """Return `dice` and `iou`, and both for each class that is there, such as `dice_boundary`."""
        images, dice, both, union = torch.tensor(self.total, dtype=torch.float64).view(4, -1)
        scores = {"dice": (dice * GRID / images), "iou": both / union}
        means = {name: values[images > 0].mean() for name, values in scores.items()}
        each = {
            f"{name}_{which}": value
            for name, values in scores.items()
            for which, value, there in zip(self.names, values, images > 0, strict=True)
            if there
        }
        return {name: float(value) for name, value in {**means, **each}.items()}
