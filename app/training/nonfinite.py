"""The first loss or gradient norm that was not finite, kept on the device until a number is read anyway."""

from typing import NamedTuple

import torch
from torch import Tensor

from app.distributed import collectives
from app.sampling.batch_plan import BatchPlan, Turn

_NONE, _SPAN = 2**62, 2**20  # no fault; how many numbers a step can have


class Fault(NamedTuple):
    """Where a number was not finite.

    Args:
        step: counted from 0.
        micro: index of the micro-batch whose loss it was; -1 for a gradient.
    """

    step: int
    micro: int


class FirstFault:
    """Look at the numbers of steps that are not measured, without waiting for them."""

    def __init__(self, plan: BatchPlan, rank: int, ranks_: int, device: torch.device):
        """Begin with none found.

        Args:
            rank: this process's data rank, of `ranks_`.
        """
        self.plan, self.rank, self.ranks = plan, rank, ranks_
        self._first = torch.full((), _NONE, dtype=torch.int64, device=device)
        # From which step on which micro-batches had losses: the same in all steps but short ones.
        self._orders: list[tuple[int, tuple[int, ...]]] = []

    def note(self, step: int, losses: list[tuple[str, Turn, Tensor]], norms: list[Tensor]) -> None:
        """Look at a step, counted from 0."""
        order = tuple(micro.index for _, micro, _ in losses)
        if not self._orders or self._orders[-1][1] != order:
            self._orders.append((step, order))
        good = torch.stack([value.isfinite() for value in (*(loss for _, _, loss in losses), *norms)])
        places = torch.arange(step * _SPAN, step * _SPAN + len(good), device=good.device)
        self._first = torch.minimum(self._first, torch.where(good, _NONE, places).min())

    def there(self) -> Tensor:
        """Return 1 where there was one on this rank, else 0, on the device."""
        return (self._first < _NONE).double()

    def tell(self) -> str:
        """Name the first step of all ranks that had one, and its samples; nothing where none had.

        Every rank takes part, and waits for its device.
        """
        own = self._read()
        found = collectives.gather((own, self._ids(own)))
        step = min((fault.step for fault, _ in found if fault), default=None)
        if step is None:
            return ""
        first = [(rank, fault, ids) for rank, (fault, ids) in enumerate(found) if fault and fault.step == step]
        lines = [f"micro-batch {f.micro} on rank {rank}: samples {ids}" for rank, f, ids in first if f.micro >= 0]
        what = "loss" if lines else "gradient"
        return f"the {what} of step {step + 1} was not finite ({'; '.join(lines) or 'every loss of it was finite'})"

    def _read(self) -> Fault | None:
        step, place = divmod(int(self._first.item()), _SPAN)
        if self._first.item() == _NONE:
            return None
        order = [order for begin, order in self._orders if begin <= step][-1]
        return Fault(step, order[place] if place < len(order) else -1)

    def _ids(self, fault: Fault | None) -> list[int]:
        turns = self.plan.step(fault.step, self.rank, self.ranks).turns if fault else []
        return [i for turn in turns if turn.index == fault.micro for i in turn.ids.tolist()]
