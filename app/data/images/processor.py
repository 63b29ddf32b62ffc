"""What Samestep reads and sets of the image processors of transformers."""

from typing import Any, Protocol


class ImageProcessor(Protocol):
    """An image processor of transformers, whose base class declares none of these."""

    size: Any
    do_center_crop: bool
    do_rescale: bool
    rescale_factor: float
    do_normalize: bool
    image_mean: list[float]
    image_std: list[float]

    def __call__(self, images: Any, **settings: Any) -> dict[str, Any]:
        """Return `pixel_values`, a list of images [channels, height, width]."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return the settings."""
        ...
