"""Scores of predicted numbers: mean squared error, and correlation."""

import math

import torch
from torch import Tensor

from app.training.exact import reproducible_sums
from app.training.scores.base import BOUND, COUNT, TRY, Metric

CONSTANT = 0.01  # share of the true values' deviation below which predictions count as constant


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
