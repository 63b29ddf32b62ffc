"""Scores from sums over all samples: the same bits on any number of ranks, combined in one collective.

Counts are exact, and sums of floats do not depend on the order of their terms. By itself, torchmetrics sums
floats in the order of arrival, and its import takes four seconds in each process, because it also imports audio, text
and plots.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from app.data.rows import IGNORED
from app.training.exact import reproducible_sums

BOUND, COUNT = 2.0**40, 2**32  # over all ranks; below these sizes of a sum and counts of its terms, bits are fixed

CONSTANT = 0.01  # share of the true values' deviation below which predictions count as constant

TRY = "train longer, or try another --optim.lr (a tenth, or ten times as much)"
"""What to do about a model that has learnt nothing."""


class Metric:
    """Base class: `state` (float64 [size]) adds up over micro-batches and ranks, and scores follow from its total."""

    meanings: Mapping[str, str] = {}
    """What a score is, by its name, where the name alone does not say it; shown next to the number."""

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

    def fault(self) -> str:
        """Say from `total` what makes these scores worth little, and what to try; empty if nothing does."""
        return ""

    def in_depth(self) -> "list[Metric]":
        """Return further metrics, updated with the same values, that `python -m app evaluate` alone measures."""
        return []

    def report(self) -> dict[str, Any]:
        """Return from `total` what `python -m app evaluate` shows besides the scores."""
        return {}

    def alone(self) -> dict[str, float]:
        """Compute scores from this process's own samples; no collective."""
        self.total = self.state.tolist()
        return self.scores()


class Classification(Metric):
    """Accuracy, and F1 as the mean over classes that occur; from logits [rows, classes] and classes [rows], int64.

    Of two classes, also the F1 of the second one, the positive class. For a class at each position, as in
    segmentation: [rows, classes, ...] and [rows, ...].
    """

    def __init__(self, classes: int | Sequence[str], top: int = 0):
        """Prepare to count.

        Args:
            classes: their names, in the order of the logits, or their number.
            top: also score how often the right class is among the `top` largest logits; 0: do not.
        """
        self.names = [str(i) for i in range(classes)] if isinstance(classes, int) else list(classes)
        self.classes, self.top = len(self.names), top
        super().__init__(self.classes**2 + 2)
        self.meanings = {"f1": "mean over the classes", "f1_positive": f"of the class {self.names[-1]}"}

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
        """Return accuracy and f1, f1_positive of two classes, and top-N accuracy if `top` is set."""
        matrix = self.matrix()
        right, there = matrix.diag(), matrix.sum(0) + matrix.sum(1)
        found = {"accuracy": _share(right.sum(), matrix.sum()), "f1": (2 * right / there)[there > 0].mean().item()}
        if self.classes == 2 and there[1]:
            found["f1_positive"] = (2 * right[1] / there[1]).item()
        return {**found, **({f"top{self.top}": _share(*self.total[-2:])} if self.top else {})}

    def fault(self) -> str:
        """Say that one class alone is predicted, where the data have several."""
        matrix = self.matrix()
        taken, there = matrix.sum(0).nonzero().flatten().tolist(), matrix.sum(1).nonzero().flatten().tolist()
        if len(taken) != 1 or len(there) < 2:
            return ""
        return f"every prediction is {self.names[taken[0]]}, one of {len(there)} classes in the data: {TRY}"

    def in_depth(self) -> "list[Metric]":
        """Return the calibration of the probabilities."""
        return [Calibration()]

    def report(self) -> dict[str, Any]:
        """Return `classes`, precision, recall, f1 and samples of each by name, and the `confusion` matrix."""
        matrix = self.matrix()
        classes = {}
        for name, right, there, taken in zip(self.names, matrix.diag(), matrix.sum(1), matrix.sum(0), strict=True):
            classes[name] = of_counts(float(right), float(taken), float(there), "samples")
        return {"classes": classes, "confusion": matrix.tolist()}


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
        """Return as `calibration` the error; and for each bin samples, share that is right, and mean probability."""
        count, right, *parts = torch.tensor(self.total, dtype=torch.float64).view(-1, self.bins)
        sure = reproducible_sums.total(torch.stack(parts))
        error = ((right - sure).abs().sum() / count.sum()).item()
        of_bins = {"samples": count.tolist(), "right": _means(right, count), "probability": _means(sure, count)}
        return {"calibration": {"error": error, **of_bins}}

    def scores(self) -> dict[str, float]:
        """Return no score: what it says is in `report`."""
        return {}


class MultiLabel(Metric):
    """Accuracy over all labels of all rows, and F1 as the mean over labels; from logits and 0 or 1, [rows, labels]."""

    meanings = {"f1": "mean over the labels"}

    def __init__(self, labels: int | Sequence[str]):
        """Prepare to count.

        Args:
            labels: their names, in the order of the logits, or their number.
        """
        super().__init__(4 * (labels if isinstance(labels, int) else len(labels)))

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

    def fault(self) -> str:
        """Say that no label is ever predicted, or each one always."""
        hit, wrong, missed, rest = (part.sum() for part in torch.tensor(self.total, dtype=torch.float64).view(4, -1))
        none, every = not hit + wrong and missed, not missed + rest and wrong
        return f"{'no' if none else 'every'} label is predicted of any row: {TRY}" if none or every else ""


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
        error, x, y, xx, yy, xy = self._means()
        spread = (xx - x * x) * (yy - y * y)
        # Below the threshold, the variance is rounding error: all values are equal, or there is only one.
        told = min(xx - x * x, yy - y * y) > 1e-12 * max(xx, yy, 1e-300)
        return {"mse": error, **({"pearson": (xy - x * y) / math.sqrt(spread)} if told else {})}

    def fault(self) -> str:
        """Say that predictions hardly differ where the true values do."""
        _, x, y, xx, yy, _ = self._means()
        predicted, true = (math.sqrt(max(square - mean * mean, 0)) for square, mean in ((xx, x), (yy, y)))
        if true <= 1e-6 * math.sqrt(yy) or predicted >= CONSTANT * true:
            return ""
        return f"predictions are nearly constant: they deviate by {predicted:.2g}, the true values by {true:.2g}: {TRY}"

    def _means(self) -> list[float]:
        """Return the means of the squared error, of predictions, true values, the squares of both, and the products."""
        count, *rest = self.total
        parts = [rest[i : i + reproducible_sums.PARTS] for i in range(0, len(rest), reproducible_sums.PARTS)]
        return [reproducible_sums.total(part) / count for part in parts]


def of_counts(right: float, taken: float, there: float, samples: str) -> dict[str, float | int | None]:
    """Return precision, recall and F1, None where there is nothing to divide, and how many there are.

    Args:
        taken: how many were predicted, of which `right` are right.
        there: how many there are, as `samples` names them.
    """
    return {
        "precision": right / taken if taken else None,
        "recall": right / there if there else None,
        "f1": 2 * right / (there + taken) if there + taken else None,
        samples: int(there),
    }


def _means(sums: Tensor, counts: Tensor) -> list[float | None]:
    pairs = zip(sums.tolist(), counts.tolist(), strict=True)
    return [total / count if count else None for total, count in pairs]


def _share(part: float | Tensor, whole: float | Tensor) -> float:
    return float(part) / float(whole)
