"""Pictures made of numbers: a confusion matrix, a sheet of images."""

import math
from collections.abc import Sequence

import numpy as np

CELL, MARGIN = 28, 6
# With more classes than these, nobody could read the cells.
MOST_CLASSES = 100
LONGEST_NAME = 16


def confusion(counts: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Draw a confusion matrix: a row for each true class, a column for each predicted one, counts in the cells.

    A cell is the darker, the larger its share of the row.

    Returns:
        A picture, uint8 [height, width, 3].
    """
    from PIL import Image, ImageDraw, ImageFont

    font, classes = ImageFont.load_default(11), len(names)
    names = [name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 2] + ".." for name in names]
    room = int(max(font.getlength(name) for name in names)) + 2 * MARGIN
    side = room + classes * CELL + MARGIN
    picture = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(picture)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    for true in range(classes):
        draw.text((room - MARGIN, room + (true + 0.5) * CELL), names[true], "black", font, "rm")
        # Names of columns are drawn horizontally, and then turned.
        upright = Image.new("RGB", (room, CELL), "white")
        ImageDraw.Draw(upright).text((MARGIN, CELL / 2), names[true], "black", font, "lm")
        picture.paste(upright.transpose(Image.Transpose.ROTATE_90), (room + true * CELL, 0))
        for predicted in range(classes):
            share, left, top = shares[true, predicted], room + predicted * CELL, room + true * CELL
            colour = tuple(int(255 + share * (dark - 255)) for dark in (20, 60, 120))
            draw.rectangle((left, top, left + CELL - 1, top + CELL - 1), colour, (220, 220, 220))
            if count := int(counts[true, predicted]):
                ink = "white" if share > 0.5 else "black"
                draw.text((left + CELL / 2, top + CELL / 2), _short(count), ink, font, "mm")
    return np.asarray(picture)


def sheet(images: np.ndarray, columns: int = 0, gap: int = 1, magnify: int = 1) -> np.ndarray:
    """Lay images out in rows.

    Args:
        images: uint8 [images, height, width, channels], of 1 or 3 channels.
        columns: images in a row; 0: as many as make a square.
        gap: pixels between images.
        magnify: sides of the square that each pixel of an image becomes, in pixels.

    Returns:
        A picture, uint8 [height, width, 3].
    """
    images = images.repeat(magnify, axis=1).repeat(magnify, axis=2)
    count, height, width, _ = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    picture = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 128, np.uint8)
    for index, image in enumerate(images):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        picture[top : top + height, left : left + width] = image
    return picture


def _short(count: int) -> str:
    return str(count) if count < 10_000 else f"{count // 1000}k"
