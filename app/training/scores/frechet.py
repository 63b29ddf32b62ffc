"""The Fréchet distance between two sets of images, in the space of their pixels."""

from collections.abc import Iterable

import torch
from torch import Tensor

from app.training.scores.base import Metric

SIDE = 8
# Steps between black and white to which features are rounded: enough that the rounding does not show.
LEVELS = 4080


class PixelFrechet(Metric):
    """Compare images with known ones by mean and covariance of their pixels, from 0 to 1, averaged down to 8 x 8.

    This is the distance of two normal distributions, |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), as in the Fréchet
    inception distance (Heusel et al. 2017), but of pixels, which need no network. It is 0 if mean and covariance agree,
    and it does not see details smaller than an eighth of the image. Sums are of integers, and so do not depend on their
    order.
    """

    def __init__(self, real_moments: tuple[Tensor, Tensor]):
        """Compare with images whose mean and covariance `moments_of` returned."""
        self.real_moments = real_moments
        self.features = len(real_moments[0])
        super().__init__(1 + self.features + self.features**2)

    def update(self, images: Tensor) -> None:  # type: ignore[override]  # generated images have no target
        """Add images, uint8 [samples, channels, height, width], whose sides are multiples of 8."""
        count, total, products = sums(images)
        self.state[0] += count
        self.state[1:] += torch.cat([total, products.flatten()])

    def scores(self) -> dict[str, float]:
        """Return the distance as `frechet`."""
        count, *rest = self.total
        total, products = torch.tensor(rest, dtype=torch.float64).split([self.features, self.features**2])
        there = moments(count, total, products.view(self.features, -1))
        return {"frechet": float(distance(*self.real_moments, *there))}


def moments_of(images: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of batches of images like those that `PixelFrechet.update` takes."""
    counts, totals, products = zip(*map(sums, images), strict=True)
    return moments(sum(counts), sum(totals), sum(products))


def sums(images: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return the number of images, the sum of their features, and the sum of the products of each two features.

    Features are whole numbers, and so are the sums, which float64 holds exactly up to 2**53: for 500 million images.
    """
    samples, channels, height, width = images.shape
    blocks = images.reshape(samples, channels, SIDE, height // SIDE, SIDE, width // SIDE).sum((3, 5), dtype=torch.int64)
    scale = 255 * (height // SIDE) * (width // SIDE)
    features = (blocks.flatten(1) * LEVELS // scale).double()
    return samples, features.sum(0), features.T @ features


def moments(count: float, total: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and covariance."""
    mean = total / count / LEVELS
    return mean, products / count / LEVELS**2 - torch.outer(mean, mean)


def distance(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> Tensor:
    """Return the Fréchet distance of two normal distributions."""
    root = _root(covariance)
    mixed = torch.linalg.eigvalsh(root @ other_covariance @ root).clamp(min=0).sqrt().sum()
    return (mean - other_mean).square().sum() + covariance.trace() + other_covariance.trace() - 2 * mixed


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
