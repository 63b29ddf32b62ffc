"""One step's losses, gradient norms and ledger; one collective, and only if the step is logged, saved or checked."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from app.distributed import collectives
from app.distributed.accelerator import Accelerator
from app.distributed.buffers import Buffers
from app.distributed.desync import DesyncCheck
from app.distributed.fsdp_calls import CallOrder
from app.errors import UserError
from app.sampling.batch_plan import Step, Turn
from app.sampling.orders import Order
from app.training.loop.by_source import BySource
from app.training.loop.loss_means import LossMeans
from app.training.loop.nonfinite import FirstNonfinite, Report, place, report

T = TypeVar("T")


class Travelling(NamedTuple, Generic[T]):
    """What travels in the one all-reduce of a measured step: float64 vectors before it, lists of numbers after it.

    The first five are summed over data ranks, the last three over all ranks.
    """

    terms: T
    """Of the losses: for each name, one of each micro-batch."""
    ledger: T
    """The hash of the sample ids, in parts, and how many more buffers have changed."""
    earlier: T
    """Not 0 if a number of an earlier step was not finite."""
    means: T
    """Sums of losses over several steps; see LossMeans."""
    sources: T
    """Losses and weights of the rows of each source of a mixture, as BySource has them."""
    calls: T
    """In which order layers were used; see CallOrder."""
    prints: T
    """Fingerprints of weights and buffers; empty where ranks are not compared."""
    main: T
    """What the main process tells all ranks; zeros on the others."""


_OF_DATA_RANKS = 5


class StepMetrics:
    """Keep losses and gradient norms of one step on the device until they are read."""

    def __init__(self, accelerator: Accelerator, step: Step, skips: bool = False, order: Order | None = None):
        """Begin a step.

        Args:
            order: of the run's samples; None where there are none.
            skips: whether a number that is not finite skips the update instead of stopping the run.
        """
        self.accelerator, self.step, self.skips = accelerator, step, skips
        self.by_source = BySource(step, order)
        self.losses: list[tuple[str, Turn, Tensor]] = []
        self.trained: set[str] = set()
        """The names of the losses that have gradients; the others may be NaN or infinite."""
        self.norms: dict[int, Tensor] = {}

    def add(self, name: str, loss: Tensor, micro: Turn, trained: bool = True) -> None:
        """Keep a micro-batch's mean loss, a scalar on the device.

        Args:
            trained: whether it has a gradient.
        """
        self.losses.append((name, micro, loss.detach()))
        if trained:
            self.trained.add(name)

    def _trained_losses(self) -> list[tuple[str, Turn, Tensor]]:
        return [each for each in self.losses if each[0] in self.trained]

    def add_norm(self, norm: Tensor, index: int) -> bool:
        """Keep the norm of optimizer `index`'s gradient, unless it is known not to be finite.

        The host does not wait for a GPU, unless the run skips such steps: the next step that is logged or saved checks
        all norms since the last one.

        Returns:
            False if the norm is known not to be finite; the same on every rank.
        """
        self.norms[index] = norm
        waits = norm.device.type == "cpu" or self.skips
        if not waits or self.accelerator.scaler is not None or math.isfinite(norm.item()):
            return True
        del self.norms[index]
        return False

    def explain(self, norm: Tensor, faults: FirstNonfinite | None) -> Report:
        """Say what was not finite first, in an earlier step or in this step's gradient. Every rank takes part.

        Args:
            faults: of earlier steps; None if there are none.
        """
        earlier = self._earlier(faults) if faults is not None else None
        return earlier or self._not_finite("gradient", norm.item())

    def note(self, faults: FirstNonfinite) -> None:
        """Check losses and norms on the device, in a step that is not logged; the host does not wait.

        Args:
            faults: keeps the first one that is not finite.
        """
        losses, norms = self._trained_losses(), [*self.norms.values()]
        if losses and not self.skips and self.accelerator.scaler is None:  # which skips such steps itself
            faults.note(self.step.index, losses, norms)

    def collect(
        self,
        faults: FirstNonfinite,
        buffers: Buffers,
        means: LossMeans,
        calls: CallOrder,
        drift: DesyncCheck | None = None,
        told: Sequence[float] = (),
    ) -> tuple[dict[str, float], dict[str, Any], list[float]]:
        """Combine all ranks in one all-reduce. Every rank takes part, and waits for its device.

        Args:
            faults: has checked the steps since the last one that was logged.
            buffers: learns in the same collective whether training has changed further buffers.
            means: over several steps, with this one; its sums travel in the same collective.
            calls: compares the order in which ranks have used layers, in the same collective.
            drift: the same for the ranks' weights and buffers.
            told: numbers, as many on every rank; those of the main process reach all ranks in the same collective.

        Returns:
            The losses of the global batch by name; the mean losses, the gradient norms and the hash of the sample
            ids, by name; and what the main process has told.

        Raises:
            UserError: a loss or norm is not finite: it names the step, the ranks and the samples; or ranks differ.
        """
        names = sorted({name for name, _, _ in self.losses})
        changed, device, number = buffers.changed_here(), self.accelerator.device, self.step.index + 1
        norms, sums = self._over_ranks(
            Travelling(
                terms=self._terms(names),
                ledger=torch.tensor([*ledger_parts(self.step), len(changed)], dtype=torch.float64, device=device),
                earlier=faults.there().reshape(1),
                means=means.slots(names),
                sources=self.by_source.slots(device),
                calls=calls.slots().to(device),
                prints=torch.zeros(0, dtype=torch.float64, device=device)
                if drift is None
                else drift.slots().to(device),
                main=torch.tensor(told, dtype=torch.float64, device=device) * self.accelerator.is_main_process,
            )
        )
        *parts, fresh = sums.ledger
        calls.compare(sums.calls, number)
        if any(sums.earlier) and (report_of_earlier := self._earlier(faults)):
            raise UserError(report_of_earlier.advice())
        if fresh:
            buffers.learn(changed)
        if drift is not None and fresh:  # the sums of fingerprints are from before the ranks agreed on these buffers
            drift.compare_now(number)
        elif drift is not None:
            drift.compare(sums.prints, number)
        count = self.step.micro_count
        losses = {name: sum(sums.terms[i * count : (i + 1) * count]) for i, name in enumerate(names)}
        if not self.step.weight:
            losses = {}  # there is no sample to have any
        self._check_finite(losses, norms)
        about: dict[str, Any] = {f"grad_norm{suffix(i)}": norm for i, norm in zip(self.norms, norms, strict=True)}
        ids = "".join(f"{int(part) % 2**32:08x}" for part in parts)
        about = {**means.take(names, sums.means), **self.by_source.losses(sums.sources), **about, "ids": ids}
        return losses, about, sums.main

    def _terms(self, names: list[str]) -> Tensor:
        """Return this rank's terms of the step's losses: float64 [names x micro-batches].

        One slot for each micro-batch, filled by one rank: on every layout, losses are summed in the same order.
        """
        terms = torch.zeros(len(names) * self.step.micro_count, dtype=torch.float64, device=self.accelerator.device)
        for name, micro, loss in self.losses:
            if micro.weight:
                slot = names.index(name) * self.step.micro_count + micro.index
                terms[slot] += loss.double() * (micro.weight / self.step.weight)
        return terms

    def _over_ranks(self, vectors: Travelling[Tensor]) -> tuple[list[float], Travelling[list[float]]]:
        """Sum vectors over ranks in one all-reduce, and read them with the gradient norms; waits for the device.

        Returns:
            The norms, and the sums.
        """
        slots = torch.cat([*vectors])
        if not collectives.alone():
            torch.distributed.all_reduce(slots)
            of_data_ranks = sum(map(len, vectors[:_OF_DATA_RANKS]))
            slots[:of_data_ranks] /= self.accelerator.ranks_per_data_rank
        norms = torch.stack([*self.norms.values()]).double() if self.norms else slots[:0]
        numbers = iter(torch.cat([norms, slots]).tolist())
        read = [[*itertools.islice(numbers, len(part))] for part in (norms, *vectors)]
        return read[0], Travelling(*read[1:])

    def _check_finite(self, losses: dict[str, float], norms: list[float]) -> None:
        """Check what a step logs, unless the run skips such steps. Every rank takes part.

        Raises:
            UserError: a loss or norm is not finite: it names the step, the ranks and the samples.
        """
        if self.skips:
            return
        # The scaler leaves out a step whose gradient is not finite.
        checked = [] if self.accelerator.scaler is not None else [("gradient", norm) for norm in norms]
        for name, value in [*((n, v) for n, v in losses.items() if n in self.trained), *checked]:
            if not math.isfinite(value):
                raise UserError(self._not_finite(name, value).advice())

    def _earlier(self, faults: FirstNonfinite) -> Report | None:
        """Say what was not finite in an earlier step; None if all was. Every rank takes part."""
        told = faults.tell()
        return told and told._replace(text=f"{told.text}; found in step {self.step.index + 1}")

    def _not_finite(self, what: str, value: float) -> Report:
        rank = self.accelerator.process_index
        places_here = {
            micro.index: place(micro.index, rank, micro.ids.tolist())
            for _, micro, loss in self._trained_losses()
            if micro.weight and not math.isfinite(loss.item())
        }
        places = {index: line for part in collectives.gather(places_here) for index, line in part.items()}
        text = f"the {what} of step {self.step.index + 1} is {value}"
        return report(text, places, self.step.micro_count, "every micro-batch's own loss is finite")


def suffix(index: int) -> str:
    """Return the suffix of an optimizer's names in the log: empty for the first, /1 for the second."""
    return f"/{index}" if index else ""


def ledger_parts(step: Step) -> tuple[int, int]:
    """Hash the sample ids of one rank's micro-batches to two numbers, whose sums over ranks hash the whole step.

    Each micro-batch's index and ids, in order, are hashed to 64 bits, and the two halves are summed apart: sums of
    32-bit numbers are exact in float64.
    """
    high = low = 0
    for turn in step.turns:
        if not turn.idle:
            key = turn.index.to_bytes(8, "little") + turn.ids.astype("<i8").tobytes()
            digest = hashlib.blake2b(key, digest_size=8).digest()
            high += int.from_bytes(digest[:4], "little")
            low += int.from_bytes(digest[4:], "little")
    return high, low
