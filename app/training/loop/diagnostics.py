"""Diagnostics: norms of every weight, its gradient and its update, and a histogram of its gradient, every few steps.

All weights share one sum over ranks. Squares are summed in float64; in exact mode, where weights and gradients have the
same bits on every layout, in a way that does not depend on the order, so these numbers have the same bits too, up to
norms of four million.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app import storage
from app.config import RunConfig
from app.distributed import deepspeed, naming, placements
from app.distributed.accelerator import Accelerator
from app.distributed.naming import local_shard
from app.rundir.logs import Logs
from app.rundir.metrics_file import DIAGNOSTICS, MetricsFile
from app.training.exact import reproducible_sums

LOWEST, HIGHEST = -40, 8
"""The first and the last bin of histograms: of numbers from 2**bin to below 2**(bin + 1), and of those beyond."""
_BINS = HIGHEST - LOWEST + 1
_PARTS = reproducible_sums.PARTS
NUMBERS = ("weight_norm", "gradient_norm", "update_norm", "update_ratio")
_BOUND = 2.0**44  # of a sum of squares: above it, exact mode's bits would depend on the order


class Diagnostics:
    """Write a line to diagnostics.jsonl for every `--run.inspect-every`-th step.

    A line has `layers`: by the name of a weight, the norms of the weight before the update, of its gradient before
    clipping, and of its update; `update_ratio`, the update's norm over the weight's; and `histogram`: how many numbers
    of the gradient have their absolute value from 2**BIN to below 2**(BIN + 1), by BIN, and how many are `zero`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        settings: RunConfig,
        folder: Path,
        done: int,
        warn: Callable[[str], Any],
        logs: Logs,
    ):
        """Begin after step `done`; the lines of later steps are dropped.

        Args:
            logs: the growing files of the run.

        Raises:
            UserError: under DeepSpeed, whose engine hides gradients and updates.
        """
        self._every, self._exact, self._accelerator = settings.inspect_every, settings.exact, accelerator
        if self._every:
            deepspeed.refuse("--run.inspect-every", accelerator.distributed_type)
        path, files = folder / DIAGNOSTICS, storage.at(folder)
        opens = accelerator.is_main_process and (self._every or files.exists(DIAGNOSTICS))
        self._file = MetricsFile(path, done, warn, logs=logs) if opens else None
        self._layers: dict[str, dict[str, Any]] = {}

    @contextmanager
    def watching(self, step: int, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Look at the gradients before a block that clips them and updates the weights, and at the weights after it.

        Every rank takes part, with one collective where weights are sharded.

        Args:
            step: counted from 1.
        """
        if not self._every or step % self._every:
            yield
            return
        scale = 1 / self._accelerator.scaler.get_scale() if self._accelerator.scaler else 1.0
        name_by_parameter = naming.parameter_names(self._accelerator.models)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in name_by_parameter]
        sharded = any(isinstance(p, DTensor) for p in parameters)
        before = [self._own(p, sharded).clone() for p in parameters]
        rows = [self._measure(p, sharded, scale) for p in parameters]
        yield
        for place, (p, old) in enumerate(zip(parameters, before, strict=True)):
            update = self._squares(self._own(p, sharded).double() - old.double(), p)
            rows[place] = torch.cat([rows[place], update])
        table = torch.stack(rows).to(self._accelerator.device)
        if sharded:
            dist.all_reduce(table)
        alone = len(self._accelerator.models) == 1
        names = [name_by_parameter[p].removeprefix("models.0.") if alone else name_by_parameter[p] for p in parameters]
        self._layers |= {
            name: measured for name, row in zip(names, table.tolist(), strict=True) if (measured := _read(row))
        }

    def _measure(self, parameter: nn.Parameter, sharded: bool, scale: float) -> Tensor:
        """Return a row of numbers of a weight that can be added up over ranks.

        Args:
            scale: of its gradient.
        """
        weight, gradient = self._own(parameter, sharded), parameter.grad
        row = torch.zeros(_BINS + 2, dtype=torch.float64, device=weight.device)
        values = torch.zeros(0, dtype=torch.float64, device=weight.device)
        if gradient is not None:
            values = self._own(gradient, sharded).double().flatten() * scale
            sizes = values.abs()
            bins = (torch.frexp(sizes).exponent.long() - 1).clamp(LOWEST, HIGHEST) - LOWEST
            bins = torch.where(sizes == 0, _BINS, bins)[sizes.isfinite()]
            row[0], row[1:] = 1, torch.bincount(bins, minlength=_BINS + 1)
        return torch.cat([row, self._squares(weight.double(), parameter), self._squares(values, parameter)])

    def _own(self, tensor: Tensor, sharded: bool) -> Tensor:
        """Return what this rank counts of a tensor: its shard, or nothing if another rank counts the same numbers."""
        part = local_shard(tensor.detach())
        if isinstance(tensor, DTensor):
            _, which = placements.copies(tensor)
            copy = which > 0
        else:
            copy = sharded and not self._accelerator.is_main_process
        return part.flatten()[:0] if copy else part

    def _squares(self, values: Tensor, parameter: nn.Parameter) -> Tensor:
        """Sum squares of a weight's numbers into a few numbers that can be added up over ranks."""
        squares = values.flatten().square()
        if self._exact:
            return reproducible_sums.order_free([squares], _BOUND, parameter.numel())
        return torch.nn.functional.pad(squares.sum().reshape(1), (0, _PARTS - 1))

    def write(self, step: int) -> dict[str, float]:
        """Write the line of a step, if one was looked at; return its numbers, without histograms, by name."""
        layers, self._layers = self._layers, {}
        if not layers or self._file is None:
            return {}
        self._file.write(step, {"layers": layers})
        return {f"{what}/{name}": layer[what] for name, layer in layers.items() for what in NUMBERS}


def _read(row: list[float]) -> dict[str, Any]:
    """Return what a row says of a weight, summed over ranks; empty if it had no gradient."""
    has_gradient, counts, sums = row[0], row[1 : _BINS + 2], row[_BINS + 2 :]
    if not has_gradient:
        return {}
    weight, gradient, update = (_root(sums[place : place + _PARTS]) for place in range(0, len(sums), _PARTS))
    histogram = {str(LOWEST + place): int(count) for place, count in enumerate(counts[:-1]) if count}
    histogram |= {"zero": int(counts[-1])} if counts[-1] else {}
    norms = (weight, gradient, update, update / weight if weight else math.nan)
    return dict(zip(NUMBERS, norms, strict=True)) | {"histogram": histogram}


def _root(parts: list[float]) -> float:
    total = reproducible_sums.total(parts)
    return 0.0 if total < 0 else math.sqrt(total)
