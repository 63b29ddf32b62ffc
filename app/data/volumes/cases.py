"""Images with masks, in memory or memory-mapped: patches of them for training, whole ones for evaluation."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from app.data.rows import IGNORED
from app.sampling.hashing import key_of


class Case:
    """An image [channels, *sides] and its mask [*sides], both as stored."""

    def __init__(self, name: str, image: np.ndarray, mask: np.ndarray, about: dict[str, Any]):
        """Describe a case; `about` is the result of `volumes.measure`."""
        self.name, self.image, self.mask, self.about = name, image, mask, about
        shape = (-1,) + (1,) * mask.ndim
        self.mean, self.deviation = (np.float32(about[key]).reshape(shape) for key in ("mean", "deviation"))

    def slices(self) -> list["Case"]:
        """Cut a volume into images."""
        axis, digits = self.about["axis"], len(str(self.mask.shape[self.about["axis"] - 1]))
        pages = range(self.image.shape[axis])
        images, masks = np.moveaxis(self.image, axis, 0), np.moveaxis(self.mask, axis - 1, 0)
        return [Case(f"{self.name}-{page:0{digits}}", images[page], masks[page], self.about) for page in pages]


class Cases(Sequence):
    """Whole images.

    A row is a dict of `image`, float32 [channels, *sides], each channel with mean 0 and deviation 1, and `mask`, int64
    [1, *sides], the classes from 0 on; IGNORED where a voxel counts nowhere.
    """

    def __init__(
        self,
        cases: list[Case],
        values: np.ndarray,
        names: Sequence[str],
        channels: int,
        window: tuple[int, ...],
        overlap: float,
        ignored: Sequence[int] = (),
        palette: np.ndarray | None = None,
    ):
        """Collect cases.

        Args:
            values: the masks' values, in the order of the classes.
            channels: channels of a row's image; those of an image with one channel are copies of it.
            window: sides of the window that a model sees at a time, in voxels.
            overlap: fraction of its sides by which a window overlaps the next one.
            ignored: the masks' values that count nowhere.
            palette: the classes' colours in pictures, uint8 [classes, 3]; None: they have none of their own.
        """
        self.cases, self.values, self.names, self.channels = cases, values, list(names), channels
        self.ignored, self.palette = tuple(ignored), palette
        self.window, self.overlap = window, overlap
        self.fingerprint = key_of(*values, *(case.about["digest"] for case in cases), len(cases))

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:  # type: ignore[override]  # no slices
        return self.read(self.cases[index])

    def read(self, case: Case, window: tuple[slice, ...] = ()) -> dict[str, np.ndarray]:
        """Read a case, or only a window of it."""
        image = (case.image[(slice(None), *window)].astype(np.float32) - case.mean) / case.deviation
        stored = case.mask[window]
        mask = np.searchsorted(self.values, stored)
        if self.ignored:
            mask[np.isin(stored, self.ignored)] = IGNORED
        if len(image) != self.channels:
            image = np.repeat(image, self.channels, axis=0)
        return {"image": image, "mask": mask[None]}


class Patches(Sequence):
    """Patches as samples: sample i is patch i % `each` of image i // `each`, and `cut` cuts it out."""

    def __init__(self, cases: Cases, each: int, augment: Sequence[str]):
        self.cases, self.patch, self.each, self.augment = cases, cases.window, each, frozenset(augment)
        self.fingerprint = cases.fingerprint

    def __len__(self) -> int:
        return len(self.cases) * self.each

    def __getitem__(self, index: int) -> Case:  # type: ignore[override]  # no slices
        return self.cases.cases[index // self.each]

    def cut(self, case: Case, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """Cut a patch out of an image, and change it. Images smaller than a patch are mirrored at their edges."""
        scale = 2.0 ** generator.uniform(-1, 1) if "scale" in self.augment else 1.0
        sides = [max(round(side / scale), 1) for side in self.patch]
        starts = [
            int(generator.integers(max(length - side, 0) + 1))
            for length, side in zip(case.mask.shape, sides, strict=True)
        ]
        cut = tuple(slice(start, start + side) for start, side in zip(starts, sides, strict=True))
        row = self.cases.read(case, cut)
        lacking = [(0, side - length) for length, side in zip(row["mask"].shape[1:], sides, strict=True)]
        if any(after for _, after in lacking):
            row = {name: np.pad(array, [(0, 0), *lacking], mode="symmetric") for name, array in row.items()}
        row = self._turned(_resized(row, self.patch), generator)
        if "intensity" in self.augment:
            contrast, brightness = generator.uniform(0.9, 1.1), generator.uniform(-0.1, 0.1)
            row["image"] = row["image"] * np.float32(contrast) + np.float32(brightness)
        return row

    def _turned(self, row: dict[str, np.ndarray], generator: np.random.Generator) -> dict[str, np.ndarray]:
        axes = range(1, len(self.patch) + 1)
        if "flip" in self.augment:
            flipped = tuple(axis for axis in axes if generator.random() < 0.5)
            row = {name: np.flip(array, flipped) for name, array in row.items()}
        if "mirror" in self.augment and generator.random() < 0.5:
            row = {name: np.flip(array, -1) for name, array in row.items()}
        for plane in combinations(axes, 2) if "rotate" in self.augment else ():
            if self.patch[plane[0] - 1] == self.patch[plane[1] - 1]:
                turns = int(generator.integers(4))
                row = {name: np.rot90(array, turns, plane) for name, array in row.items()}
        return row


def _resized(row: dict[str, np.ndarray], sides: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Bring image and mask to these sides: the image by linear interpolation, the mask by its nearest voxels."""
    if row["mask"].shape[1:] == sides:
        return row
    linear = "bilinear" if len(sides) == 2 else "trilinear"
    image = interpolate(torch.from_numpy(row["image"][None]), sides, mode=linear, align_corners=False)[0]
    mask = interpolate(torch.from_numpy(row["mask"][None].astype(np.float64)), sides, mode="nearest-exact")[0]
    return {"image": image.numpy(), "mask": mask.numpy().astype(np.int64)}
