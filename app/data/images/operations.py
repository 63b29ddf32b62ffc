"""RandAugment: some of fourteen operations on an image, drawn for each sample (Cubuk et al., 2020)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from app.data.config import Augment
from app.errors import UserError

MOST = 30  # the magnitude at which an operation is strongest
_GREY = 128  # what appears where an image is moved


class Operations:
    """Apply operations to an image before other changes are drawn."""

    def __init__(self, settings: Augment, draw: Callable[[Any, np.random.Generator], Any]):
        """Prepare.

        Args:
            draw: draws the other changes.

        Raises:
            UserError: a setting is out of range.
        """
        if settings.operations < 0:
            raise UserError(f"--augment.operations {settings.operations}: must be 0 or more, for example 2")
        if not 0 <= settings.magnitude <= MOST:
            raise UserError(f"--augment.magnitude {settings.magnitude:g}: must be from 0 to {MOST}, for example 9")
        self.settings, self.draw = settings, draw

    def __call__(self, row: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        """Return the row with its pixels changed, and with what `draw` adds."""
        from PIL import Image

        pixels = row["pixels"]
        image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
        for _ in range(self.settings.operations):
            name = list(OPERATIONS)[int(random.integers(len(OPERATIONS)))]
            sign = 1 if random.random() < 0.5 else -1
            image = OPERATIONS[name](image, self.settings.magnitude / MOST, sign)
        changed = np.asarray(image)
        changed = changed[None] if changed.ndim == 2 else changed.transpose(2, 0, 1)
        return self.draw({**row, "pixels": changed}, random)


def _enhanced(kind: str) -> Callable[[Any, float, int], Any]:
    def enhance(image: Any, strength: float, sign: int) -> Any:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, kind)(image).enhance(1 + 0.9 * strength * sign)

    return enhance


def _plain(kind: str, *, argument: Callable[[float], int] | None = None) -> Callable[[Any, float, int], Any]:
    def apply(image: Any, strength: float, sign: int) -> Any:
        from PIL import ImageOps

        return getattr(ImageOps, kind)(image, *([argument(strength)] if argument else []))

    return apply


def _moved(matrix: Callable[[float, tuple[int, int]], tuple[float, ...]]) -> Callable[[Any, float, int], Any]:
    def move(image: Any, strength: float, sign: int) -> Any:
        from PIL import Image

        values, how = matrix(strength * sign, image.size), Image.Resampling.NEAREST
        return image.transform(image.size, Image.Transform.AFFINE, values, how, fillcolor=_grey(image))

    return move


def _turned(image: Any, strength: float, sign: int) -> Any:
    return image.rotate(30 * strength * sign, fillcolor=_grey(image))


def _grey(image: Any) -> int | tuple[int, ...]:
    return _GREY if len(image.getbands()) == 1 else (_GREY,) * len(image.getbands())


# The ranges are those of the paper's image classifiers.
OPERATIONS: dict[str, Callable[[Any, float, int], Any]] = {
    "identity": lambda image, strength, sign: image,
    "autocontrast": _plain("autocontrast"),
    "equalize": _plain("equalize"),
    "rotate": _turned,
    "solarize": _plain("solarize", argument=lambda strength: int(256 * (1 - strength))),
    "color": _enhanced("Color"),
    "posterize": _plain("posterize", argument=lambda strength: 8 - round(4 * strength)),
    "contrast": _enhanced("Contrast"),
    "brightness": _enhanced("Brightness"),
    "sharpness": _enhanced("Sharpness"),
    "shear_x": _moved(lambda strength, size: (1, 0.3 * strength, 0, 0, 1, 0)),
    "shear_y": _moved(lambda strength, size: (1, 0, 0, 0.3 * strength, 1, 0)),
    "translate_x": _moved(lambda strength, size: (1, 0, 0.45 * strength * size[0], 0, 1, 0)),
    "translate_y": _moved(lambda strength, size: (1, 0, 0, 0, 1, 0.45 * strength * size[1])),
}
