"""Mixing of training images in pairs: mixup (Zhang et al., 2018) and cutmix (Yun et al., 2019).

Which other image a sample is mixed with, and how, is a function of (seed, epoch, sample id), so it depends neither on
the other samples of its micro-batch nor on the layout.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.data.config import Augment
from app.data.rows import Rows
from app.errors import UserError


class Mix:
    """Draw for each row another one, changed in the same way, and how the two are mixed."""

    def __init__(self, settings: Augment, rows: Rows, draw: Callable[[Any, np.random.Generator], Any]):
        """Mix as the settings say.

        Args:
            rows: all training rows.
            draw: changes one row.

        Raises:
            UserError: a setting is out of range.
        """
        for name in ("mixup", "cutmix"):
            if not 0 <= (value := getattr(settings, name)) < np.inf:
                raise UserError(f"--augment.{name} {value}: must be 0 or more, for example 0.2 for mixup, 1 for cutmix")
        self.settings, self.rows, self.draw = settings, rows, draw

    def __call__(self, row: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        """Return a row with `other`, `share` (of the row itself) and `cut`: the box that shows the other image."""
        row = self.draw(row, random)
        ways = [name for name in ("mixup", "cutmix") if getattr(self.settings, name)]
        way = ways[int(random.integers(len(ways)))]
        share = float(random.beta(*[getattr(self.settings, way)] * 2))
        other = self.draw(self.rows[int(random.integers(len(self.rows)))], random)
        cut = None
        if way == "cutmix":
            cut, share = _box(share, *random.random(2), *row["pixels"].shape[-2:])
        return {**row, "other": other, "share": share, "cut": cut}


def _box(share: float, x: float, y: float, height: int, width: int) -> tuple[tuple[int, int, int, int], float]:
    """Place a box with 1 - share of the image's area around a point.

    Returns:
        Its left, top, right and bottom in pixels, and the share of the image that is outside of it.
    """
    side = np.sqrt(1 - share) / 2
    left, right = (int(np.clip((x + edge) * width, 0, width)) for edge in (-side, side))
    top, bottom = (int(np.clip((y + edge) * height, 0, height)) for edge in (-side, side))
    return (left, top, right, bottom), 1 - (right - left) * (bottom - top) / (width * height)


def mixed(plain: dict[str, Tensor], other: dict[str, Tensor], rows: list[dict]) -> dict[str, Tensor]:
    """Mix the inputs of a micro-batch with those of the other images.

    Returns:
        `pixel_values`, `labels`, `other_labels` and `share` (float32 [rows]).
    """
    share = torch.tensor([row["share"] for row in rows], dtype=torch.float32)
    pixels, others = plain["pixel_values"], other["pixel_values"]
    blended = share[:, None, None, None] * pixels + (1 - share)[:, None, None, None] * others
    for image, one, two, row in zip(blended, pixels, others, rows, strict=True):
        if row["cut"] is not None:
            left, top, right, bottom = row["cut"]
            image.copy_(one)
            image[:, top:bottom, left:right] = two[:, top:bottom, left:right]
    return {**plain, "pixel_values": blended, "other_labels": other["labels"], "share": share}
