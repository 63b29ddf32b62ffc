"""Augmentation of images with boxes, and their micro-batches."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.data.config import BoxAugment
from app.data.images.augment import Draw, ImageCollate
from app.data.images.processor import ImageProcessor
from app.errors import UserError

# The share of a box that must stay in the image, and its smallest side in pixels.
SEEN, SMALLEST = 0.25, 2.0


class BoxDraw:
    """Draw the changes of an image, and move its boxes with it. Pass it to `run.batches` as `augment`."""

    def __init__(self, settings: BoxAugment):
        """Prepare.

        Raises:
            UserError: a setting is out of range.
        """
        if not 0 <= settings.colour < 1:
            raise UserError(f"--augment.colour {settings.colour}: must be from 0 to below 1")
        self.settings, self.draw = settings, Draw(settings)

    def __call__(self, row: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        """Return a row with the boxes that are still to be seen, and with what ImageCollate and BoxCollate apply."""
        row = self.draw(row, random)
        corners, visible = moved(row["corners"], row["view"], *row["pixels"].shape[-2:])
        colour = 1 + self.settings.colour * (2 * random.random(2) - 1)
        seen = {"corners": corners[visible], "classes": row["classes"][visible]}
        return {**row, **seen, "colour": colour.astype(np.float32)}


def moved(corners: np.ndarray, view: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Move boxes to where an image shows them after a change.

    Args:
        corners: left, top, right, bottom in fractions, [boxes, 4].
        view: [2, 3], for affine_grid: from a place in the new image to one in the old one, both from -1 to 1.

    Returns:
        The boxes around the moved corners, cut off at the image's edges; and which of them are still to be seen.
    """
    places = 2 * corners[:, [[0, 1], [2, 1], [2, 3], [0, 3]]].astype(np.float64) - 1
    turned = (places - view[:, 2]) @ np.linalg.inv(view[:, :2].astype(np.float64)).T
    low, high = (turned.min(1) + 1) / 2, (turned.max(1) + 1) / 2
    whole = np.prod(high - low, axis=1)
    low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
    sides = high - low
    visible = (np.prod(sides, axis=1) >= SEEN * whole) & (sides * [width, height] >= SMALLEST).all(axis=1)
    return np.concatenate([low, high], axis=1).astype(np.float32), visible


class BoxCollate:
    """Make `pixel_values` and `labels` of rows.

    `labels` has for each image a dict of `class_labels`, int64 [boxes], `boxes`, float32 [boxes, 4]: x and y of the
    middle, width and height in fractions, as transformers' detectors take them; and `weight`, a float32 scalar: what
    the image counts in the loss.
    """

    def __init__(self, images: ImageCollate):
        self.images = images

    @classmethod
    def of(cls, processor: ImageProcessor) -> "BoxCollate":
        """Normalise as an image processor of transformers does."""
        return cls(ImageCollate.of(processor))

    def __call__(self, rows: list[dict]) -> dict[str, Any]:
        """Return a micro-batch."""
        plain = [{name: value for name, value in row.items() if name != "labels"} for row in rows]
        pixels = self.images(plain)["pixel_values"]
        if "colour" in rows[0]:
            contrast, brightness = torch.from_numpy(np.stack([row["colour"] for row in rows]))[
                ..., None, None, None
            ].unbind(1)
            pixels = pixels * contrast + (brightness - 1)
        return {"pixel_values": pixels, "labels": [_label(row) for row in rows]}


def _label(row: dict[str, Any]) -> dict[str, Tensor]:
    corners = torch.from_numpy(np.ascontiguousarray(row["corners"], np.float32)).reshape(-1, 4)
    middle, sides = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
    return {
        "class_labels": torch.from_numpy(np.ascontiguousarray(row["classes"], np.int64)),
        "boxes": torch.cat([middle, sides], dim=1),
        "weight": torch.tensor(row["weight"], dtype=torch.float32),
    }
