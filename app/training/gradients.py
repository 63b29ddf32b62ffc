"""The gradient of a global batch from those of its micro-batches: the one owner of weighting and synchronisation."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn

from app.distributed import accelerate_patches, deepspeed
from app.distributed.accelerator import Accelerator
from app.errors import UserError
from app.sampling.batch_plan import Step, Turn


class Gradients:
    """Weigh, accumulate, synchronise, and clip."""

    def __init__(self, accelerator: Accelerator, seed: int):
        self.accelerator, self.seed = accelerator, seed
        self._unchecked: set[nn.Module] = set()
        self._sharded: list[Any] = []  # modules that FSDP2 gathers
        self._passed = False  # the backward pass of this turn has run
        self._step: Step | None = None

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> tuple[nn.Module, Any]:
        """Place a model and its optimizer, whose gradients will be clipped to norm `clip` (0: not)."""
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            deepspeed.configure(self.accelerator.state.deepspeed_plugin, clip, models=len(self.accelerator.models))
        model, optimizer = self.accelerator.prepare(model, optimizer)
        self._unchecked.add(model)
        self._sharded += [module for module in model.modules() if hasattr(module, "reshard")]
        if wrapper := _wrapper(model):
            # Else a forward pass without a backward pass would have DDP reduce in the next backward pass, whichever.
            wrapper.require_backward_grad_sync = False
        return model, optimizer

    @contextmanager
    def turn(self, models: Sequence[nn.Module], last: bool) -> Iterator[None]:
        """Hold back synchronisation in every turn of a step but the last. The forward pass belongs inside."""
        # DeepSpeed's engine updates the weights inside the backward pass that synchronises.
        self.accelerator.sync_gradients, self._passed = last, False
        wrappers = [wrapper for wrapper in map(_wrapper, models) if wrapper] if last else []
        try:
            with ExitStack() as stack:
                if not last:
                    for model in models:
                        stack.enter_context(self.accelerator.no_sync(model))
                for wrapper in wrappers:
                    wrapper.require_backward_grad_sync = True
                yield
                if last and self._unchecked.intersection(models):
                    self._unchecked.difference_update(models)
                    _check_used(models)
        finally:
            self.accelerator.sync_gradients = True
            for wrapper in wrappers:
                wrapper.require_backward_grad_sync = False

    @contextmanager
    def frozen(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Let gradients flow through models whose own weights get none, and which synchronise none."""
        held = [p for model in models for p in model.parameters() if p.requires_grad]
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(self.accelerator.no_sync(model))
            for parameter in held:
                parameter.requires_grad_(False)
            try:
                yield
            finally:
                for parameter in held:
                    parameter.requires_grad_(True)

    def begin(self, step: Step, closely: bool) -> None:
        """Begin a step.

        Args:
            closely: the step is measured, so the run can say what is wrong with its gradients.
        """
        self._step = step

    def backward(self, loss: Tensor, micro: Turn) -> None:
        """Add the gradient of a micro-batch's mean loss, by its share of the global batch's weight (law 3).

        Raises:
            UserError: no sample of the step has weight; or it is the second backward pass of a turn, which DDP would
                leave out of the synchronisation.
        """
        if not self._step.weight:
            raise UserError(f"all samples of step {self._step.index + 1} have weight 0: leave such samples out")
        if self._passed:
            raise UserError(
                "a second run.backward in one turn of batch.micros, and gradients synchronise in the first: hand over "
                'all parts of the loss at once, as in run.backward({"loss/a": a, "loss/b": b}, micro), or take a loop '
                "over batch.micros for each"
            )
        self._passed = True
        self._pass_back(loss, micro.weight / self._step.weight)

    def _pass_back(self, loss: Tensor, share: float) -> None:
        # DDP and FSDP take the mean over data ranks; the global batch needs the sum.
        factor = share * self.accelerator.data_ranks
        self.accelerator.backward(loss if factor == 1 else loss * factor)

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the optimizer's gradients."""
        if self.accelerator.distributed_type != DistributedType.DEEPSPEED:  # whose engine does so by itself
            # accelerate's own zero_grad reads a signature in each step, which takes longer than clearing.
            cast(AcceleratedOptimizer, optimizer).optimizer.zero_grad(set_to_none=True)
        for module in self._sharded:
            # A forward pass without a backward pass leaves whole weights, which the update has made old ones.
            module.reshard()

    def arithmetic(self) -> dict[str, Any]:
        """Say which arithmetic was chosen for the run; nothing where it was left to torch."""
        return {}

    def explained(self, error: BaseException | None) -> UserError | None:
        """Return what the user can do about an error, where this kind of gradients is what caused it."""
        return None

    def troubles(self) -> list[str]:
        """Say what the user should know of the gradients so far; asked for in steps that are measured."""
        return []

    def finite(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether the optimizer's gradients are finite; the same answer on every rank.

        Always True on GPUs, where it would wait for the device, and where gradients are sharded, which would take a
        collective: there the steps that are logged find out.
        """
        whole = self.accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
        if self.accelerator.device.type != "cpu" or not whole:
            return True
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # A sum is finite only where all its terms are.
        return not gradients or bool(torch.stack([g.sum().double() for g in gradients]).sum().isfinite())

    def clip(self, optimizer: torch.optim.Optimizer, largest: float) -> Tensor:
        """Scale the optimizer's gradients down to norm `largest` (0: leave them) and return their norm before that."""
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:  # it has clipped, in the backward pass
            norm = float(self.accelerator.clip_grad_norm_(None, largest) or 0.0)
            return torch.tensor(norm, device=self.accelerator.device)
        self.accelerator.unscale_gradients(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return accelerate_patches.clip_norm(self.accelerator, parameters, largest or float("inf"))


def _wrapper(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DDP that a model is in, if it is; torch.compile is outermost."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, nn.parallel.DistributedDataParallel) else None


def _check_used(models: Sequence[nn.Module]) -> None:
    """Refuse what DDP would answer, a step later, with a message about flags that nobody here can set."""
    for model in models:
        wrapper = _wrapper(model)
        if wrapper and not wrapper.find_unused_parameters:
            unused = [n for n, p in wrapper.module.named_parameters() if p.requires_grad and p.grad is None]
            if unused:
                names = f"{', '.join(unused[:3])}{' and more' if len(unused) > 3 else ''}"
                raise UserError(
                    f"{names} had no gradient in the first step, which DDP cannot have: freeze them "
                    "(requires_grad_(False)), or set run.accelerator.ddp_handler.find_unused_parameters = True before "
                    "run.prepare"
                )
