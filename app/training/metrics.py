"""Scores from sums over all samples: the same bits on any number of ranks, combined in one collective.

Counts are exact, and sums of floats do not depend on the order of their terms. By itself, torchmetrics sums
floats in the order of arrival, and its import takes four seconds in each process, because it also imports audio, text
and plots.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from app.data.rows import IGNORED
from app.training import reproducible_sums

BOUND, COUNT = 2.0**40, 2**32  # over all ranks; below these sizes of a sum and counts of its terms, bits are fixed


class Metric:
    """Base class: `state` (float64 [size]) adds up over micro-batches and ranks, and scores follow from its total."""

    def __init__(self, size: int):
        self.state = torch.zeros(size, dtype=torch.float64)
        self.total: list[float] = []
        """The sum of all ranks' states; set before `scores` is called."""

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add a micro-batch."""
        raise NotImplementedError

    def scores(self) -> dict[str, float]:
        """Compute scores from `total`; undefined ones are left out."""
        raise NotImplementedError

    def alone(self) -> dict[str, float]:
        """Compute scores from this process's own samples; no collective."""
        self.total = self.state.tolist()
        return self.scores()


class Classification(Metric):
    """Accuracy, and F1 as the mean over classes that occur; from logits [rows, classes] and classes [rows], int64.

    For a class at each position, as in segmentation: [rows, classes, ...] and [rows, ...].
    """

    def __init__(self, classes: int, top: int = 0):
        """Prepare to count.

        Args:
            top: also score how often the right class is among the `top` largest logits; 0: do not.
        """
        super().__init__(classes * classes + 2)
        self.classes, self.top = classes, top

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add a micro-batch."""
        if self.top:
            rank = (predicted > predicted.gather(1, target.unsqueeze(1))).sum(1)
            self.state[-2:] += torch.stack([(rank < self.top).sum(), torch.tensor(rank.numel(), device=rank.device)])
        pairs = target.flatten() * self.classes + predicted.argmax(1).flatten()
        self.state[:-2] += torch.bincount(pairs, minlength=self.classes**2)

    def matrix(self) -> Tensor:
        """Return the confusion matrix over all ranks: float64 [target, predicted]."""
        return torch.tensor(self.total[:-2], dtype=torch.float64).view(self.classes, self.classes)

    def scores(self) -> dict[str, float]:
        """Return accuracy and f1, and top-N accuracy if `top` is set."""
        matrix = self.matrix()
        right, there = matrix.diag(), matrix.sum(0) + matrix.sum(1)
        found = {"accuracy": _share(right.sum(), matrix.sum()), "f1": (2 * right / there)[there > 0].mean().item()}
        return {**found, **({f"top{self.top}": _share(*self.total[-2:])} if self.top else {})}


class TokenAccuracy(Metric):
    """The share of tokens that are predicted right; from logits [..., vocabulary] and tokens [...], -100 left out."""

    def __init__(self, likeliest: Callable[[Tensor], Tensor] = lambda predicted: predicted.argmax(-1)):
        """Prepare to count.

        Args:
            likeliest: finds the tokens with the largest logits.
        """
        super().__init__(2)
        self.likeliest = likeliest

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add a micro-batch."""
        there = target != IGNORED
        self.state += torch.stack([((self.likeliest(predicted) == target) & there).sum(), there.sum()])

    def scores(self) -> dict[str, float]:
        """Return accuracy."""
        return {"accuracy": _share(*self.total)}


class Calibration(Metric):
    """How far probabilities of the chosen classes are from the share that is right; from logits and classes.

    The expected calibration error of Guo et al., 2017: samples are sorted into bins by the probability of their class.
    """

    def __init__(self, bins: int = 15):
        super().__init__(2 * bins + reproducible_sums.PARTS * bins)
        self.bins = bins

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add a micro-batch."""
        sure, chosen = (each.flatten() for each in predicted.double().softmax(1).max(1))
        right = (chosen == target.flatten()).double()
        place = (sure * self.bins).long().clamp(max=self.bins - 1)
        terms = torch.stack([torch.ones_like(sure), right, *reproducible_sums.parts_of(sure, BOUND, COUNT)])
        self.state += torch.zeros_like(self.state).view(-1, self.bins).index_add_(1, place, terms).flatten()

    def report(self) -> dict[str, Any]:
        """Return the error; and for each bin the samples, the share that is right, and the mean probability or None."""
        count, right, *parts = torch.tensor(self.total, dtype=torch.float64).view(-1, self.bins)
        sure = reproducible_sums.total(torch.stack(parts))
        error = ((right - sure).abs().sum() / count.sum()).item()
        of_bins = {"samples": count.tolist(), "right": _means(right, count), "probability": _means(sure, count)}
        return {"error": error, **of_bins}

    def scores(self) -> dict[str, float]:
        """Return no score: what it says is in `report`."""
        return {}


class MultiLabel(Metric):
    """Accuracy over all labels of all rows, and F1 as the mean over labels; from logits and 0 or 1, [rows, labels]."""

    def __init__(self, labels: int):
        super().__init__(4 * labels)

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add a micro-batch."""
        found, there = predicted > 0, target > 0.5
        cells = [found & there, found & ~there, ~found & there, ~found & ~there]
        self.state += torch.cat([cell.sum(0) for cell in cells])

    def scores(self) -> dict[str, float]:
        """Return accuracy and f1; a label that never occurs and is never predicted has an F1 of 0."""
        hit, wrong, missed, rest = torch.tensor(self.total, dtype=torch.float64).view(4, -1)
        f1 = 2 * hit / (2 * hit + wrong + missed).clamp(min=1)
        return {"accuracy": _share((hit + rest).sum(), sum(self.total)), "f1": f1.mean().item()}


class Regression(Metric):
    """Mean squared error; for one value a row, also Pearson's correlation, unless all values are equal."""

    def __init__(self):
        super().__init__(1 + 6 * reproducible_sums.PARTS)

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add a micro-batch of one value a row [rows], or of several [rows, values]."""
        x, y = predicted.double(), target.double()
        self.state[0] += x.numel()
        terms = ((x - y).square(), *((x, y, x * x, y * y, x * y) if x.ndim == 1 else ()))
        parts = [reproducible_sums.order_free([term], BOUND, COUNT) for term in terms]
        self.state[1 : 1 + len(parts) * reproducible_sums.PARTS] += torch.cat(parts)

    def scores(self) -> dict[str, float]:
        """Return mse, and pearson if it is defined."""
        count, *rest = self.total
        parts = [rest[i : i + reproducible_sums.PARTS] for i in range(0, len(rest), reproducible_sums.PARTS)]
        error, x, y, xx, yy, xy = (reproducible_sums.total(part) / count for part in parts)
        spread = (xx - x * x) * (yy - y * y)
        # Below the threshold, the variance is rounding error: all values are equal, or there is only one.
        told = min(xx - x * x, yy - y * y) > 1e-12 * max(xx, yy, 1e-300)
        return {"mse": error, **({"pearson": (xy - x * y) / math.sqrt(spread)} if told else {})}


def _means(sums: Tensor, counts: Tensor) -> list[float | None]:
    pairs = zip(sums.tolist(), counts.tolist(), strict=True)
    return [total / count if count else None for total, count in pairs]


def _share(part: float | Tensor, whole: float | Tensor) -> float:
    return float(part) / float(whole)
