"""torchmetrics with the same bits on any number of ranks.

torchmetrics keeps one state and updates it with each micro-batch, so its sums of floats depend on which micro-batches a
rank has, and in which order. Here each micro-batch updates a metric that has just been reset. If all of the metric's
states are sums, they are added order-free. If not, the arguments of its updates are gathered, and the metric is updated
with those of all ranks in the order of the samples.
"""

import sys
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from app.distributed import collectives
from app.training.exact import reproducible_sums
from app.training.scores.base import BOUND, COUNT, Metric


def is_torchmetric(metric: Any) -> bool:
    """Tell, without importing torchmetrics, whether a metric is one of torchmetrics' (1.9)."""
    package = sys.modules.get("torchmetrics")
    return package is not None and isinstance(metric, package.Metric)


def adapted(name: str, metric: Any) -> "Summed | Repeated":
    """Return what combines a metric of torchmetrics over ranks; its score has this name."""
    metric.reset()
    return Summed(name, metric) if _adds_up(metric) else Repeated(name, metric)


def _adds_up(metric: Any) -> bool:
    """Tell whether all states of a metric are sums that begin at 0, and it has no metric inside."""
    from torchmetrics.utilities import dim_zero_sum

    inside = any(is_torchmetric(module) for module in metric.modules() if module is not metric)
    kinds = metric._reductions.values()
    if inside or hasattr(metric, "multioutput"):  # the states of the latter take the shape of the data
        return False
    sums = all(kind is dim_zero_sum for kind in kinds) and len(kinds) > 0
    return sums and all(isinstance(d, Tensor) and not d.any() for d in metric._defaults.values())


def _value(metric: Any) -> float:
    """Compute a metric from its state alone, without ranks, and without a warning that it has no samples."""
    metric._to_sync, metric._update_count = False, max(metric._update_count, 1)
    return float(metric.compute())


class Summed(Metric):
    """A metric whose states are sums."""

    def __init__(self, name: str, metric: Any):
        self.name, self.metric = name, metric
        self._sizes = [default.numel() for default in metric._defaults.values()]
        super().__init__(reproducible_sums.PARTS * sum(self._sizes))

    def update(self, *values: Any) -> None:
        """Add a micro-batch, whose own sums do not depend on any other."""
        self.metric.reset()
        self.metric.update(*values)
        sums = torch.cat([getattr(self.metric, name).double().flatten() for name in self.metric._defaults])
        self.state += torch.cat(list(reproducible_sums.parts_of(sums, BOUND, COUNT)))

    def scores(self) -> dict[str, float]:
        """Compute the metric from `total`."""
        self.metric.reset()
        parts = torch.tensor(self.total, dtype=torch.float64).view(reproducible_sums.PARTS, -1)
        sums = reproducible_sums.total(parts).split(self._sizes)
        for (name, default), numbers in zip(self.metric._defaults.items(), sums, strict=True):
            setattr(self.metric, name, numbers.view(default.shape).to(default.device, default.dtype))
        return {self.name: _value(self.metric)}


class Repeated(Metric):
    """A metric that is updated anew with what all ranks have, in the order of the samples.

    Every rank keeps the arguments of all updates of an evaluation in the memory of its host.
    """

    def __init__(self, name: str, metric: Any):
        super().__init__(0)
        self.name, self.metric = name, metric
        self._calls: list[tuple] = []

    def update(self, *values: Any) -> None:
        """Keep the arguments of an update, in the memory of the host."""
        self._calls.append(_moved(values, torch.device("cpu")))

    def scores(self) -> dict[str, float]:
        """Update the metric with the micro-batches of all ranks, and compute it. Every rank takes part."""
        self.metric.reset()
        for calls in collectives.gather(self._calls):  # rank r evaluates the r-th part of all samples
            for values in calls:
                self.metric.update(*_moved(values, self.metric.device))
        return {self.name: _value(self.metric)}


def _moved(values: tuple, device: torch.device) -> Any:
    """Copy the tensors of arguments, also those in lists and dicts, to a device."""
    return recursively_apply(lambda tensor: tensor.detach().to(device), values)
