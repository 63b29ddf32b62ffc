"""Pictures that a run logs next to its numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app import storage
from app.errors import UserError

Images = dict[str, list[np.ndarray]]


def check(images: dict[str, Sequence[Any]]) -> Images:
    """Bring pictures into one form, H x W x 3 in uint8; grey ones of H x W get three channels.

    Raises:
        UserError: an array is not a picture, or the pictures of one name differ in size, which tensorboard cannot show.
    """
    checked: Images = {}
    for name, pictures in images.items():
        arrays = [np.asarray(picture) for picture in pictures]
        for array in arrays:
            if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
                raise UserError(
                    f"run.log_images: {name} has an array of {array.dtype} and shape {array.shape}: give height x "
                    "width, or height x width x 3, in uint8"
                )
        arrays = [np.repeat(array[..., None], 3, axis=2) if array.ndim == 2 else array for array in arrays]
        if len(shapes := {array.shape for array in arrays}) != 1:
            raise UserError(
                f"run.log_images: {name} has pictures of {len(shapes)} sizes: give at least one, of one size"
            )
        checked[name] = arrays
    return checked


def write(folder: Path, step: int, images: Images) -> None:
    """Write pictures as PNG: `eval/truth` as `eval/truth/step-00000040.png`; several end in `-0.png`, `-1.png`."""
    from PIL import Image

    files = storage.at(folder)
    for name, arrays in images.items():
        files.make(name)
        for index, array in enumerate(arrays):
            several = f"-{index}" if len(arrays) > 1 else ""
            # As a draft: a link with the picture's name would be followed otherwise.
            with files.drafted(f"{name}/step-{step:08d}{several}.png") as draft:
                Image.fromarray(array).save(draft, format="PNG")
