"""Scores of preferences, from the rewards of chosen and rejected answers."""

import torch
from torch import Tensor

from app.training.exact import reproducible_sums
from app.training.scores.base import BOUND, COUNT, Metric

PARTS = reproducible_sums.PARTS


class PreferenceScores(Metric):
    """How often the chosen answer has the larger reward, and the mean rewards; from rewards [pairs] of both."""

    def __init__(self):
        super().__init__(2 + 2 * PARTS)

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Add a micro-batch: rewards of the chosen answers, and of the rejected ones."""
        right = (predicted > target).sum()
        self.state[:2] += torch.stack([torch.full_like(right, len(predicted)), right])
        sums = [reproducible_sums.order_free([each.double()], BOUND, COUNT) for each in (predicted, target)]
        self.state[2:] += torch.cat(sums)

    def scores(self) -> dict[str, float]:
        """Return accuracy, margin, and both mean rewards."""
        count, right, *rest = self.total
        chosen, rejected = (reproducible_sums.total(part) / count for part in (rest[:PARTS], rest[PARTS:]))
        means = {"reward_chosen": chosen, "reward_rejected": rejected}
        return {"accuracy": right / count, "margin": chosen - rejected, **means}
