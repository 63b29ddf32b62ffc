"""Running statistics of BatchNorm and InstanceNorm: the same on any number of processes, to the last bit.

A forward pass folds the statistics s of its micro-batch into the running ones: r = (1 - p) r + p s, with momentum p.
A process sees some of a step's micro-batches only. So it keeps what each of them adds, and before anybody reads the
statistics, one sum over ranks collects all that was added, and every rank folds it in the order of one process. It does
not matter when that happens: the same numbers are folded in the same order. Only where a training step itself reads
statistics that it also adds to, in evaluation mode, they are folded after every step, so that it reads those of the
steps before it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.distributed import collectives, naming
from app.distributed.accelerator import Accelerator
from app.distributed.batch_norm import is_batch_norm

# Bytes that may wait to be folded; beyond, they are folded after a step that nobody reads.
MOST_BYTES = 64 << 20
_NAMES = ("running_mean", "running_var", "num_batches_tracked")
# torch 2.11 to 2.13 have no public name for what InstanceNorm's classes have in common.
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def keeps_running_statistics(module: nn.Module) -> bool:
    """Tell whether a module's forward passes change running statistics that belong to its micro-batch alone."""
    if isinstance(module, _INSTANCE_NORMS):  # with a momentum of None, its forward passes change nothing
        return module.running_mean is not None and module.momentum is not None
    return is_batch_norm(module) and not isinstance(module, nn.SyncBatchNorm) and module.running_mean is not None


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [getattr(module, name) for name in _NAMES]


class Folding:
    """The values that are folded next, of some modules, and what folds them, in one tensor each."""

    def __init__(self, modules: list[Any]):
        """Read the values that the modules have now."""
        tensors = [tensor for module in modules for tensor in _tensors_of(module)[:2]]
        self.values = torch.cat([tensor.detach().flatten() for tensor in tensors] or [torch.zeros(0)])
        self.tracked = torch.stack([_tensors_of(module)[2] for module in modules] or [torch.zeros(0)])
        self.momenta = [module.momentum for module in modules]
        device, kind = self.values.device, self.values.dtype
        counts = torch.tensor([2 * len(m.running_mean) for m in modules], dtype=torch.int64, device=device)
        # For each value, the place of its module.
        self._owner = torch.repeat_interleave(torch.arange(len(modules), device=device), counts)
        left = [0.0 if momentum is None else 1.0 - momentum for momentum in self.momenta]
        self._left = torch.tensor(left, dtype=kind, device=device)[self._owner]
        cumulative = [momentum is None for momentum in self.momenta]
        self._cumulative = torch.tensor(cumulative, dtype=torch.bool, device=device)[self._owner]
        self._any_cumulative = any(cumulative)
        self.sizes = [tensor.numel() for tensor in tensors]
        self.seen = self.tracked.double()
        # InstanceNorm's forward passes leave its counter as it is.
        self.counted = torch.tensor([is_batch_norm(m) for m in modules], dtype=torch.bool, device=device)

    def add(self, added: Tensor, passes: Tensor) -> None:
        """Fold what one micro-batch has added, in as many passes of each module."""
        each = passes[self._owner]
        # A power of one need not be exact.
        left = torch.where(each == 1, self._left, self._left**each)
        folded = torch.addcmul(added, left, self.values)
        if self._any_cumulative:
            self.seen += passes
            share = (each.double() / self.seen[self._owner].clamp(min=1)).to(added.dtype)
            folded = torch.where(self._cumulative, self.values + share * (added - self.values), folded)
        self.values = torch.where(each == 0, self.values, folded)


class RunningStatistics:
    """The running statistics of a run's models."""

    def __init__(self, accelerator: Accelerator, exact: bool):
        """Prepare; `begin` finds the modules.

        Args:
            exact: fold in this way on one process too, where torch's own kernels round otherwise.
        """
        self.accelerator = accelerator
        self._folds = exact or accelerator.num_processes > 1
        self.modules: list[Any] = []
        self._waiting: list[Tensor] = []  # [micro-batches, numbers] of each loop over a step's micro-batches
        self._passes: list[int] = []  # forward passes of each module in this turn
        # Whether each module holds what this turn adds, in place of its statistics; and for the modules that change
        # their mode in it, what they add, what they read, and the tensors that they had.
        self._adding: list[bool] = []
        self._added: dict[int, list[Tensor]] = {}
        self._read_in_turn: dict[int, list[Tensor]] = {}
        self._originals: dict[int, list[Tensor]] = {}
        self._in_turn = False
        # The modules that training steps have added to and read since `begin`; and whether some rank's do both.
        self._trained: set[int] = set()
        self._evaluated: set[int] = set()
        self._does_both: bool | None = None  # None: not known yet
        self._hooks: list[Any] = []
        self._folding = Folding([])

    def begin(self) -> None:
        """Take the statistics that the models have now as those from which training goes on, and drop what waits."""
        for hook in self._hooks:
            hook.remove()
        plain = naming.plain(self.accelerator.models)
        self.modules = [m for model in plain for m in model.modules() if keeps_running_statistics(m)]
        self._waiting, self._passes = [], [0] * len(self.modules)
        self._trained, self._evaluated, self._does_both = set(), set(), None
        self._hooks, self._adding = [], [False] * len(self.modules)
        if self.modules and self._folds:
            self._hooks = [m.register_forward_pre_hook(self._before(index)) for index, m in enumerate(self.modules)]
            self._folding = Folding(self.modules)

    def _before(self, index: int) -> Callable[..., None]:
        """Return what happens before a module's forward pass."""
        counts = not is_batch_norm(self.modules[index])  # which counts by itself

        def hook(module: nn.Module, inputs: Any) -> None:
            if self._in_turn:
                (self._trained if module.training else self._evaluated).add(index)
                if module.training != self._adding[index]:
                    self._switch(index, module.training)
            if counts and module.training:
                self._passes[index] += 1

        return hook

    def _switch(self, index: int, adding: bool) -> None:
        """Give a module what it has added in this turn, to add more; or its statistics, which it reads in eval mode.

        It gets other tensors: a backward pass may still need those of an earlier forward pass as they are.
        """
        module, places = self.modules[index], (self._added if adding else self._read_in_turn)
        if index not in places:
            self._originals.setdefault(index, _tensors_of(module))
            values = [*self._views()[2 * index : 2 * index + 2], self._folding.tracked[index]]
            places[index] = [torch.zeros_like(tensor) if adding else tensor.clone() for tensor in values]
        for name, tensor in zip(_NAMES, places[index], strict=True):
            setattr(module, name, tensor)
        self._adding[index] = adding

    def values(self, model: nn.Module) -> list[Tensor]:
        """Return the means and variances of a model's norms, as they are after the last fold."""
        inside = set(model.modules())
        return [tensor for module in self.modules if module in inside for tensor in _tensors_of(module)[:2]]

    def _statistics(self) -> list[list[Tensor]]:
        """Return each module's mean, variance and counter."""
        return [_tensors_of(module) for module in self.modules]

    def loop(self, micro_batches: int) -> None:
        """Begin a loop over a step's micro-batches. Every rank takes part in every loop, with the same momenta."""
        if self.modules and self._folds:
            if self._folding.momenta != [module.momentum for module in self.modules]:
                self.fold()
                self._folding = Folding(self.modules)
            width = len(self._folding.values) + len(self.modules) + 1
            self._waiting.append(self._folding.values.new_zeros(micro_batches, width))

    def turn(self, index: int, idle: bool) -> Any:
        """Keep what the forward passes in this block add; of an idle turn, nothing.

        Args:
            index: of the micro-batch in its step.
        """
        if not self.modules or not (self._folds or idle):
            return nullcontext()
        return self._keeping(index, idle)

    @contextmanager
    def _keeping(self, index: int, idle: bool) -> Iterator[None]:
        statistics = self._statistics()
        copies = None if self._folds else [tensor.clone() for tensors in statistics for tensor in tensors]
        if self._folds:
            self._begin_turn(statistics)
        try:
            yield
            if not idle:
                self._keep(self._waiting[-1][index])
        finally:
            self._end_turn()
            with torch.no_grad():
                if copies is None:
                    self._hand_out(statistics)
                else:
                    torch._foreach_copy_([tensor for tensors in statistics for tensor in tensors], copies)

    def _begin_turn(self, statistics: list[list[Tensor]]) -> None:
        """Have the modules that are in training mode add to zeros."""
        self._in_turn, self._passes = True, [0] * len(self.modules)
        self._adding = [module.training for module in self.modules]
        for index, tensors in enumerate(statistics):
            (self._added if self._adding[index] else self._read_in_turn)[index] = tensors
        added = list(self._added.values())
        if added:
            with torch.no_grad():
                torch._foreach_zero_([tensor for tensors in added for tensor in tensors[:2]])
                torch._foreach_zero_([tensors[2] for tensors in added])

    def _hand_out(self, statistics: list[list[Tensor]]) -> None:
        """Write the values that are folded next into the modules; floats and counters apart, as kernels take them."""
        torch._foreach_copy_([tensor for tensors in statistics for tensor in tensors[:2]], self._views())
        torch._foreach_copy_([tensors[2] for tensors in statistics], list(self._folding.tracked.unbind()))

    def _end_turn(self) -> None:
        """Give modules that have changed their mode their own tensors again."""
        for index, tensors in self._originals.items():
            for name, tensor in zip(_NAMES, tensors, strict=True):
                setattr(self.modules[index], name, tensor)
        self._in_turn, self._added, self._read_in_turn, self._originals = False, {}, {}, {}

    def _keep(self, row: Tensor) -> None:
        """Write what this turn has added into a row of `_waiting`: zeros for a module that was in eval mode."""
        for index in range(len(self.modules)):
            if index not in self._added:
                self._added[index] = [torch.zeros_like(tensor) for tensor in self._read_in_turn[index]]
        added = [self._added[index] for index in range(len(self.modules))]
        passes = torch.stack([tensors[2] for tensors in added]).to(row.dtype)
        if any(self._passes):
            passes = passes + torch.tensor(self._passes, dtype=row.dtype).to(row.device, non_blocking=True)
        with torch.no_grad():
            torch.cat([*(tensor for tensors in added for tensor in tensors[:2]), passes], out=row[:-1])

    def _views(self) -> list[Tensor]:
        """Return the values as a mean and a variance for each module, each [channels]."""
        return list(self._folding.values.split(self._folding.sizes))

    def fold(self, only_if_many: bool = False) -> None:
        """Fold what waits into the models' statistics. Every rank takes part; a collective if something waits.

        Args:
            only_if_many: leave it, unless it takes much memory, or training steps read what they add to.
        """
        if not self._waiting or (only_if_many and self._does_both is False and self._bytes() <= MOST_BYTES):
            return
        rows = torch.cat(self._waiting)
        self._waiting = []
        if self._does_both is None:  # in the first step of a launch
            rows[0, -1] = float(bool(self._trained & self._evaluated))
        if not collectives.alone():
            dist.all_reduce(rows)
            rows /= self.accelerator.ranks_per_data_rank
        if self._does_both is None:
            self._does_both = bool(rows[0, -1] > 0)
        added, passes, _ = rows.split([len(self._folding.values), len(self.modules), 1], 1)
        for row, count in zip(added, passes, strict=True):
            self._folding.add(row, count)
        self._folding.tracked += (passes.sum(0) * self._folding.counted).to(self._folding.tracked.dtype)
        with torch.no_grad():
            self._hand_out(self._statistics())

    def remember(self) -> Callable[[], None]:
        """Return a function that puts the statistics back as they are now, with what waits to be folded."""
        if not (self.modules and self._folds):
            return lambda: None
        waiting, values = [*self._waiting], self._folding.values
        tracked, seen = self._folding.tracked.clone(), self._folding.seen.clone()

        def put_back() -> None:
            self._waiting, self._folding.values = [*waiting], values
            self._folding.tracked, self._folding.seen = tracked.clone(), seen.clone()
            with torch.no_grad():
                self._hand_out(self._statistics())

        return put_back

    def _bytes(self) -> int:
        return sum(rows.nbytes for rows in self._waiting)
