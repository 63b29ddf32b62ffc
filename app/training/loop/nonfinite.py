"""The first loss or gradient norm that was not finite, kept on the device until other numbers are read."""

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.distributed import collectives
from app.sampling.batch_plan import Turn

_NONE, _SPAN = 2**62, 2**20  # the value for "none"; the largest number of losses and norms in a step


_SHOWN = 8  # samples of a micro-batch


class Report(NamedTuple):
    """What was not finite, for the user."""

    text: str
    samples: bool = False
    """Whether it names samples that may be to blame."""

    def advice(self) -> str:
        """Return the text with what to do about it."""
        lower = "a lower --optim.lr or a longer --optim.warmup (and --run.changed accept, where it has a checkpoint)"
        if not self.samples:
            return f"{self.text}; nothing of it was saved. Repeat the command with {lower}"
        return (
            f"{self.text}; nothing of it was saved. Look at those samples, and repeat the command: --run.nonfinite "
            f"skip skips such steps; if training diverges, give it {lower}"
        )


def report(what: str, places: dict[int, str], count: int, fine: str) -> Report:
    """Describe what was not finite.

    Args:
        what: and in which step.
        places: by index, the micro-batches whose losses were not finite, in words.
        count: the micro-batches of the step.
        fine: said if no loss was to blame.
    """
    if len(places) == count > 1:
        return Report(f"{what} (in all {count} micro-batches: training has diverged)")
    return Report(f"{what} ({'; '.join(places[index] for index in sorted(places)) or fine})", bool(places))


def place(index: int, rank: int, ids: list[int]) -> str:
    """Name a micro-batch and its first samples."""
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"micro-batch {index} on rank {rank}: samples {ids[:_SHOWN]}{more}"


class Fault(NamedTuple):
    """Where the first number was that is not finite.

    Args:
        step: counted from 0.
        micro: index of the micro-batch of the loss; -1 for a gradient norm.
    """

    step: int
    micro: int


class FirstNonfinite:
    """Check losses and norms of steps that are not logged, without making the host wait for the device."""

    def __init__(self, device: torch.device):
        """Begin with none found."""
        self._first = torch.full((), _NONE, dtype=torch.int64, device=device)
        # (step, micro-batches of its losses in order), valid from that step on: only short steps differ.
        self._orders: list[tuple[int, tuple[int, ...]]] = []
        # The samples of micro-batches, by step: of the steps since the host has last looked, and of two times before.
        self._samples: deque[dict[int, dict[int, np.ndarray]]] = deque([{}], maxlen=3)

    def note(self, step: int, losses: list[tuple[str, Turn, Tensor]], norms: list[Tensor]) -> None:
        """Check the losses and norms (scalars on the device) of a step, counted from 0."""
        self._samples[-1][step] = {micro.index: micro.ids for _, micro, _ in losses}
        order = tuple(micro.index for _, micro, _ in losses)
        if not self._orders or self._orders[-1][1] != order:
            self._orders.append((step, order))
        good = torch.stack([value.isfinite() for value in (*(loss for _, _, loss in losses), *norms)])
        places = torch.arange(step * _SPAN, step * _SPAN + len(good), device=good.device)
        self._first = torch.minimum(self._first, torch.where(good, _NONE, places).min())

    def there(self) -> Tensor:
        """Return 1 if this rank has found one, else 0, as a float64 scalar on the device; the host then looks."""
        self._samples.append({})
        return (self._first < _NONE).double()

    def tell(self) -> Report | None:
        """Name the first step in which any rank found one, and its samples; None if none did.

        Every rank takes part, and waits for its device.
        """
        fault_here = self._read()
        fault_by_rank = collectives.gather((fault_here, self._ids(fault_here)))
        step = min((fault.step for fault, _ in fault_by_rank if fault), default=None)
        if step is None:
            return None
        first = [(rank, fault, ids) for rank, (fault, ids) in enumerate(fault_by_rank) if fault and fault.step == step]
        places = {fault.micro: place(fault.micro, rank, ids) for rank, fault, ids in first if fault.micro >= 0}
        what = f"the {'loss' if places else 'gradient'} of step {step + 1} was not finite"
        # A rank knows only the first of its own, so that nobody knows whether all micro-batches failed.
        return report(what, places, 0, "all its losses were finite")

    def _read(self) -> Fault | None:
        step, place = divmod(int(self._first.item()), _SPAN)
        if self._first.item() == _NONE:
            return None
        order = [order for begin, order in self._orders if begin <= step][-1]
        return Fault(step, order[place] if place < len(order) else -1)

    def _ids(self, fault: Fault | None) -> list[int]:
        if fault is None:
            return []
        of_step: dict[int, np.ndarray] = next((known[fault.step] for known in self._samples if fault.step in known), {})
        return of_step[fault.micro].tolist() if fault.micro in of_step else []
