"""Mean losses over several steps, the same on every layout, kept on the device until a step is logged or saved."""

import copy
import math
from typing import Any

import torch
from torch import Tensor

from app.config import finite
from app.distributed import collectives
from app.distributed.accelerator import Accelerator
from app.sampling.batch_plan import Turn
from app.training.exact import reproducible_sums
from app.training.scores.base import BOUND, COUNT

PARTS = reproducible_sums.PARTS
_MOST = 256  # losses of one name that are kept apart; more are summed, so that they take no more memory


class LossMeans:
    """The mean of each loss over the steps since the last multiple of --run.log-every.

    Which steps those are depends on the step only, and checkpoints hold the sums, so a run that stops and resumes logs
    the means that it would have logged. The sums do not depend on the order of their terms, so all layouts agree.
    """

    def __init__(self, accelerator: Accelerator, every: int, step: int, saved: dict[str, Any]):
        """Begin after `step`.

        Args:
            every: steps between two lines. With 1, there is nothing to average, and no mean.
            saved: what `record` returned at that step; empty if it is not known.
        """
        self._accelerator, self._every = accelerator, every
        self._since = step // every * every
        self._whole = step == self._since or saved.get("since") == self._since
        self._steps: dict[str, int] = {}
        self._sums: dict[str, Tensor] = {}
        self._terms: dict[str, list[Tensor]] = {}
        self._read: dict[str, list[float]] | None = None  # the sums over all ranks, where the host knows them
        if self._whole and step > self._since:
            self._steps = dict(saved["steps"])
            for name, parts in saved["sums"].items():
                # The sums were over all ranks, so one data rank goes on with them.
                start_sums = (
                    [math.nan if part is None else part for part in parts]
                    if accelerator.data_rank == 0
                    else [0.0] * PARTS
                )
                self._sums[name] = torch.tensor(start_sums, dtype=torch.float64, device=accelerator.device)

    def add(self, step: int, losses: list[tuple[str, Turn, Tensor]], weight: float) -> None:
        """Add a step, counted from 1; the host does not wait for the device.

        Args:
            losses: of this rank's micro-batches, by name; scalars.
            weight: of the global batch.
        """
        if self._every == 1:
            return
        if (step - 1) % self._every == 0:
            self._since, self._whole = step - 1, True
            self._steps, self._sums, self._terms = {}, {}, {}
        self._read = None
        for name in {name for name, _, _ in losses}:
            self._steps[name] = self._steps.get(name, 0) + 1
        for name, micro, loss in losses:
            if micro.weight:
                self._terms.setdefault(name, []).append(loss.double() * (micro.weight / weight))
        for name in [name for name, terms in self._terms.items() if len(terms) > _MOST]:
            self._fold(name)

    def _fold(self, name: str) -> None:
        """Add a name's terms to its sum."""
        device = self._accelerator.device
        before = self._sums.get(name, torch.zeros(PARTS, dtype=torch.float64, device=device))
        terms = self._terms.pop(name, [])
        self._sums[name] = (
            before + reproducible_sums.order_free([torch.stack(terms)], BOUND, COUNT) if terms else before
        )

    def slots(self, names: list[str]) -> Tensor:
        """Return this rank's sums, to be added to those of the others: float64 [names x PARTS].

        Args:
            names: of the losses, the same on every rank.
        """
        for name in names:
            self._fold(name)
        sums = [self._sums[name] for name in names]
        return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64, device=self._accelerator.device)

    def take(self, names: list[str], sums: list[float]) -> dict[str, float]:
        """Return the means by name, from the slots summed over data ranks; empty if not all the steps are known."""
        self._read = _by_name(names, sums)
        if not self._whole:
            return {}
        averaged = [(name, parts) for name, parts in self._read.items() if self._steps.get(name)]
        return {_mean_of(name): reproducible_sums.total(parts) / self._steps[name] for name, parts in averaged}

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as plain values. Every rank takes part, and may wait for its device."""
        if not self._whole or not self._steps:
            return {}
        names = sorted(set().union(*collectives.gather(sorted(self._steps))))
        if self._read is None or list(self._read) != names:
            slots, ours = self.slots(names), self._accelerator
            if not collectives.alone():
                torch.distributed.all_reduce(slots)
                slots /= ours.ranks_per_data_rank
            self._read = _by_name(names, slots.tolist())
        return {"since": self._since, "steps": dict(self._steps), "sums": finite(self._read)}

    def after(self, step: int, losses: list[tuple[str, Turn, Tensor]], weight: float) -> "LossMeans":
        """Return what this will be after a step that is not over yet."""
        later = copy.copy(self)
        later._steps, later._sums = dict(self._steps), dict(self._sums)
        later._terms = {name: list(terms) for name, terms in self._terms.items()}
        later.add(step, losses, weight)
        return later


def _by_name(names: list[str], sums: list[float]) -> dict[str, list[float]]:
    return {name: sums[i * PARTS : (i + 1) * PARTS] for i, name in enumerate(names)}


def _mean_of(name: str) -> str:
    """Name the mean of a loss: loss_mean, and loss_mean/generator for loss/generator."""
    first, slash, rest = name.partition("/")
    return f"{first}_mean{slash}{rest}"
