"""Scores of predicted classes: accuracy, F1, confusion, calibration; and of labels of which a row may have several."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from app.training.exact import reproducible_sums
from app.training.scores.base import BOUND, COUNT, TRY, Metric


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
        shares = {"accuracy": _share(right.sum(), matrix.sum()), "f1": (2 * right / there)[there > 0].mean().item()}
        if self.classes == 2 and there[1]:
            shares["f1_positive"] = (2 * right[1] / there[1]).item()
        return {**shares, **({f"top{self.top}": _share(*self.total[-2:])} if self.top else {})}

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


class Calibration(Metric):
    """How far probabilities of the chosen classes are from the share that is right; from logits and classes.

    A report without scores: an evaluation in training does without it.

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
        is_predicted, there = predicted > 0, target > 0.5
        cells = [is_predicted & there, is_predicted & ~there, ~is_predicted & there, ~is_predicted & ~there]
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
