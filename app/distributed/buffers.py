"""Buffers that training changes: the same on every rank after each step, in its checkpoint, and after a resume.

BatchNorm's running statistics, a codebook's averages, the vectors of spectral norm, a queue with its pointer: no
gradient synchronises them, so each rank's are those of its own micro-batches. After a step every rank takes the main
process's, in one broadcast, which there is only where such buffers are.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.distributed import collectives, naming
from app.distributed.accelerator import Accelerator
from app.distributed.batch_norm import is_batch_norm
from app.distributed.desync import fingerprints
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan


class Place(NamedTuple):
    """Where a module keeps a buffer: code may put another tensor there."""

    module: nn.Module
    attribute: str
    shape: torch.Size

    @property
    def tensor(self) -> Tensor:
        """Return what is there now."""
        return getattr(self.module, self.attribute)


class Buffers:
    """The buffers that checkpoints hold, and which of them training changes."""

    def __init__(self, accelerator: Accelerator, warn: Callable[[str], None]):
        """Look after the models of a run.

        Args:
            warn: takes a line for the user, on every rank.
        """
        self.accelerator, self._warn = accelerator, warn
        self.places: dict[str, Place] = {}
        self.changing: list[str] = []
        """Names of those that training changes, as far as is known, in one order on all ranks."""
        self._start: dict[str, list[int]] = {}
        self._said: set[str] = set()
        self._share = ""

    def begin(self, known: Iterable[str], plan: BatchPlan) -> None:
        """Take down what there is, before the first step from here.

        Args:
            known: names that an earlier part of the run has found to change.
        """
        micros, turns = plan.micros_per_step, plan.accumulation(self.accelerator.data_ranks)
        self._share = "" if micros == 1 else f"{turns} of {micros}" if turns < micros else f"all {micros}"
        self.places = {}
        for index, model in enumerate(naming.plain(self.accelerator.models)):
            kept = model.state_dict().keys()
            for name, buffer in model.named_buffers():
                if name in kept and not isinstance(buffer, DTensor):
                    owner, _, attribute = name.rpartition(".")
                    module, name = model.get_submodule(owner), naming.in_plain_model(index, name)
                    self.places[name] = Place(module, attribute, buffer.shape)
                    if is_batch_norm(module):  # the user has been warned of it when the model was prepared
                        self._said.add(name)
        self.changing = [name for name in self.places if name in set(known)]
        self._start = self._now()
        self._name(self.changing)

    def found(self) -> list[str]:
        """Name those that have changed on this rank and are not known to. Waits for the device, where there are any."""
        return [name for name, now in self._now().items() if now != self._start[name]]

    def learn(self, found: list[str]) -> None:
        """Add those that have changed on any rank, name them to the user, and agree on all. Every rank takes part."""
        anywhere = {name for names in collectives.gather(found) for name in names}
        self._name([name for name in self.places if name in anywhere])
        self.changing = [name for name in self.places if name in anywhere.union(self.changing)]
        self.agree()

    def find_changes(self) -> None:
        """Find out what has changed, and agree. Every rank takes part, outside steps that cost nothing."""
        if self.places:
            self.learn(self.found())

    def agree(self) -> None:
        """Give every rank the main process's buffers, of those that training changes. Every rank takes part.

        Raises:
            UserError: one has another shape than at the start.
        """
        if collectives.alone() or not self.changing:
            return
        # Large elements first, so that each piece of the bytes begins where its type may.
        tensors = sorted(map(self._checked, self.changing), key=lambda tensor: -tensor.element_size())
        with torch.no_grad():
            flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
            dist.broadcast(flat, 0)
            if collectives.rank():
                for tensor, piece in zip(tensors, flat.split([tensor.nbytes for tensor in tensors]), strict=True):
                    tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))

    def _name(self, changing: list[str]) -> None:
        """Tell the user of some that change, where what they become depends on the layout."""
        shown = [name.removeprefix("models.0.") for name in changing if name not in self._said]
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
                "checkpoint of it could be read; keep its shape, and how much of it is used in a second one"
            )
        return tensor

    def _now(self) -> dict[str, list[int]]:
        """Return the fingerprint of each buffer that is not known to change."""
        names = [name for name in self.places if name not in set(self.changing)]
        return dict(zip(names, fingerprints([self.places[name].tensor for name in names]), strict=True))
