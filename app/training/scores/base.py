"""What all scores share: a metric that is a sum over all samples, with the same bits on any number of ranks.

Counts are exact, and sums of floats do not depend on the order of their terms. By itself, torchmetrics sums
floats in the order of arrival, and its import takes four seconds in each process, because it also imports audio, text
and plots.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BOUND, COUNT = 2.0**40, 2**32  # over all ranks; below these sizes of a sum and counts of its terms, bits are fixed

TRY = "train longer, or try another --optim.lr (a tenth, or ten times as much)"
"""What to do about a model that has learnt nothing."""


class Metric:
    """Base class: `state` (float64 [size]) adds up over micro-batches and ranks, and all follows from its total.

    A metric has scores, which are logged in training, or a report, which only `python -m app evaluate` shows, or both.
    """

    meanings: Mapping[str, str] = {}
    """What a score is, by its name, where the name alone does not say it; shown next to the number."""

    def __init__(self, size: int):
        self.state = torch.zeros(size, dtype=torch.float64)
        self.total: list[float] = []
        """The sum of all ranks' states; set before `scores` and `report` are called."""

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add a micro-batch."""
        raise NotImplementedError

    def scores(self) -> dict[str, float]:
        """Compute scores from `total`; undefined ones are left out. A metric that only reports has none."""
        if type(self).report is Metric.report:
            raise NotImplementedError(f"{type(self).__name__} has neither scores nor a report")
        return {}

    def report(self) -> dict[str, Any]:
        """Return from `total` what `python -m app evaluate` shows besides the scores: values that JSON can hold."""
        return {}

    def in_depth(self) -> "list[Metric]":
        """Return further metrics, updated with the same values, that `python -m app evaluate` alone measures."""
        return []

    def fault(self) -> str:
        """Say from `total` what makes these scores worth little, and what to try; empty if nothing does."""
        return ""

    def alone(self) -> dict[str, float]:
        """Compute scores from this process's own samples; no collective."""
        self.total = self.state.tolist()
        return self.scores()
