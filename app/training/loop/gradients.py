"""The gradient of a global batch from those of its micro-batches. Weighting and synchronisation happen only here."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn

from app.distributed import accelerate_patches, deepspeed, inner_gradients
from app.distributed.accelerator import Accelerator
from app.distributed.fsdp_calls import CallOrder, is_sharded
from app.distributed.inner_gradients import InnerGradients
from app.errors import UserError
from app.sampling.batch_plan import NO_STEP, Step, Turn
from app.training.optim import odd_parameters


class Gradients:
    """Weight, accumulate, synchronise and clip gradients."""

    def __init__(self, accelerator: Accelerator, seed: int, failed: Callable[[str], None] = lambda why: None):
        """Begin with no model.

        Args:
            failed: notes, on the main process, why the run ends.
        """
        self.accelerator, self.seed = accelerator, seed
        self.calls, self._inner = CallOrder(failed), InnerGradients()
        self._sharded: list[Any] = []  # modules whose parameters FSDP2 gathers
        self._passed = False  # whether the backward pass of this turn has run
        self._step = NO_STEP

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> tuple[nn.Module, Any]:
        """Place a model and its optimizer; DeepSpeed is told the clipping norm `clip` (0: none)."""
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            deepspeed.check_optimizer(optimizer)
            deepspeed.configure(self.accelerator.state.deepspeed_plugin, clip, models=len(self.accelerator.models))
        model, optimizer = self.accelerator.prepare(model, optimizer)
        if self.accelerator.is_fsdp2:
            odd_parameters.check_layers(model)
        self.calls.watch(model)
        self._inner.watch(model)
        self._sharded += [module for module in model.modules() if is_sharded(module)]
        if wrapper := _wrapper(model):
            # If True, a forward pass without a backward pass would make DDP reduce in the next backward pass.
            wrapper.require_backward_grad_sync = False
        return model, optimizer

    @contextmanager
    def turn(self, models: Sequence[nn.Module], last: bool) -> Iterator[None]:
        """Synchronise gradients in the last turn only. The turn's forward and backward pass belong in the block."""
        # accelerate reads sync_gradients under DeepSpeed, where the backward pass that synchronises also updates.
        self.accelerator.sync_gradients, self._passed = last, False
        wrappers = [wrapper for wrapper in map(_wrapper, models) if wrapper] if last else []
        try:
            with ExitStack() as stack:
                if not last:
                    for model in models:
                        stack.enter_context(self.accelerator.no_sync(model))
                for wrapper in wrappers:
                    wrapper.require_backward_grad_sync = True
                with self.calls.turn(models, last), self._inner.micro_batch():
                    yield
                for wrapper in wrappers:
                    self._check_reduced(wrapper)
        finally:
            self.accelerator.sync_gradients = True
            for wrapper in wrappers:
                wrapper.require_backward_grad_sync = False

    @contextmanager
    def frozen(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Let gradients flow through models whose own weights get no gradients and do not synchronise."""
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

    def _check_reduced(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Refuse gradients that DDP has not summed over ranks: torch would a step later, when they have been used.

        Raises:
            UserError: the last micro-batch of this rank did not use some parameters; it names them.
        """
        missed = accelerate_patches.unreduced(wrapper)
        if missed is None:
            return
        names = f"{', '.join(missed[:3])}{' and more' if len(missed) > 3 else ''}" if missed else "some weights"
        raise UserError(
            f"{names} had no gradient in this rank's last micro-batch of step {self._step.index + 1}, so DDP does not "
            "sum gradients over ranks: freeze weights that are never used (requires_grad_(False)); for those that some "
            "micro-batches use, set run.accelerator.ddp_handler.find_unused_parameters = True before run.prepare"
        )

    def begin(self, step: Step, closely: bool) -> None:
        """Begin a step.

        Args:
            closely: whether this step's losses and norms are read, so that `troubles` may be asked for.
        """
        self._step = step
        self.calls.begin(step.index)

    def backward(self, loss: Tensor, micro: Turn) -> None:
        """Add the gradient of a micro-batch's mean loss, times its share of the global batch's weight (law 3).

        The share is 0 in a step of which no sample could be read; such a step is left out.

        Raises:
            UserError: all samples of the step have weight 0; or this is the second backward pass of a turn, which DDP
                would not synchronise.
        """
        if not self._step.weight and not self._step.missing:
            raise UserError(f"all samples of step {self._step.index + 1} have weight 0: leave such samples out")
        if self._passed:
            raise UserError(
                "a second run.backward in one turn of batch.micros, but gradients synchronise in the first: pass all "
                'parts of the loss at once, as in run.backward({"loss/a": a, "loss/b": b}, micro), or use one loop '
                "over batch.micros for each"
            )
        self._passed = True
        self._pass_back(loss, micro.weight / self._step.weight if self._step.weight else 0.0)

    def _pass_back(self, loss: Tensor, share: float) -> None:
        # DDP and FSDP take the mean over data ranks; the global batch needs the sum.
        factor = share * self.accelerator.data_ranks
        self.accelerator.backward(loss if factor == 1 else loss * factor)

    def clear(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the optimizer's gradients, and free whole weights that FSDP2 still holds."""
        if self.accelerator.distributed_type != DistributedType.DEEPSPEED:  # its engine clears them itself
            # accelerate's zero_grad inspects a signature each time, which takes longer than the clearing.
            cast(AcceleratedOptimizer, optimizer).optimizer.zero_grad(set_to_none=True)
        for module in self._sharded:
            # A forward pass without a backward pass leaves whole weights gathered; the update has made them stale.
            module.reshard()

    def arithmetic(self) -> dict[str, Any]:
        """Return the arithmetic settings chosen for the run; empty if torch's defaults are used."""
        return {}

    def explained(self, error: BaseException | None) -> UserError | None:
        """Return advice for an error that gradients have caused; None for other errors."""
        return (
            self.calls.explained(error)
            or inner_gradients.explained(error)
            or odd_parameters.explained(error)
            or _used_often(error)
        )

    def troubles(self) -> list[str]:
        """Return warnings about the gradients so far; called in steps begun with `closely`, on every rank."""
        return []

    def finite(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether the optimizer's gradients are finite; the same answer on every rank.

        Always True on GPUs, where the answer would make the host wait, and for sharded gradients, where it would need
        a collective. There, the next step whose losses are read finds out.
        """
        whole = self.accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
        if self.accelerator.device.type != "cpu" or not whole or self.accelerator.ranks_per_data_rank > 1:
            return True
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # A sum is finite only if all its terms are.
        return not gradients or bool(torch.stack([g.sum().double() for g in gradients]).sum().isfinite())

    def clip(self, optimizer: torch.optim.Optimizer, largest: float) -> Tensor:
        """Scale gradients down to norm `largest` (0: never) and return the norm before. Every rank takes part."""
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:  # clipped in the backward pass
            norm = float(self.accelerator.clip_grad_norm_(None, largest) or 0.0)
            return torch.tensor(norm, device=self.accelerator.device)
        self.accelerator.unscale_gradients(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return accelerate_patches.clip_norm(self.accelerator, parameters, largest or float("inf"))


def _used_often(error: BaseException | None) -> UserError | None:
    """Return advice for a layer that DDP sees twice in one backward pass; None for other errors."""
    if isinstance(error, RuntimeError) and "to mark a variable ready only once" in str(error):
        return UserError(
            "a weight gets its gradient in several parts, of which DDP has summed the first: give "
            "torch.utils.checkpoint use_reentrant=False (gradient_checkpointing_kwargs in transformers), or train with "
            "--run.exact"
        )
    return None


def _wrapper(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DDP wrapper of a model, if it has one; torch.compile's wrapper is outside it."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, nn.parallel.DistributedDataParallel) else None
