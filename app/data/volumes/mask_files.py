"""Masks as files of the kind that their images are: PNG, TIFF of several pages, or NIfTI."""

from pathlib import Path

import numpy as np

from app.data.volumes import nifti
from app.errors import UserError

LARGEST = {"L": 255, "I;16": 65535}  # of PIL's modes for PNG and TIFF


def mask_name(image: Path, pages: bool) -> str:
    """Return the name of an image's mask.

    Args:
        pages: the image is a volume.
    """
    if nifti.is_nifti(image):
        return image.name
    return f"{image.stem}.{'tif' if pages else 'png'}"


def write_shares(file: Path, shares: np.ndarray, image: Path) -> None:
    """Write the probabilities of classes [classes, *sides] as an array with the axes of the mask's file."""
    if nifti.is_nifti(image):
        shares = np.stack([nifti.as_stored(share, image) for share in shares])
    np.save(file, shares)


def write_mask(file: Path, mask: np.ndarray, image: Path, colours: dict[int, list[int]] | None = None) -> None:
    """Write a mask [*sides], with the axes of `read_image`, which has read its image.

    Args:
        colours: of the values, red, green and blue. A mask of NIfTI has numbers whatever they are.
    """
    if nifti.is_nifti(image):
        nifti.write_numbers(file, mask, image)
        return
    from PIL import Image

    if colours:
        lookup = np.zeros((max(colours) + 1, 3), np.uint8)
        lookup[list(colours)] = list(colours.values())
        shown = lookup[mask]
    else:
        kind = next((np.uint8 if most == 255 else np.uint16 for most in LARGEST.values() if mask.max() <= most), None)
        if kind is None or mask.min() < 0:
            raise UserError(f"{file.name}: the value {mask.max() if kind is None else mask.min()} does not fit into it")
        shown = mask.astype(kind)
    pages = [Image.fromarray(page) for page in (shown if mask.ndim == 3 else shown[None])]
    if mask.ndim == 3:
        pages[0].save(file, save_all=True, append_images=pages[1:])
    else:
        pages[0].save(file)
