"""The losses of a mixture's sources in one step: sums over their rows, which travel with the step's own losses."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from app.sampling.batch_plan import Step, Turn
from app.sampling.orders import Mixed, Order


class BySource:
    """Sums of losses and of weights for each source and micro-batch, on the device until they are read.

    One slot for each micro-batch, filled by one rank: on every layout, they are added in the same order.
    """

    def __init__(self, step: Step, order: Order | None):
        """Begin a step; an order of one source has nothing to keep."""
        self._mixed = order if isinstance(order, Mixed) else None
        self._step = step
        self._sums: dict[int, Tensor] = {}  # by micro-batch: of each source its losses, then its weights

    def add(self, losses: Callable[[], Tensor | tuple[Tensor, Tensor]], micro: Turn) -> None:
        """Add a micro-batch's rows; `losses` returns one for each, [rows], or these and their weights, else all 1."""
        if self._mixed is None or not micro.weight:
            return
        with torch.no_grad():
            returned = losses()
            each, weights = returned if isinstance(returned, tuple) else (returned, torch.ones_like(returned))
            each, by_row = each.detach().double(), weights.detach().double()
            sources = torch.from_numpy(self._mixed.source_of(micro.ids)).to(each.device)
            sums = torch.zeros(2 * len(self._mixed.sources), dtype=torch.float64, device=each.device)
            sums.index_add_(0, sources, each * by_row)
            sums.index_add_(0, sources + len(self._mixed.sources), by_row)
        self._sums[micro.index] = sums

    def slots(self, device: torch.device) -> Tensor:
        """Return this rank's sums, float64 [micro-batches x 2 x sources]; empty where there is no mixture."""
        if self._mixed is None:
            return torch.zeros(0, dtype=torch.float64, device=device)
        slots = torch.zeros(self._step.micro_count, 2 * len(self._mixed.sources), dtype=torch.float64, device=device)
        for index, sums in self._sums.items():
            slots[index] = sums
        return slots.flatten()

    def losses(self, slots: Sequence[float]) -> dict[str, float]:
        """Return the mean loss of each source with rows in the step, by its name in the log; slots of all ranks."""
        if self._mixed is None:
            return {}
        names = [each.name for each in self._mixed.sources]
        totals = [sum(slots[place :: 2 * len(names)]) for place in range(2 * len(names))]
        pairs = zip(names, totals[: len(names)], totals[len(names) :], strict=True)
        return {f"loss/{name}": loss / weight for name, loss, weight in pairs if weight}
