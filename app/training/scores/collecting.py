"""Scores over all ranks: sums and counts are combined first, and divided last."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from app.config.score_names import PLAIN, ScoreName
from app.distributed.fsdp_calls import is_sharded
from app.errors import UserError
from app.training.exact import reproducible_sums
from app.training.scores.base import BOUND, COUNT, Metric
from app.training.scores.remarks import Remarks
from app.training.scores.torchmetrics_adapter import adapted, is_torchmetric

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")


def as_numbers(values: dict[str, Any]) -> dict[str, float]:
    """Convert scores to plain numbers, for example from tensors with one element."""
    numbers: dict[str, Any] = {}  # and texts, which JSON keeps too
    for name, value in values.items():
        try:
            numbers[name] = value if isinstance(value, int | float | str) else float(value)
        except (TypeError, ValueError):
            raise UserError(f"run.log: {name} is a {type(value).__name__}: give a number") from None
    return numbers


def renamed(scores: dict[str, T], kind: str, set_name: str) -> dict[str, T]:
    """Name the scores, or the pictures, of a further evaluation: eval/loss becomes eval-hard/loss or ema-hard/loss.

    Args:
        kind: of the weights; see ScoreName.
        set_name: of the evaluation set; empty for the main one.
    """
    if (kind, set_name) == (PLAIN, ""):
        return scores
    return {str(ScoreName(kind, set_name, name.removeprefix(f"{PLAIN}/"))): value for name, value in scores.items()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode and turn gradients off; restore both after the block."""
    modes, grad = {module: module.training for module in model.modules()}, torch.is_grad_enabled()
    model.eval()
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        for module, training in modes.items():
            module.training = training  # one by one: the recipe may keep some modules in evaluation mode
            if is_sharded(module):  # FSDP2 would keep whole parameters until a backward pass
                cast("FSDPModule", module).reshard()


class Scores:
    """Own metrics and torchmetrics, updated with each sample once and combined over ranks by `compute`."""

    def __init__(self, device: torch.device, remarks: Remarks, *metrics_of_app: Metric, **metrics: Any):
        """Collect what to score.

        Args:
            remarks: where own metrics say what is to be said next to their scores.
            metrics: by name for the log: torchmetrics, or other objects with `update`, `compute` and `to`. Every rank
                calls their `compute`, which must combine the ranks.
        """
        moved = {name: metric.to(device) or metric for name, metric in metrics.items()}
        self.metrics_of_app, self.metrics, self._remarks = metrics_of_app, moved, remarks
        self.adapted = {name: adapted(name, metric) for name, metric in moved.items() if is_torchmetric(metric)}
        self._summed = (*metrics_of_app, *self.adapted.values())
        for metric in self._summed:
            metric.state = metric.state.to(device)
        # The weight of all samples, that of samples with a loss, and the weighted losses as an order-free sum.
        self.sums = torch.zeros(2 + reproducible_sums.PARTS, dtype=torch.float64, device=device)

    def update(self, weight: float, *values: Tensor, loss: Tensor | None = None) -> None:
        """Add a micro-batch.

        Args:
            weight: of the micro-batch; 0 marks an idle turn, which is left out.
            values: the arguments of the metrics' `update`.
            loss: the mean over the micro-batch, a scalar.
        """
        if not weight:
            return
        others = (metric for name, metric in self.metrics.items() if name not in self.adapted)
        for metric in (*self._summed, *others):
            metric.update(*values)
        self.sums[0] += weight
        if loss is not None:
            self.sums[1] += weight
            self.sums[2:] += reproducible_sums.order_free([loss.detach().double() * weight], BOUND, COUNT)

    def compute(self, prefix: str = "eval/") -> dict[str, float]:
        """Combine all ranks and return plain numbers. Every rank takes part, even without samples of its own."""
        combined = torch.cat([self.sums, *(metric.state for metric in self._summed)])
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(combined)
        (samples, weight, *parts), *totals = (part.tolist() for part in self._split(combined))
        for metric, total in zip(self._summed, totals, strict=True):
            metric.total = total
        results: dict[str, float] = {}
        for metric in self.metrics_of_app:
            scores_by_name = metric.scores()
            results |= {prefix + name: score for name, score in scores_by_name.items()}
            self._remarks.add(metric, list(scores_by_name), prefix)
        for name, metric in self.metrics.items():
            over_ranks = self.adapted.get(name)
            score = over_ranks.scores() if over_ranks else {name: float(metric.compute())}
            results[prefix + name] = score[name]
        if weight:
            results[prefix + "loss"] = reproducible_sums.total(parts) / weight
        results[prefix + "samples"] = int(samples)
        return results

    def _split(self, combined: Tensor) -> tuple[Tensor, ...]:
        return combined.split([len(self.sums), *(len(metric.state) for metric in self._summed)])
