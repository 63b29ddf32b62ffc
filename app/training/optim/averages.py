"""Weights that are scored and exported in place of those in training: averages over the steps, sharded as they are.

They are an exponential moving average, or a uniform one, kept here; or those of an optimizer that has an average of its
own and gives it by `eval()`, as schedule-free ones do (Defazio et al., *The Road Less Scheduled*, 2024).

An update is a function of the weights and of how many updates there were, and is computed number by number, so it is
the same on every layout. Steps that were left out do not count. Running statistics of norms are averaged with the
weights; other buffers are taken as they are.
(Exponential: Tarvainen and Valpola, *Mean teachers*, 2017. Uniform: Izmailov et al., *Averaging Weights Leads to Wider
Optima*, 2018.)
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from app.checkpoints.resume import Start
from app.config import EMAConfig
from app.config.score_names import AVERAGE, PLAIN
from app.distributed import deepspeed
from app.distributed.accelerator import Accelerator
from app.distributed.buffers import Buffers
from app.distributed.fsdp_calls import is_sharded
from app.distributed.naming import local_shard
from app.distributed.state import state_dict
from app.errors import UserError
from app.sampling.triggers import as_steps

# Bytes of weights that are updated at once, which needs as much memory again.
_PIECE = 64 << 20


class Averages:
    """The averages of a run's models."""

    def __init__(self, settings: EMAConfig | None, accelerator: Accelerator, buffers: Buffers):
        """Prepare.

        Args:
            settings: None where the recipe has none.

        Raises:
            UserError: a setting does not work, or DeepSpeed hides the weights.
        """
        self.settings = settings if settings is not None and settings.on else None
        self.accelerator, self._buffers = accelerator, buffers
        self._models: list[tuple[nn.Module, torch.optim.Optimizer]] = []
        self._switching: list[torch.optim.Optimizer] = []
        self._start = 0
        self.counts: list[int] = []
        """For each model, how many weights its average has of steps after the one with which it begins."""
        self.applied = False
        """Whether the models have other weights now than those in training."""
        if settings is not None:
            _check(settings)
        if self.settings is not None:
            deepspeed.refuse("--ema", accelerator.distributed_type)

    @property
    def replaces(self) -> bool:
        """Tell whether scores and the finished model are those of the average."""
        return self.settings is not None and self.settings.use == "instead"

    def header(self) -> list[str]:
        """Say in a line that there is an average; none if there is not."""
        names = dict.fromkeys(type(optimizer).__name__ for optimizer in self._switching)
        lines = [f"{name}: scores and the finished model have the weights of its eval()" for name in names]
        if lines and any(self._statistics(model) for model in self.accelerator.models):
            lines[-1] += "; running statistics of norms stay those of the weights in training"
        if self.settings is None:
            return lines
        kind = "uniform" if self.settings.uniform else f"decay {self.settings.decay:g}"
        whose = "scores and the finished model are the average's" if self.replaces else "its scores are named ema/..."
        return [f"average of the weights: {kind}; {whose} (--ema.use {self.settings.use})", *lines]

    def add(self, model: nn.Module, optimizer: torch.optim.Optimizer, averaged: bool = True) -> None:
        """Take a prepared model, which an optimizer updates.

        Args:
            averaged: whether to average its weights.

        Raises:
            UserError: the optimizer averages them too.
        """
        plain = getattr(optimizer, "optimizer", optimizer)  # inside accelerate's, which has a train() itself
        if state_dict.switches(plain):
            if self.settings is not None and averaged:
                raise UserError(
                    f"--ema: {type(plain).__name__} keeps an average of its own, which is scored and exported: leave "
                    "--ema out"
                )
            cast(Any, plain).train()
            self._switching.append(plain)
        if self.settings is not None and averaged:
            self._models.append((model, optimizer))
            self.counts.append(0)
            self.accelerator.averages |= {p: _copy(p) for p in _trained(optimizer)}

    def begin(self, steps: int, start: Start) -> None:
        """Begin the loop of a run of `steps` steps; the models have the weights from which it goes on."""
        if self.settings is None:
            return
        self._start = as_steps(self.settings.start, steps)
        if len(start.counts.averaged) == len(self.counts):  # it has none where averages are new
            self.counts = [*start.counts.averaged]
        for model, _ in self._models:
            for tensor in self._statistics(model):
                self.accelerator.averages.setdefault(tensor, _copy(tensor))

    def _place(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Return the place in the list of models of the one that an optimizer updates; None if it has no average."""
        return next((place for place, (_, updating) in enumerate(self._models) if updating is optimizer), None)

    def _averaged(self, place: int) -> list[Tensor]:
        """Return the tensors of a model that may have an average."""
        model, optimizer = self._models[place]
        return [*_trained(optimizer), *self._statistics(model)]

    def remember(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Return a function that puts the average of an optimizer's weights back as it is now."""
        if (place := self._place(optimizer)) is None:
            return lambda: None
        averages, count = self.accelerator.averages, self.counts[place]
        average_before = {averages[t]: local_shard(averages[t]).clone() for t in self._averaged(place) if t in averages}

        def put_back() -> None:
            self.counts[place] = count
            for average, before in average_before.items():
                local_shard(average).copy_(before)

        return put_back

    def update(self, made: int, optimizer: torch.optim.Optimizer) -> None:
        """Add the weights that an optimizer has updated. Every rank takes part.

        Args:
            made: the number of the run's steps that have updated weights, this one too.
        """
        place, settings = self._place(optimizer), self.settings
        if place is None or settings is None or (made > self._start and (made - self._start) % settings.every):
            return
        self._buffers.statistics.fold()
        self.counts[place] = self.counts[place] + 1 if made > self._start else 0
        rate, averages = _rate(settings, self.counts[place]), self.accelerator.averages
        for piece in _pieces(self._averaged(place)):
            pairs = [(local_shard(averages[t]), local_shard(t.detach())) for t in piece if t in averages]
            if not pairs:  # a plan's step is on other tensors
                continue
            _move([average for average, _ in pairs], [newest for _, newest in pairs], rate)

    def passes(self) -> list[tuple[str, AbstractContextManager[None]]]:
        """List the passes of an evaluation: what its scores begin with, and a block that has the weights for it."""
        if self.settings is None or self.replaces:
            return [(PLAIN, self.in_place())]
        return [(PLAIN, self.in_place(average=False)), (AVERAGE, self.in_place())]

    @contextmanager
    def in_place(self, average: bool = True) -> Iterator[None]:
        """Give the models the weights that are scored, for a block that trains nothing; inside another one, do nothing.

        Args:
            average: give them those that --ema keeps too, and not only those of an optimizer's own.
        """
        averages = self.accelerator.averages if average else {}
        if self.applied or not (averages or self._switching):
            yield
            return
        self._buffers.statistics.fold()  # what is folded in the block would replace the average's statistics
        switched = [weight for optimizer in self._switching for weight in _trained(optimizer)]
        # A copy: what eval() changes, train() changes back only up to rounding.
        trained_weights = {tensor: local_shard(tensor.detach()).clone() for tensor in (*averages, *switched)}
        self.applied = True
        try:
            for optimizer in self._switching:
                cast(Any, optimizer).eval()
            self._write(averages)
            yield
        finally:
            for optimizer in self._switching:
                cast(Any, optimizer).train()
            self._write(trained_weights)
            self.applied = False

    def _write(self, values: dict[Tensor, Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in values.items():
                local_shard(tensor.detach()).copy_(local_shard(value))
        for model in self.accelerator.models:
            for module in model.modules():
                if is_sharded(module):  # a forward pass may have left whole weights, which are others now
                    cast(FSDPModule, module).reshard()

    def _statistics(self, model: nn.Module) -> list[Tensor]:
        return self._buffers.statistics.values(model)


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _copy(tensor: Tensor) -> Tensor:
    """Copy weights, sharded as they are, in at least 32 bits: a smaller type would round each small change away."""
    kind = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.detach().to(kind, copy=True)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Cut tensors into pieces of similar size, which are updated one after the other."""
    piece: list[Tensor] = []
    for tensor in tensors:
        piece.append(tensor)
        if sum(local_shard(each).nbytes for each in piece) >= _PIECE:
            yield piece
            piece = []
    if piece:
        yield piece


@torch.no_grad()
def _move(averages: list[Tensor], newest: list[Tensor], rate: float) -> None:
    """Move averages by `rate` of the way to the newest weights.

    Each operation rounds once, so that a number's bits do not depend on its place in a vector, as those of a fused
    multiplication and addition would.
    """
    if rate == 1:
        torch._foreach_copy_(averages, newest)
        return
    steps = torch._foreach_sub([new.to(old.dtype) for new, old in zip(newest, averages, strict=True)], averages)
    torch._foreach_mul_(steps, rate)
    torch._foreach_add_(averages, steps)


def _check(settings: EMAConfig) -> None:
    """Raise UserError for the first invalid value."""
    if not 0 <= settings.decay < 1:
        raise UserError(
            f"--ema.decay {settings.decay} does not work: it must be from 0 to below 1, for example 0.999; with 1, the "
            "average would always be the first weights"
        )
    changed = [field.name for field in dataclasses.fields(settings) if getattr(settings, field.name) != field.default]
    if changed and not settings.on:
        raise UserError(
            f"--ema.{changed[0]} does nothing without --ema.decay, for example 0.999, or --ema.uniform true"
        )


def _rate(settings: EMAConfig, updates: int) -> float:
    """Return the weight of the newest weights in the average, which has as many of steps after its beginning."""
    if updates == 0:
        return 1.0
    if settings.uniform:
        return 1 / (1 + updates)
    decay = settings.decay
    return 1 - (min(decay, (1 + updates) / (10 + updates)) if settings.warmup else decay)
