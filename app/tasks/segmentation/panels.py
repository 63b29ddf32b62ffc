"""Segmentations as pictures: the image, the truth and the prediction side by side."""

import colorsys

import numpy as np
from torch import Tensor

from app.data.rows import IGNORED

GAP = 4  # pixels of white between the three
# Of ignored voxels: the first that no class has, from the middle outwards.
GREYS = sorted(range(256), key=lambda grey: abs(grey - 128))


def panel(
    image: Tensor, truth: Tensor, predicted: Tensor, classes: int, palette: np.ndarray | None = None
) -> np.ndarray:
    """Draw one image, or the middle slice of a volume.

    Args:
        image: [channels, *sides].
        truth, predicted: classes, [1, *sides]. Where truth is IGNORED, both are shown in a colour of its own.
        palette: the classes' colours, uint8 [classes, 3]. Default: those of `colours`.

    Returns:
        A picture, uint8 [height, width, 3].
    """
    flat = [_flat(tensor.cpu().numpy()) for tensor in (image, truth, predicted)]
    palette = colours(classes) if palette is None else palette
    nothing = next(grey for grey in GREYS if not (palette == grey).all(1).any())
    ignored = flat[1][0] == IGNORED
    drawn = [np.where(ignored[..., None], nothing, palette[np.where(ignored, 0, labels[0])]) for labels in flat[1:]]
    parts = [_shown(flat[0]), *(picture.astype(np.uint8) for picture in drawn)]
    gap = np.full((parts[0].shape[0], GAP, 3), 255, np.uint8)
    return np.concatenate([parts[0], gap, parts[1], gap, parts[2]], axis=1)


def overlay(image: np.ndarray, predicted: np.ndarray, classes: int, palette: np.ndarray | None = None) -> np.ndarray:
    """Draw the predicted classes over an image, or over the middle slice of a volume.

    Args:
        image: [channels, *sides].
        predicted: classes, [*sides].
        palette: the classes' colours, uint8 [classes, 3]. Default: those of `colours`; the first is left as it is.

    Returns:
        A picture, uint8 [height, width, 3].
    """
    below, labels = _shown(_flat(image)).astype(np.float32), _flat(predicted[None])[0]
    mixed = (below + (colours(classes) if palette is None else palette)[labels]) / 2
    if palette is None:
        mixed = np.where((labels == 0)[..., None], below, mixed)
    return mixed.astype(np.uint8)


def colours(classes: int) -> np.ndarray:
    """Give each class a colour, uint8 [classes, 3]: the first is black and, if there are two, the other white."""
    if classes == 2:
        return np.array([[0, 0, 0], [255, 255, 255]], np.uint8)
    hues = (colorsys.hsv_to_rgb((index - 1) / (classes - 1), 0.75, 1.0) for index in range(1, classes))
    return (np.array([(0, 0, 0), *hues]) * 255).astype(np.uint8)


def _flat(array: np.ndarray) -> np.ndarray:
    """Take the middle slice of a volume along its shortest side."""
    if array.ndim < 4:
        return array
    axis = 1 + int(np.argmin(array.shape[1:]))
    return np.take(array, array.shape[axis] // 2, axis)


def _shown(image: np.ndarray) -> np.ndarray:
    """Stretch an image's values from black to white; three channels or more begin with red, green and blue."""
    image = image[:3] if len(image) >= 3 else np.repeat(image[:1], 3, axis=0)
    low, high = np.percentile(image, (1, 99))
    scaled = np.clip((image - low) / max(high - low, 1e-9), 0, 1)
    return np.moveaxis((scaled * 255).astype(np.uint8), 0, -1)
