"""Scores over all ranks: sums and counts first, divided last."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from app.distributed import collectives
from app.errors import UserError
from app.training import reproducible_sums
from app.training.metrics import BOUND, COUNT, Measure

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def plain(values: dict[str, Any]) -> dict[str, float]:
    """Make plain numbers of scores, such as tensors with one element."""
    numbers: dict[str, Any] = {}  # and texts, which JSON keeps too
    for name, value in values.items():
        try:
            numbers[name] = value if isinstance(value, int | float | str) else float(value)
        except (TypeError, ValueError):
            raise UserError(f"run.log: {name} is a {type(value).__name__}: give a number") from None
    return numbers


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode and without gradients."""
    modes, grad = {module: module.training for module in model.modules()}, torch.is_grad_enabled()
    model.eval()
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        for module, training in modes.items():
            module.training = training  # one by one: the recipe may keep some in evaluation mode
            if hasattr(module, "reshard"):  # FSDP2 keeps whole parameters until a backward pass, which never comes
                cast("FSDPModule", module).reshard()


class Scores:
    """Measures and torchmetrics, each updated with every sample once and combined over ranks when computed."""

    def __init__(self, device: torch.device, *measures: Measure, **metrics: Any):
        """Collect what to score.

        Args:
            metrics: by the name under which it is logged, objects of torchmetrics, or any with `update`, `compute` and
                `to`, whose `compute`, called on every rank, combines ranks by itself.
        """
        self.measures = measures
        for measure in measures:
            measure.state = measure.state.to(device)
        self.metrics = {name: metric.to(device) or metric for name, metric in metrics.items()}
        for metric in filter(_of_torchmetrics, self.metrics.values()):
            metric.dist_sync_fn = _gather
        # Samples, weight of the losses, and the weighted losses in the parts of an order-free sum.
        self.sums = torch.zeros(2 + reproducible_sums.PARTS, dtype=torch.float64, device=device)

    def update(self, weight: float, *values: Tensor, loss: Tensor | None = None) -> None:
        """Add a micro-batch: the arguments of the metrics' own `update`, and its mean loss.

        Args:
            weight: of the micro-batch; nothing is added at 0, which marks an idle turn.
        """
        if not weight:
            return
        for metric in (*self.measures, *self.metrics.values()):
            metric.update(*values)
        self.sums[0] += weight
        if loss is not None:
            self.sums[1] += weight
            self.sums[2:] += reproducible_sums.order_free([loss.detach().double() * weight], BOUND, COUNT)

    def compute(self, prefix: str = "eval/") -> dict[str, float]:
        """Combine all ranks and return plain numbers. Every rank takes part, with or without samples of its own."""
        combined = torch.cat([self.sums, *(measure.state for measure in self.measures)])
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(combined)
        (samples, weight, *parts), *totals = (part.tolist() for part in self._split(combined))
        results: dict[str, float] = {}
        for measure, total in zip(self.measures, totals, strict=True):
            measure.total = total
            results |= {prefix + name: score for name, score in measure.scores().items()}
        for name, metric in self.metrics.items():
            if _of_torchmetrics(metric):
                # Quiet its warning on a rank that had no samples: its zeros are what it has to add.
                metric._update_count = max(metric._update_count, 1)
            results[prefix + name] = float(metric.compute())
        if weight:
            results[prefix + "loss"] = reproducible_sums.total(parts) / weight
        results[prefix + "samples"] = int(samples)
        return results

    def _split(self, combined: Tensor) -> tuple[Tensor, ...]:
        return combined.split([len(self.sums), *(len(measure.state) for measure in self.measures)])


def _of_torchmetrics(metric: Any) -> bool:
    """Tell whether a metric has what torchmetrics 1.9 uses to combine ranks, without importing it."""
    return hasattr(metric, "_update_count") and hasattr(metric, "dist_sync_fn")


def _gather(state: Tensor, group: Any = None) -> list[Tensor]:
    """Collect a metric's state from all ranks, of any shapes; a rank that had no samples has none where others do."""
    states = [part.to(state.device) for part in collectives.gather(state.cpu())]
    return [part for part in states if part.numel()] or states
