"""Images with boxes drawn over them: what is there, next to what was found."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from app.tasks.segmentation.panels import colours

GAP = 4  # pixels of white between the two
LINE = 13  # height of a name above its box
# Images are magnified to about this side, and boxes drawn from this score on.
SIDE, SURE = 384, 0.3


def panel(image: Tensor, truth: dict[str, Tensor], found: dict[str, Tensor], names: Sequence[str]) -> np.ndarray:
    """Draw one image twice: with its true boxes, and with those that were found.

    Args:
        image: [channels, height, width], of any range of values.
        truth: `boxes` (left, top, right, bottom, in pixels) and `labels`.
        found: the same, and `scores`; boxes below SURE are left out.

    Returns:
        A picture, uint8 [height, width, 3].
    """
    sure = found["scores"] >= SURE
    kept = {name: values[sure] for name, values in found.items()}
    left, right = (_drawn(image, boxes, names) for boxes in (truth, kept))
    return np.concatenate([left, np.full((len(left), GAP, 3), 255, np.uint8), right], axis=1)


def _drawn(image: Tensor, boxes: dict[str, Tensor], names: Sequence[str]) -> np.ndarray:
    from PIL import Image, ImageDraw, ImageFont

    pixels = image.detach().float().cpu().numpy()
    pixels = np.repeat(pixels, 3, axis=0) if len(pixels) == 1 else pixels[:3]
    low, high = pixels.min(), pixels.max()
    shown = ((pixels - low) / max(high - low, 1e-9) * 255).astype(np.uint8).transpose(1, 2, 0)
    factor = max(1, SIDE // max(shown.shape[:2]))
    picture = Image.fromarray(shown.repeat(factor, axis=0).repeat(factor, axis=1))
    draw, font, palette = ImageDraw.Draw(picture), ImageFont.load_default(11), colours(len(names) + 1)[1:]
    scores = boxes.get("scores")
    for index, (corners, label) in enumerate(zip(boxes["boxes"].tolist(), boxes["labels"].tolist(), strict=True)):
        left, top, right, bottom = (factor * value for value in corners)
        colour = tuple(palette[label].tolist())
        draw.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=2)
        text = names[label] if scores is None else f"{names[label]} {scores[index]:.2f}"
        draw.text((left, top - LINE if top >= LINE else bottom + 1), text, colour, font)
    return np.asarray(picture)
