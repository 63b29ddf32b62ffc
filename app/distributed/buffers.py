"""Buffers that training changes: kept the same on every rank, in checkpoints, and after a resume.

Examples are a codebook's averages, the vectors of spectral norm, a queue with its pointer. (Running statistics of norms
are kept in another way: running_statistics.py.) Gradients do not synchronise them, so each rank has those of its own
micro-batches. After a step, every rank takes those of the main process, in one broadcast. A model without such buffers
has no broadcast.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.distributed import collectives, naming
from app.distributed.accelerator import Accelerator
from app.distributed.desync import fingerprints
from app.distributed.running_statistics import RunningStatistics, keeps_running_statistics
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan


class Place(NamedTuple):
    """Where a module keeps a buffer; the tensor itself may be replaced."""

    module: nn.Module
    attribute: str
    shape: torch.Size

    @property
    def tensor(self) -> Tensor:
        """Return the tensor that is there now."""
        return getattr(self.module, self.attribute)


class Buffers:
    """The buffers that checkpoints contain, and the names of those that training changes."""

    def __init__(self, accelerator: Accelerator, statistics: RunningStatistics, warn: Callable[[str], None]):
        """Watch the buffers of a run's models.

        Args:
            statistics: the buffers that are functions of all micro-batches; no rank's own count.
            warn: shows a line to the user; called on every rank.
        """
        self.accelerator, self.statistics, self._warn = accelerator, statistics, warn
        self.places: dict[str, Place] = {}
        self.changing: list[str] = []
        """Names of the buffers that are known to change, in the same order on all ranks."""
        self._start: dict[str, list[int]] = {}
        self._folded: set[str] = set()  # which `statistics` keeps
        self._share = ""

    def begin(self, changed_before: Iterable[str], plan: BatchPlan) -> None:
        """Record all buffers before the first step.

        Args:
            changed_before: names of buffers that changed in an earlier part of the run.
        """
        count, turns = plan.micro_batches_per_step, plan.accumulation(self.accelerator.data_ranks)
        self._share = "" if count == 1 else f"{turns} of {count}" if turns < count else f"all {count}"
        self.places, self._folded = {}, set()
        self.statistics.begin()
        for index, model in enumerate(naming.plain(self.accelerator.models)):
            saved_names = model.state_dict().keys()
            for name, buffer in model.named_buffers():
                if name in saved_names and not isinstance(buffer, DTensor):
                    owner, _, attribute = name.rpartition(".")
                    module, name = model.get_submodule(owner), naming.in_plain_model(index, name)
                    self.places[name] = Place(module, attribute, buffer.shape)
                    if keeps_running_statistics(module):
                        self._folded.add(name)
        self.changing = [name for name in self.places if name in set(changed_before) - self._folded]
        self._start = self._now()
        self._name(self.changing)

    def changed_here(self) -> list[str]:
        """Name the buffers that have changed on this rank and are not known yet. Every rank takes part.

        It waits for the device, if there are any, and folds running statistics.
        """
        self.statistics.fold()
        return [name for name, now in self._now().items() if now != self._start[name]]

    def learn(self, changed_here: list[str]) -> None:
        """Add the buffers that have changed on any rank, warn of them, and synchronise. Every rank takes part."""
        anywhere = {name for names in collectives.gather(changed_here) for name in names}
        self._name([name for name in self.places if name in anywhere])
        self.changing = [name for name in self.places if name in anywhere.union(self.changing)]
        self.agree()

    def find_changes(self) -> None:
        """Find the buffers that have changed, and synchronise. Every rank takes part; it is a collective."""
        if self.places:
            self.learn(self.changed_here())

    def agree(self) -> None:
        """Copy the changing buffers of the main process to every rank. Every rank takes part.

        Raises:
            UserError: the shape of one has changed since the start.
        """
        self.statistics.fold(only_if_many=True)
        if collectives.alone() or not self.changing:
            return
        # Large elements first, so that each tensor's bytes are aligned for its type.
        tensors = sorted(map(self._checked, self.changing), key=lambda tensor: -tensor.element_size())
        with torch.no_grad():
            flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
            dist.broadcast(flat, 0)
            if collectives.rank():
                for tensor, piece in zip(tensors, flat.split([tensor.nbytes for tensor in tensors]), strict=True):
                    tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))

    def _name(self, changing: list[str]) -> None:
        """Warn of buffers that change, if their values depend on the layout."""
        shown = [name.removeprefix("models.0.") for name in changing]
        if shown and self._share:
            names = ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
            self._warn(
                f"warning: training changes buffers ({names}): after a step all processes have the main process's, "
                f"which sees {self._share} micro-batches of a step, so results depend on the number of processes, with "
                "--run.exact too"
            )

    def _checked(self, name: str) -> Tensor:
        tensor, shape = self.places[name].tensor, self.places[name].shape
        if tensor.shape != shape:
            raise UserError(
                f"the buffer {name} had shape {tuple(shape)} at the start and has {tuple(tensor.shape)} now: no "
                "checkpoint of it could be read; keep its shape, and keep in a second buffer how much of it is used"
            )
        return tensor

    def _now(self) -> dict[str, list[int]]:
        """Return the fingerprints of the buffers that are not known to change."""
        names = [name for name in self.places if name not in self._folded.union(self.changing)]
        return dict(zip(names, fingerprints([self.places[name].tensor for name in names]), strict=True))
