"""builtin:scenes: scanned digits of many sizes on a noisy canvas, each with its box.

A scene is a function of its split and its number. The scenes to evaluate on have digits of their own: the last of
scikit-learn's, which no training scene shows.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from app.sampling.seeding import seed_of

# Part of each scene's seed: raise it when they change.
VERSION = 1
NAMES = tuple(str(digit) for digit in range(10))
SIDE = 96
# By split: the number of scenes, and the digits that they show.
SPLITS = {"train": (1000, slice(0, 1400)), "test": (200, slice(1400, None))}
FEWEST, MOST = 2, 7
SMALLEST, LARGEST = 12, 36
# A box is drawn around the pixels of a digit that are at least as bright as this, of 255.
INK = 60


def scene_rows(split: str) -> Iterator[dict[str, Any]]:
    """Yield the scenes of a split: `image`, `boxes` (left, top, right, bottom, in pixels) and `classes`."""
    from PIL import Image
    from sklearn.datasets import load_digits

    count, which = SPLITS[split]
    images, labels = load_digits(return_X_y=True)
    levels = (images.reshape(-1, 8, 8) * 255 / 16).round().astype(np.uint8)[which]
    for number in range(count):
        canvas, boxes, chosen = _scene(levels, list(SPLITS).index(split), number)
        image = Image.fromarray(canvas)
        yield {"image": image, "boxes": boxes, "classes": [int(labels[which][digit]) for digit in chosen]}


def _scene(levels: np.ndarray, *key: int) -> tuple[np.ndarray, list[list[float]], list[int]]:
    """Place digits one after the other, none over another one."""
    from PIL import Image

    generator = np.random.Generator(np.random.Philox(key=seed_of(VERSION, *key)))
    ground = int(generator.integers(0, 60))
    canvas = generator.integers(ground, ground + 30, (SIDE, SIDE)).astype(np.uint8)
    boxes: list[list[float]] = []
    chosen: list[int] = []
    for digit in generator.integers(0, len(levels), int(generator.integers(FEWEST, MOST + 1))).tolist():
        side = int(generator.integers(SMALLEST, LARGEST + 1))
        ink = np.asarray(Image.fromarray(levels[digit]).resize((side, side), Image.Resampling.BILINEAR))
        rows, columns = (np.flatnonzero((ink >= INK).any(axis)) for axis in (1, 0))
        left, top = generator.integers(0, SIDE - side + 1, 2).tolist()
        edges = [left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1]
        box = [float(edge) for edge in edges]
        if any(_touch(box, other) for other in boxes):
            continue
        place = canvas[top : top + side, left : left + side]
        np.maximum(place, ink, out=place)
        boxes.append(box)
        chosen.append(digit)
    return canvas, boxes, chosen


def _touch(one: list[float], other: list[float]) -> bool:
    """Tell whether two boxes overlap, or have less than a pixel between them."""
    return all(one[axis] <= other[axis + 2] and other[axis] <= one[axis + 2] for axis in (0, 1))
