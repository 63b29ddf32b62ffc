"""Images with boxes drawn over them: what is there, next to what was found."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from app.tasks.segmentation.panels import colours

GAP = 4  # pixels of white between the two
LETTERS, LINE = 10, 12  # size of the letters of a name, and the height of its ground
# Images of up to this side are magnified to about twice of it, larger ones to twice their own; so that thin lines and
# small names hide little of them. Boxes are drawn from this score on.
SIDE, SURE = 384, 0.3
LARGE = 1280  # longer side of a picture from which on lines and names grow with it
LIGHT = (0.3, 0.6, 0.1)  # what red, green and blue add to the brightness of a colour


def panel(image: Tensor, truth: dict[str, Tensor], detected: dict[str, Tensor], names: Sequence[str]) -> np.ndarray:
    """Draw one image twice: with its true boxes, and with those that were found.

    Args:
        image: [channels, height, width], of any range of values.
        truth: `boxes` (left, top, right, bottom, in pixels) and `labels`.
        detected: the same, and `scores`; boxes below SURE are left out.

    Returns:
        A picture, uint8 [height, width, 3].
    """
    sure = detected["scores"] >= SURE
    sure_boxes = {name: values[sure] for name, values in detected.items()}
    left, right = (_drawn(image, boxes, names) for boxes in (truth, sure_boxes))
    return np.concatenate([left, np.full((len(left), GAP, 3), 255, np.uint8), right], axis=1)


def _drawn(image: Tensor, boxes: dict[str, Tensor], names: Sequence[str]) -> np.ndarray:
    pixels = image.detach().float().cpu().numpy()
    pixels = np.repeat(pixels, 3, axis=0) if len(pixels) == 1 else pixels[:3]
    low, high = pixels.min(), pixels.max()
    shown = ((pixels - low) / max(high - low, 1e-9) * 255).astype(np.uint8).transpose(1, 2, 0)
    corners, labels = boxes["boxes"].cpu().numpy(), boxes["labels"].tolist()
    scores = boxes["scores"].tolist() if "scores" in boxes else None
    return drawn(shown, corners, labels, names, scores, 2 * max(1, SIDE // max(shown.shape[:2])))


def drawn(
    shown: np.ndarray,
    boxes: np.ndarray,
    labels: Sequence[int],
    names: Sequence[str],
    scores: Sequence[float] | np.ndarray | None = None,
    factor: int = 0,
) -> np.ndarray:
    """Draw boxes over a picture, magnified if it is small: uint8 [height, width, 3].

    Args:
        boxes: left, top, right, bottom, in pixels of the picture.
        labels: the place of each box's class among `names`.
        factor: by which the picture is magnified; 0: only a small one is.
    """
    from PIL import Image, ImageDraw, ImageFont

    factor = factor or max(1, 2 * SIDE // max(shown.shape[:2]))
    picture = Image.fromarray(shown.repeat(factor, axis=0).repeat(factor, axis=1))
    scale = max(1, round(max(picture.size) / LARGE))  # so that a photograph's boxes can be seen on a screen
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(scale * LETTERS)
    palette = colours(max(len(names) + 1, 3))[1:]  # of two, the second one would be white
    for index, (corners, label) in enumerate(zip(boxes.tolist(), labels, strict=True)):
        left, top, right, bottom = (factor * value for value in corners)
        colour = tuple(palette[label].tolist())
        draw.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=scale)
        text = names[label] if scores is None else f"{names[label]} {scores[index]:.2f}"
        width = draw.textlength(text, font) + 4
        place = _place_of_name(left, top, bottom, width, scale * LINE, *picture.size)
        draw.rectangle((*place, place[0] + width, place[1] + scale * LINE), fill=colour)
        draw.text((place[0] + 2, place[1] + 1), text, "black" if np.dot(colour, LIGHT) > 110 else "white", font)
    return np.asarray(picture)


def _place_of_name(
    left: float, top: float, bottom: float, width: float, height: int, across: int, down: int
) -> tuple[float, float]:
    """Return the upper left corner of a name: above its box, else below it, else in it; inside the picture."""
    y = top - height if top >= height else bottom + 1 if bottom + 1 + height < down else top
    return max(0.0, min(left, across - 1 - width)), max(0.0, min(y, down - 1 - height))
