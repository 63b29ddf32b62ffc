"""Gradients as multiples of one unit, whose sums in float64 are exact: for whole parameters, and for FSDP2's shards."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.distributed import accelerate_patches, collectives
from app.distributed.accelerator import Accelerator
from app.distributed.fsdp_calls import is_gathered, is_sharded, own_parameters
from app.distributed.naming import local_gradient, local_shard
from app.errors import UserError
from app.training.exact import rounding as grid_rounding

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

GRID = 40  # gradients are rounded to multiples of 2**-GRID


class Grid:
    """Round gradients to multiples of 2**-GRID; under fp16, of 2**-GRID times the loss scale."""

    def __init__(self, accelerator: Accelerator):
        self.scaler = accelerator.scaler
        self.counting = False
        self.counts = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # lost, nonzero
        # For each parameter, in a counted step: the largest absolute value of each micro-batch, summed, in grid points.
        self.names: list[str] = []
        self.reach = torch.zeros(0, dtype=torch.float64, device=accelerator.device)

    @property
    def points(self) -> Tensor | float:
        """Return the number of grid points in a gradient of 1."""
        return 2.0**GRID if self.scaler is None else 2.0**GRID / self.scaler._scale

    def enter(self, names: list[str]) -> int:
        """Give parameters consecutive numbers, equal on every rank, and return the first one."""
        self.names += names
        self.reach = self.reach.new_zeros(len(self.names))
        return len(self.names) - len(names)

    def watch(self, closely: bool) -> None:
        """Choose whether the next step counts what the grid loses, which costs two passes over the gradients."""
        self.counting = closely
        if closely:
            self.reach.zero_()

    def _counted(self, gradient: Tensor, parameter: int, in_place: bool = False) -> Tensor:
        """Return each value's nearest grid point, as a multiple of the unit, and count what the grid loses."""
        present = gradient != 0
        multiples = grid_rounding.to_numbers(gradient, self.points, in_place)
        self.counts += torch.stack([(present & (multiples == 0)).sum(), present.sum()])
        self.reach[parameter] += multiples.abs().amax() if multiples.numel() else 0.0
        return multiples

    def nearest(self, parameter: int, gradient: Tensor) -> Tensor:
        """Round the gradient of parameter number `parameter` to the grid."""
        if isinstance(gradient, DTensor):  # of a layer that is split
            rounded_shard = self.nearest(parameter, gradient.to_local())
            return accelerate_patches.sharded_like(gradient, rounded_shard)
        if self.counting:
            return self._counted(gradient, parameter).div_(self.points)
        return grid_rounding.nearest(gradient, self.points)

    def add(self, gradients: list[Tensor], parameter: int, sums: Tensor, fresh: bool) -> None:
        """Round the gradients of parameters number `parameter` and following, and add them to sums, in grid points.

        Args:
            gradients: of one dtype; they are overwritten.
            sums: float64 [numbers of all gradients].
            fresh: overwrite the sums instead of adding to them.
        """
        if not self.counting:
            grid_rounding.add(grid_rounding.joined(gradients), sums, self.points, fresh)
            return
        pieces = sums.split([gradient.numel() for gradient in gradients])
        for index, (gradient, piece) in enumerate(zip(gradients, pieces, strict=True)):
            multiples = self._counted(gradient, parameter + index, in_place=True).reshape(-1)
            piece.copy_(multiples) if fresh else piece.add_(multiples)

    def survey(self) -> tuple[float, float, str]:
        """Return what all ranks have counted. Every rank takes part, in one all-reduce.

        Returns:
            The share of nonzero values that were rounded to 0 since the last call; an upper bound, in units of the
            gradient, of any partial sum over the last step's micro-batches; and the name of its parameter.
        """
        counted = torch.cat([self.counts, self.reach.nan_to_num(0.0, 0.0, 0.0)])
        if not collectives.alone():
            dist.all_reduce(counted)
        self.counts.zero_()
        lost, present, *reach = counted.tolist()
        furthest = max(range(len(reach)), key=reach.__getitem__)
        return lost / present if present else 0.0, reach[furthest] / 2.0**GRID, self.names[furthest]


class Sums:
    """Sum one model's gradients in float64, in grid points: 8 bytes a parameter, reduced over ranks as one tensor."""

    def __init__(self, model: nn.Module, grid: Grid, alone: bool):
        """Make room for the sums.

        Args:
            alone: whether no other process has micro-batches of its own.
        """
        self.alone = alone
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.grid, self.first = grid, grid.enter([name for name, _ in named])
        self.parameters = [p for _, p in named]
        self.starts = list(itertools.accumulate((local_shard(p).numel() for p in self.parameters), initial=0))
        device, count = self.parameters[0].device, len(self.parameters)
        # The sums; after them, for each parameter, the number of ranks that had a gradient for it.
        self.flat = torch.zeros(self.starts[-1] + count, dtype=torch.float64, device=device)
        self.seen = [False] * count
        self.before: dict[int, Tensor] = {}
        grid_rounding.fused(device)  # so that its kernels compile now, and not in the first step

    def set_aside(self) -> None:
        """Put aside gradients of an earlier loop over the same batch, which are summed already."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.before[index], parameter.grad = parameter.grad, None

    def add(self) -> None:
        """Round the parameters' gradients, add them to the sums, and clear them."""
        had = [parameter.grad is not None for parameter in self.parameters]
        for run in self._runs(lambda index: (had[index], self.seen[index])):
            if had[run.start]:
                gradients = [local_gradient(self.parameters[index]) for index in run]
                self.grid.add(gradients, self.first + run.start, self._piece(run), fresh=not self.seen[run.start])
                for index in run:
                    self.seen[index], self.parameters[index].grad = True, None

    def finish(self) -> None:
        """Sum over data ranks, in one all-reduce, and set the parameters' gradients. Every rank takes part."""
        for run in self._runs(self.seen.__getitem__):
            if not self.seen[run.start]:
                self._piece(run).zero_()
        had = self.seen
        if not self.alone:
            counts = self.flat[self.starts[-1] :]
            counts.copy_(torch.tensor(self.seen)) if not all(self.seen) else counts.fill_(1.0)
            dist.all_reduce(self.flat)
            # A parameter without a gradient on any rank gets none: the optimizer then skips it, as on one process.
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
        """Set the gradients of neighbouring parameters; they share one block of memory."""
        parameters, sums = [self.parameters[index] for index in run], self._piece(run)
        gradients = torch.div(sums, self.grid.points, out=torch.empty_like(sums, dtype=parameters[0].dtype))
        shards = [local_shard(parameter.detach()) for parameter in parameters]
        sizes = [shard.numel() for shard in shards]
        for parameter, shard, gradient in zip(parameters, shards, gradients.split(sizes), strict=True):
            shaped = gradient.view(shard.shape)
            # The optimizer's multi-tensor kernels need gradients with the strides of their weights.
            alike = shaped.stride() == shard.stride()
            strided = shaped if alike else torch.empty_like(shard).copy_(shaped)
            split = isinstance(parameter, DTensor)
            parameter.grad = accelerate_patches.sharded_like(cast(DTensor, parameter), strided) if split else strided

    def _piece(self, run: range) -> Tensor:
        return self.flat[self.starts[run.start] : self.starts[run.stop]]

    def _runs(self, kind: Callable[[int], Any]) -> Iterator[range]:
        """Yield runs of neighbouring parameters with the same dtype and `kind`, small enough for one kernel launch."""
        start, most = 0, grid_rounding.piece(self.flat.device)
        for index in range(1, len(self.parameters) + 1):
            if index < len(self.parameters) and self.starts[index + 1] - self.starts[start] <= most:
                same_type = self.parameters[index].dtype == self.parameters[start].dtype
                if same_type and kind(index) == kind(start):
                    continue
            yield range(start, index)
            start = index


def _fsdp(module: nn.Module) -> "FSDPModule":
    return cast("FSDPModule", module)


class ShardedRounding:
    """Round one model's gradients under FSDP2: each whole gradient, before FSDP2 sums and reduces it in float64.

    FSDP2 reduces a layer's gradients when the first backward pass through the layer is over, though autograd adds up
    those of all its uses. So where a micro-batch uses a layer several times, the gradients are held back until its
    whole backward pass is over, and each layer is reduced once. Layers that are used once are reduced as they come.
    """

    def __init__(self, model: nn.Module, grid: Grid):
        """Install hooks that round a prepared model's gradients, and have FSDP2 sum over ranks instead of averaging."""
        # torch 2.13's FSDP2 chooses the dtype of a layer's gradients at its first forward pass, from the weights that
        # require gradients then. None may: another model's gradients may only flow through this one in that pass.
        accelerate_patches.start_fsdp(model)
        self.grid = grid
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        first = grid.enter(list(self.names.values()))
        self.numbers = {parameter: first + index for index, parameter in enumerate(self.names)}
        self.wholes: dict[nn.Parameter, nn.Parameter] = {}  # the whole parameters of shards, with hooks on them
        self.unchecked = set(self.names)
        # Of this micro-batch: forward passes before its backward pass; layers with several; parameters that had their
        # gradient; and gradients that are held back. By shards, as names are.
        self.uses = {module: 0 for module in model.modules() if is_sharded(module)}
        self.several: set[nn.Module] = set()
        self.had: set[nn.Parameter] = set()
        self.held: dict[nn.Parameter, Tensor] = {}
        for module in self.uses:
            _fsdp(module).set_gradient_divide_factor(1.0)
            named = ((inner, name, inner._parameters[name]) for inner, name in own_parameters(module))
            places = [(inner, name, shard) for inner, name, shard in named if shard is not None]
            # This hook runs after FSDP2's own, which gathers the whole parameters of this module and of modules in it.
            # FSDP2 keeps the tensors of the first gather, so a hook on them lasts, even if the forward method of the
            # inner modules is never called.
            module.register_forward_pre_hook(partial(self._hook, places))
            # It expects this of a layer that micro-batches leave out, too.
            _fsdp(module).unshard()
            _fsdp(module).reshard()

    def _hook(self, places: list[tuple[nn.Module, str, nn.Parameter]], module: nn.Module, *_: Any) -> None:
        self.uses[module] += 1
        for place in list(places):
            inner, name, shard = place
            whole = inner._parameters[name]
            if whole is not None and is_gathered(whole) and whole.requires_grad:
                if shard not in self.wholes:  # a shared parameter has one tensor under several names
                    whole.register_hook(partial(self._round, module, shard))
                    whole.register_post_accumulate_grad_hook(partial(self._hold, module, shard))
                    self.wholes[shard] = whole
                places.remove(place)

    def begin(self) -> None:
        """Begin a micro-batch; until `backward`, FSDP2 reduces nothing, whatever gradients its loss may take."""
        self.several = set()
        self.had.clear()
        for module in self.uses:
            self.uses[module] = 0
            _fsdp(module).set_requires_gradient_sync(False, recurse=False)

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Round the gradients of the backward pass in this block.

        Args:
            last: whether this is the step's last micro-batch, in which gradients are reduced.
        """
        self.several = {module for module, uses in self.uses.items() if uses > 1}
        for module in self.uses:
            _fsdp(module).set_requires_gradient_sync(last and module not in self.several, recurse=False)
        yield
        for shard, gradient in self.held.items():
            self.wholes[shard].grad = self.grid.nearest(self.numbers[shard], gradient)
        self.held.clear()
        for module in self.uses:
            if module in self.several:
                accelerate_patches.take_gradients(module, reduce=last)

    def _round(self, module: nn.Module, shard: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
        """Round what is about to be added to the gradient of a whole parameter.

        Raises:
            UserError: it has had a gradient in this micro-batch, of a layer that is used once.
        """
        if module in self.several or gradient is None:  # None: of a weight that a gradient in the loss does not have
            return None
        if shard in self.had:
            raise UserError(
                f"--run.exact: {self.names[shard]} gets its gradient in several parts, of which FSDP2 has reduced the "
                "first: give torch.utils.checkpoint use_reentrant=False (gradient_checkpointing_kwargs in "
                "transformers), or take a profile without FSDP"
            )
        self.had.add(shard)
        return self.grid.nearest(self.numbers[shard], gradient)

    def _hold(self, module: nn.Module, shard: nn.Parameter, whole: nn.Parameter) -> None:
        """Take away the gradient of a whole parameter whose layer is used several times, before FSDP2 takes it."""
        if module in self.several and whole.grad is not None:
            gradient, whole.grad = whole.grad, None
            self.held[shard] = self.held[shard].add_(gradient) if shard in self.held else gradient

    def check(self) -> None:
        """Refuse gradients that were not rounded. Called once a step; checks each parameter once.

        Raises:
            UserError: a gradient was not rounded; it names the parameter.
        """
        if not self.unchecked:
            return
        had = {parameter for parameter in self.unchecked if parameter.grad is not None}
        for parameter in had - self.wholes.keys():
            raise UserError(
                f"--run.exact: the gradient of {self.names[parameter]} is not rounded, because it was used outside the "
                "forward pass of the model: call the model itself, and have its forward call the rest"
            )
        self.unchecked -= had
