"""Augmentation, drawn for each sample with its own generator, and applied to whole micro-batches."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from app.data.config import Augment, BoxAugment
from app.data.images.mixing import Mix, mixed
from app.data.images.operations import Operations
from app.data.images.processor import ImageProcessor
from app.data.mixtures.joined import MixedRows
from app.data.rows import Rows
from app.data.streams.samples import StreamedSamples
from app.errors import UserError


class Draw:
    """Draw the changes of an image: where each of its pixels comes from, and the box that is blanked.

    Pass it to `run.batches` as `augment`; ImageCollate applies the changes.
    """

    def __init__(self, settings: Augment | BoxAugment):
        check(settings)
        self.settings = settings

    def __call__(self, row: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        """Return a row with `view`, [2, 3] for affine_grid, and `box`: left, top, right, bottom, in fractions."""
        wanted = self.settings
        mirrored, angle, scale, right, down, blank, *box = random.random(10)
        height, width = row["pixels"].shape[-2:]
        angle = math.radians(wanted.rotate) * (2 * angle - 1)
        scale = 1 / (1 + wanted.zoom * (2 * scale - 1))
        sign = -1.0 if mirrored < wanted.flip else 1.0
        cosine, sine = scale * math.cos(angle), scale * math.sin(angle)
        # affine_grid measures both sides from -1 to 1, which would shear an image that is not square.
        view = [
            [sign * cosine, -sine * height / width, 2 * wanted.shift * (2 * right - 1)],
            [sign * sine * width / height, cosine, 2 * wanted.shift * (2 * down - 1)],
        ]
        return {**row, "view": np.array(view, np.float32), "box": _box(*box) if blank < wanted.erase else NO_BOX}


def augmentation(settings: Augment, rows: Rows) -> Callable[[Any, np.random.Generator], Any]:
    """Return what changes a training row, for `augment` of `run.batches`.

    Args:
        rows: all training rows, some of which are mixed into others.

    Raises:
        UserError: a setting is out of range, or these rows cannot be mixed.
    """
    mixes = bool(settings.mixup or settings.cutmix)
    if mixes and isinstance(rows, MixedRows):
        raise UserError(
            "--augment.mixup, --augment.cutmix: they would mix images from all sources of --data.mix, whatever its "
            "weights say: leave them out"
        )
    if mixes and isinstance(rows, StreamedSamples):
        raise UserError(
            "--augment.mixup, --augment.cutmix: they mix images from anywhere in the data, for which chunks all over "
            "streamed data would be fetched: leave them out"
        )
    change: Callable[[Any, np.random.Generator], Any] = Draw(settings)
    if settings.operations:
        change = Operations(settings, change)
    return Mix(settings, rows, change) if mixes else change


NO_BOX = (0.0, 0.0, 0.0, 0.0)


def _box(left: float, top: float, width: float, height: float) -> tuple[float, float, float, float]:
    """Place a rectangle with sides of a quarter to a half inside the image."""
    width, height = 0.25 + width / 4, 0.25 + height / 4
    left, top = left * (1 - width), top * (1 - height)
    return left, top, left + width, top + height


class ImageCollate:
    """Make `pixel_values` (float32, normalised) and `labels` (int64) of rows, with the changes drawn for each."""

    def __init__(self, mean: list[float], deviation: list[float], scale: float):
        """Normalise pixels as (pixel x scale - mean) / deviation, channel by channel."""
        shape = (1, -1, 1, 1)
        self.factor = scale / torch.tensor(deviation).reshape(shape)
        self.offset = torch.tensor(mean).reshape(shape) / torch.tensor(deviation).reshape(shape)

    @classmethod
    def of(cls, processor: ImageProcessor) -> "ImageCollate":
        """Normalise as an image processor of transformers does."""
        channels = len(processor.image_mean) if processor.do_normalize else 1
        mean = processor.image_mean if processor.do_normalize else [0.0] * channels
        deviation = processor.image_std if processor.do_normalize else [1.0] * channels
        return cls(list(mean), list(deviation), processor.rescale_factor if processor.do_rescale else 1.0)

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        """Return a micro-batch; of rows that are mixed, with `other_labels` and `share`."""
        plain = self._plain(rows)
        return mixed(plain, self._plain([row["other"] for row in rows]), rows) if "other" in rows[0] else plain

    def _plain(self, rows: list[dict]) -> dict[str, Tensor]:
        pixels = torch.from_numpy(np.stack([row["pixels"] for row in rows])).float()
        if "view" in rows[0]:
            views = torch.from_numpy(np.stack([row["view"] for row in rows]))
            grid = affine_grid(views, list(pixels.shape), align_corners=False)
            pixels = grid_sample(pixels, grid, padding_mode="zeros", align_corners=False)
        pixels = pixels * self.factor - self.offset
        if "box" in rows[0] and any(any(row["box"]) for row in rows):
            pixels = pixels.masked_fill(_inside([row["box"] for row in rows], *pixels.shape[-2:]), 0.0)
        labels = {"labels": torch.from_numpy(np.array([row["labels"] for row in rows]))} if "labels" in rows[0] else {}
        return {"pixel_values": pixels, **labels}


def _inside(boxes: list[tuple], height: int, width: int) -> Tensor:
    """Mark the pixels whose centres are in the box of their image."""
    left, top, right, bottom = torch.tensor(boxes)[:, :, None].unbind(1)
    x, y = (torch.arange(width) + 0.5) / width, (torch.arange(height) + 0.5) / height
    across, along = (left <= x) & (x < right), (top <= y) & (y < bottom)
    return (along[:, :, None] & across[:, None, :])[:, None]


def check(settings: Augment | BoxAugment) -> None:
    """Raise a UserError for settings out of range."""
    limits = {"flip": 1.0, "shift": 1.0, "zoom": 0.99, "rotate": 180.0, "erase": 1.0}
    for name, most in limits.items():
        if not 0 <= (value := getattr(settings, name)) <= most:
            raise UserError(f"--augment.{name} {value}: must be from 0 to {most:g}")
