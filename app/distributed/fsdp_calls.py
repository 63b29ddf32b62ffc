"""Whether all ranks use the same layers in the same order, as FSDP2 needs.

FSDP2 pairs what ranks send each other by its order alone. Where a rank leaves out a layer, or takes two in another
order, the ranks mix up their weights or gradients; and if those have the same sizes, nothing fails. So ranks compare
what FSDP2 is about to send wherever it has not come next before. Where it has, that costs nothing.
"""

import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.distributed import accelerate_patches, collectives
from app.distributed.departures import Departures
from app.errors import UserError

ALL_LAYERS = (
    "Have every micro-batch use all weights in one order (add 0 times the output of a layer that it does not need); "
    "or take a profile without FSDP"
)
_BITS = 52  # of a fingerprint: float64 holds it


def is_sharded(module: nn.Module) -> bool:
    """Tell whether FSDP2 gathers a module's parameters for its forward pass."""
    return hasattr(module, "set_gradient_divide_factor")


def is_gathered(parameter: Tensor) -> bool:
    """Tell whether a parameter is not FSDP2's shard. One of a layer that is split stays a DTensor of that mesh."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh.mesh_dim_names == ("tp",)


def own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parameters that FSDP2 gathers with a module: its own, and those of modules in it without FSDP2."""
    yield from ((module, name) for name, parameter in module._parameters.items() if parameter is not None)
    for inner in module.children():
        if not is_sharded(inner):
            yield from own_parameters(inner)


def allow_views(classes: str = ".*") -> None:
    """Silence FSDP2's warning of layers that return views, where nothing changes what they return in place.

    Args:
        classes: a regular expression for the names of the layers' classes.
    """
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({classes}\) returned a view tensor")


_MOST = 200_000  # calls that are remembered
END = "comes to the end of the micro-batch"


class Known(dict[str, "Known"]):
    """What has come next so far, each with what has come after it."""


class CallOrder:
    """What FSDP2 gathers and reduces in the micro-batches of this rank's training steps, in order."""

    def __init__(self, failed: Callable[[str], None]):
        """Begin with no model.

        Args:
            failed: notes, on the main process, why the run ends.
        """
        self._failed = failed
        self._models, self._modules, self._so_far, self._size = 0, 0, 0, 0
        self._known: dict[tuple[Any, ...], Known] = {}  # where the micro-batches of each kind begin
        self._step, self._loop = 0, 0
        self._here: Known | None = None  # how far this micro-batch has come; None outside of one
        self._departures: Departures | None = None

    def watch(self, model: nn.Module) -> None:
        """Compare what FSDP2 gathers and reduces for a prepared model."""
        self._models += 1
        of = f" of model {self._models}" if self._models > 1 else ""
        for name, module in model.named_modules():
            if is_sharded(module) and next(own_parameters(module), None):
                self._modules += 1
                layer = f" {name or 'the outermost weights'}{of}"
                accelerate_patches.watch_fsdp(module, partial(self._comes_to, layer))

    def begin(self, step: int) -> None:
        """Begin step number `step`, counted from 0."""
        self._step, self._loop = step, 0

    @contextmanager
    def turn(self, models: Sequence[nn.Module], last: bool) -> Iterator[None]:
        """Compare the calls in this block, and count after a step's last turn which gradients there are."""
        if not self._modules:
            yield
            return
        if self._departures is None:
            self._departures = Departures(self._mixed_up, self._failed)
        if self._size > _MOST:
            self._known, self._size = {}, 0
        # Another loop over the batch, and the turn in which gradients are reduced, have an order of their own.
        kind = (self._loop, last, *(id(model) for model in models))
        self._here = self._known.setdefault(kind, Known())
        self._departures.begin()
        try:
            yield
            self._comes_to("", END)
        finally:
            self._here = None
        if last:
            self._loop += 1
            for model in models:
                self._add(hash(tuple(parameter.grad is None for parameter in model.parameters())))

    def _comes_to(self, layer: str, what: str) -> None:
        """Note a call, and compare it with other ranks' where it may be another one there.

        Raises:
            UserError: it is.
        """
        here, departures, call = self._here, self._departures, what + layer
        if here is None or departures is None:
            return
        if len(here) != 1 or call not in here:
            self._compare(here, departures, call)
        if call not in here:
            here[call] = Known()
            self._size += 1
        self._here = here[call]
        departures.passes(call)
        self._add(zlib.crc32(call.encode()))

    def _compare(self, here: Known, departures: Departures, call: str) -> None:
        # Where another call is known, and no more, ranks that make that one do not stop to compare: they are asked.
        calls = departures.ask(call) if len(here) == 1 else collectives.gather(call)
        if told := self._mixed_up(calls):
            raise UserError(told)

    def _mixed_up(self, calls: Sequence[str]) -> str:
        """Say which rank differs from rank 0 in what it comes to next; empty if none does."""
        apart = [rank for rank, call in enumerate(calls) if call != calls[0]]
        if not apart:
            return ""
        return (
            f"in step {self._step + 1}, rank {apart[0]} {calls[apart[0]]} where rank 0 {calls[0]}, so FSDP2 would mix "
            f"up weights or gradients. {ALL_LAYERS}"
        )

    def explained(self, error: BaseException | None) -> UserError | None:
        """Return what has made a collective fail, if it is that other ranks have left it; None otherwise."""
        told = self._departures.verdict if self._departures and isinstance(error, RuntimeError) else ""
        return UserError(told) if told else None

    def close(self) -> None:
        """Stop answering other ranks."""
        if self._departures is not None:
            self._departures.close()

    def _add(self, number: int) -> None:
        self._so_far = (self._so_far * 1_000_003 + number) % 2**_BITS

    def slots(self) -> Tensor:
        """Return a number for each rank, all 0 but this rank's, to be summed over ranks; empty without FSDP2."""
        slots = torch.zeros(torch.distributed.get_world_size() if self._modules else 0, dtype=torch.float64)
        if self._modules:
            slots[collectives.rank()] = self._so_far
        return slots

    def compare(self, slots: list[float], step: int) -> None:
        """Compare the numbers of all ranks. Every rank takes part, with the same numbers.

        Raises:
            UserError: ranks differ; it names the first that differs from rank 0.
        """
        apart = [rank for rank, number in enumerate(slots) if number != slots[0]]
        if apart:
            raise UserError(
                f"rank {apart[0]} has used other layers than rank 0 by step {step}, or the same in another order, so "
                f"FSDP2 has mixed up their weights or gradients; nothing of it was saved. {ALL_LAYERS}"
            )
