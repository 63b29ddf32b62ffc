"""Gradients as multiples of one unit, whose sums in float64 are exact: on whole parameters, and on FSDP2's shards."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.distributed import accelerate_patches, collectives
from app.distributed.accelerator import Accelerator
from app.errors import UserError
from app.training import grid_rounding

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

GRID = 40  # gradients are rounded to multiples of 2**-GRID


class Grid:
    """Multiples of 2**-GRID, and under fp16 of that times the loss's scale."""

    def __init__(self, accelerator: Accelerator):
        self.scaler = accelerator.scaler
        self.counting = False
        self.counts = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # lost, not zero
        # For each parameter, of a step that is counted: its largest value of each micro-batch, added up, in points.
        self.names: list[str] = []
        self.reach = torch.zeros(0, dtype=torch.float64, device=accelerator.device)

    @property
    def points(self) -> Tensor | float:
        """How many grid points make a gradient of 1."""
        return 2.0**GRID if self.scaler is None else 2.0**GRID / self.scaler._scale

    def enter(self, names: list[str]) -> int:
        """Number parameters, the same ones on every rank, and return the first number."""
        self.names += names
        self.reach = self.reach.new_zeros(len(self.names))
        return len(self.names) - len(names)

    def watch(self, closely: bool) -> None:
        """Count in the step that begins, or do not; it costs two passes over the gradients."""
        self.counting = closely
        if closely:
            self.reach.zero_()

    def _counted(self, gradient: Tensor, parameter: int, in_place: bool = False) -> Tensor:
        """Return the number of the grid point nearest to each value, and count what the grid loses."""
        present = gradient != 0
        found = grid_rounding.to_numbers(gradient, self.points, in_place)
        self.counts += torch.stack([(present & (found == 0)).sum(), present.sum()])
        self.reach[parameter] += found.abs().amax() if found.numel() else 0.0
        return found

    def nearest(self, parameter: int, gradient: Tensor) -> Tensor:
        """Round each value of a numbered parameter's gradient to the grid."""
        if self.counting:
            return self._counted(gradient, parameter).div_(self.points)
        return grid_rounding.nearest(gradient, self.points)

    def add(self, gradients: list[Tensor], parameter: int, sums: Tensor, fresh: bool) -> None:
        """Round the gradients of parameters that are numbered from `parameter` on, and add them to flat sums.

        Args:
            gradients: of one type; what is in them afterwards has no meaning.
            fresh: what was in the sums counts for nothing.
        """
        if not self.counting:
            grid_rounding.add(grid_rounding.joined(gradients), sums, self.points, fresh)
            return
        pieces = sums.split([gradient.numel() for gradient in gradients])
        for index, (gradient, piece) in enumerate(zip(gradients, pieces, strict=True)):
            found = self._counted(gradient, parameter + index, in_place=True).reshape(-1)
            piece.copy_(found) if fresh else piece.add_(found)

    def survey(self) -> tuple[float, float, str]:
        """Return what was counted on all ranks. Every rank takes part.

        Returns:
            The share of values, since the last call, that were not 0 and were rounded to it; a bound on the sums over
            any of the last step's micro-batches, in any order, where a gradient of 1 is 1; and the parameter it is of.
        """
        found = torch.cat([self.counts, self.reach.nan_to_num(0.0, 0.0, 0.0)])
        if not collectives.alone():
            dist.all_reduce(found)
        self.counts.zero_()
        lost, present, *reach = found.tolist()
        furthest = max(range(len(reach)), key=reach.__getitem__)
        return lost / present if present else 0.0, reach[furthest] / 2.0**GRID, self.names[furthest]


class Sums:
    """Float64 sums of one model's gradients, in grid points: 8 bytes a parameter, reduced as one tensor."""

    def __init__(self, model: nn.Module, grid: Grid):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.grid, self.first = grid, grid.enter([name for name, _ in named])
        self.parameters = [p for _, p in named]
        self.starts = list(itertools.accumulate((p.numel() for p in self.parameters), initial=0))
        device, count = self.parameters[0].device, len(self.parameters)
        # After the sums: how many ranks had a gradient for each parameter.
        self.flat = torch.zeros(self.starts[-1] + count, dtype=torch.float64, device=device)
        self.seen = [False] * count
        self.before: dict[int, Tensor] = {}
        grid_rounding.fused(device)  # compiled now, and not in the first step

    def set_aside(self) -> None:
        """Keep gradients of an earlier loop over the same batch, which are summed already, apart."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.before[index], parameter.grad = parameter.grad, None

    def add(self) -> None:
        """Round the gradients at hand and add them."""
        had = [parameter.grad is not None for parameter in self.parameters]
        for run in self._runs(lambda index: (had[index], self.seen[index])):
            if had[run.start]:
                gradients = [self.parameters[index].grad for index in run]
                self.grid.add(gradients, self.first + run.start, self._piece(run), fresh=not self.seen[run.start])
                for index in run:
                    self.seen[index], self.parameters[index].grad = True, None

    def finish(self) -> None:
        """Sum over ranks and hand the parameters their gradients. Every rank takes part."""
        for run in self._runs(self.seen.__getitem__):
            if not self.seen[run.start]:
                self._piece(run).zero_()
        had = self.seen
        if not collectives.alone():
            counts = self.flat[self.starts[-1] :]
            counts.copy_(torch.tensor(self.seen)) if not all(self.seen) else counts.fill_(1.0)
            dist.all_reduce(self.flat)
            # One that no rank had a gradient for gets none, so that the optimizer leaves it alone on any layout.
            had = self.seen if all(self.seen) else [count > 0 for count in counts.tolist()]
        for run in self._runs(had.__getitem__):
            if had[run.start]:
                self._hand_over(run)
        for index, gradient in self.before.items():
            parameter = self.parameters[index]
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self.before = {}
        self.seen = [False] * len(self.seen)

    def _hand_over(self, run: range) -> None:
        """Give neighbouring parameters their gradients, which share memory."""
        parameters, sums = [self.parameters[index] for index in run], self._piece(run)
        gradients = torch.div(sums, self.grid.points, out=torch.empty_like(sums, dtype=parameters[0].dtype))
        for parameter, gradient in zip(parameters, gradients.split([p.numel() for p in parameters]), strict=True):
            shaped = gradient.view(parameter.shape)
            # The optimizer's kernels for many parameters want gradients to lie in memory as the weights do.
            alike = shaped.stride() == parameter.stride()
            parameter.grad = shaped if alike else torch.empty_like(parameter, requires_grad=False).copy_(shaped)

    def _piece(self, run: range) -> Tensor:
        return self.flat[self.starts[run.start] : self.starts[run.stop]]

    def _runs(self, kind: Callable[[int], Any]) -> Iterator[range]:
        """Go through all parameters in runs of neighbours of one type and of one kind, which one launch can take."""
        start, most = 0, grid_rounding.piece(self.flat.device)
        for index in range(1, len(self.parameters) + 1):
            if index < len(self.parameters) and self.starts[index + 1] - self.starts[start] <= most:
                same_type = self.parameters[index].dtype == self.parameters[start].dtype
                if same_type and kind(index) == kind(start):
                    continue
            yield range(start, index)
            start = index


class Shards:
    """One model under FSDP2, which rounds each whole gradient before it accumulates and reduces it, in float64."""

    def __init__(self, model: nn.Module, grid: Grid):
        """Have a prepared model's gradients rounded, and added up where FSDP2 would average."""
        # torch 2.13's FSDP2 fixes the type of a layer's gradients at its first forward pass, from the weights that
        # learn then: none do where that pass is one that the gradients of another model only flow through.
        accelerate_patches.start_fsdp(model)
        self.grid = grid
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        first = grid.enter(list(self.names.values()))
        self.numbers = {parameter: first + index for index, parameter in enumerate(self.names)}
        self.rounded: set[nn.Parameter] = set()
        self.unchecked = set(self.names)
        for module in filter(_is_sharded, model.modules()):
            cast("FSDPModule", module).set_gradient_divide_factor(1.0)
            places = [(inner, name, inner._parameters[name]) for inner, name in _own_parameters(module)]
            # Behind FSDP2's own hook, which makes the whole parameters of this module and of those inside it; the
            # first one makes the tensors that stay, whether or not these modules' own forward is ever called.
            module.register_forward_pre_hook(partial(self._hook, places))

    def _hook(self, places: list[tuple[nn.Module, str, nn.Parameter]], *_) -> None:
        for place in list(places):
            inner, name, shard = place
            whole = inner._parameters[name]
            if not isinstance(whole, DTensor) and whole.requires_grad:
                if shard not in self.rounded:  # which has one tensor, under however many names
                    whole.register_hook(partial(self.grid.nearest, self.numbers[shard]))
                    self.rounded.add(shard)
                places.remove(place)

    def check(self) -> None:
        """Refuse gradients that were not rounded; asked for once a step, it looks at each parameter once.

        Raises:
            UserError: there is one; it names the parameter.
        """
        if not self.unchecked:
            return
        had = {parameter for parameter in self.unchecked if parameter.grad is not None}
        for parameter in had - self.rounded:
            raise UserError(
                f"--run.exact: the gradient of {self.names[parameter]} is not rounded, as it was used outside the "
                "forward pass of the model: call the model itself, and have its forward call the rest"
            )
        self.unchecked -= had


def _is_sharded(module: nn.Module) -> bool:
    return hasattr(module, "set_gradient_divide_factor")


def _own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Go through the parameters that FSDP2 gathers with a module: all below it that no module inside it gathers."""
    yield from ((module, name) for name, parameter in module._parameters.items() if parameter is not None)
    for inner in module.children():
        if not _is_sharded(inner):
            yield from _own_parameters(inner)
