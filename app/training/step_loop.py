"""From step to step: what happens around the body of a recipe's visible loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from app.checkpoints import state_dict
from app.checkpoints.manager import CheckpointManager
from app.config import RunConfig
from app.distributed.accelerator import Accelerator
from app.distributed.buffers import Buffers
from app.distributed.desync import DesyncCheck
from app.distributed.preemption import Preemption
from app.distributed.watchdog import Watchdog
from app.errors import UserError
from app.rundir.logger import RunLogger
from app.sampling.batch_plan import BatchPlan, Step, Turn
from app.sampling.seeding import seed_all
from app.sampling.triggers import Triggers
from app.training.audit import Audit
from app.training.gradients import Gradients
from app.training.nonfinite import FirstFault
from app.training.optimizer import Optimizers
from app.training.recompiles import Compiling
from app.training.step import Batch, CurrentStep
from app.training.step_metrics import StepMetrics, advice, numbered


class Services(NamedTuple):
    """What a run has opened, and each of its steps uses."""

    accelerator: Accelerator
    gradients: Gradients
    logger: RunLogger
    buffers: Buffers
    checkpoint_manager: CheckpointManager
    stopping: Preemption
    watchdog: Watchdog


class Start(NamedTuple):
    """Where a run begins in this launch."""

    step: int = 0
    """The last step that was made before."""
    scores: dict[str, float] = {}
    """The last value of each, by then."""
    unevaluated: bool = False
    """Whether that step was left during its evaluation, which comes first now."""


class StepLoop:
    """Enter each step, update the weights, and log and save what is due after it."""

    def __init__(self, settings: RunConfig, services: Services):
        """Make ready; steps can be entered after `begin`."""
        self.settings, self.services, self.gradients = settings, services, services.gradients
        self.optimizers, self.compiling = Optimizers(), Compiling()
        self.scores: dict[str, float] = {}
        """The last value of each score that was logged."""
        self.plan: BatchPlan | None = None
        self.start = Start()
        self.current: CurrentStep | None = None
        """The last step whose body was entered."""
        self.leaving = False
        """Whether the run stops after this step."""
        self.left = False
        """Whether the run was stopped in the middle of an evaluation."""
        self._triggers: Triggers | None = None
        self._audit: Audit | None = None

    @property
    def steps_done(self) -> int:
        """Count the steps so far; while a body runs, that includes its step."""
        if self.current is None:
            return self.start.step
        return self.current.number if self.current.open else self.current.done

    def begin(
        self, plan: BatchPlan, start: Start, faults: FirstFault, drift: DesyncCheck | None, audit: Audit | None
    ) -> range:
        """Begin where the run goes on, and return the indices of the steps that are left for this launch.

        Args:
            faults: takes note of what is not finite in steps that are not measured.
            drift: compares ranks, where there are several.
            audit: writes down each step.
        """
        self.plan, self.start, self.scores = plan, start, dict(start.scores)
        self._triggers, self._faults, self._drift, self._audit = Triggers(self.settings, plan), faults, drift, audit
        end = min(plan.steps, self.settings.stop_at or plan.steps)
        return range(start.step - int(start.unevaluated), end)

    def go_through(self, steps: Iterator[Step]) -> Iterator[Batch]:
        """Yield the batch of each step for its body, and do what is due after it; ends early where the run leaves."""
        for step in steps:
            yield self._enter(step)
            if not self.current.updated:
                raise UserError(f"step {self.steps_done} went by without run.step(optimizer): call it after the turns")
            self.settle()
            if self.leaving:
                break

    def _enter(self, step: Step) -> Batch:
        """Begin a step, whose body is about to run."""
        number, accelerator = step.index + 1, self.services.accelerator
        undo = state_dict.remember_buffers(accelerator.models) if number <= self.start.step else None
        metrics = StepMetrics(accelerator, step, self._faults, self.settings.nonfinite == "skip")
        self.current = CurrentStep(number, metrics, Batch(self.gradients, step), undo)
        self.services.watchdog.beat(number)
        self.optimizers.set_rates(step.index, self.plan.steps, self.plan.global_batch)
        self.gradients.begin(step, self._triggers.measures(number))
        # Loading has drawn what this rank's rows wanted; what the recipe draws next is the same on all.
        seed_all(self.plan.seed, step.index)
        self.compiling.begin()
        return self.current.batch

    @contextmanager
    def trying(self, step: CurrentStep, gradients: Gradients) -> Iterator[None]:
        """Have a body run in a dry run: nothing is due, and what it changes here is changed back."""
        before = self.gradients, self.scores, self.current
        self.gradients, self.scores, self.current = gradients, dict(self.scores), step
        gradients.begin(step.metrics.step, closely=False)
        try:
            yield
        finally:
            self.services.logger.drop_pending()
            self.gradients, self.scores, self.current = before

    def due(self, every: int) -> bool:
        """Tell whether something that happens every so many steps is due now; in a dry run nothing is."""
        self._check_begun("run.due")
        return self._triggers is not None and self._triggers.at(self.steps_done, every)

    def backward(self, parts: dict[str, Tensor], loss: Tensor, micro: Turn) -> None:
        """Add a micro-batch's gradient.

        Args:
            parts: of the loss, by the names to log them under.
        """
        step = self._inside("run.backward")
        for name, value in parts.items():
            step.metrics.add(name, value, micro)
        self.gradients.backward(loss, micro)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, update, and clear the gradients."""
        (index, clip), step = self.optimizers.find(optimizer), self._inside("run.step")
        step.updated = True
        if slow := self.compiling.end(step.number):
            self.services.logger.progress.warn(slow)
        if step.again:
            step.undo()
        elif self._usable(step, optimizer, index, clip):
            optimizer.step()
        self.gradients.clear(optimizer)

    def _usable(self, step: CurrentStep, optimizer: torch.optim.Optimizer, index: int, clip: float) -> bool:
        """Clip and measure a gradient; False where it is not finite and --run.nonfinite leaves such steps out.

        Raises:
            UserError: it is not finite, and the run stops at such steps.
        """
        skips, wrong = self.settings.nonfinite == "skip", ""
        if clip or self._measures(step) or skips or not self.gradients.finite(optimizer):
            norm = self.gradients.clip(optimizer, clip)
            if not step.metrics.add_norm(norm, index):
                wrong = step.metrics.explain(norm)
        if wrong and not skips:
            raise UserError(advice(wrong))
        if self._audit:
            self._audit.gradients(optimizer)
        if wrong:
            self.services.logger.progress.warn(f"warning: {wrong}; the step is skipped (--run.nonfinite)")
            self.log({"skipped_steps": int(self.scores.get("skipped_steps", 0)) + 1})
        return not wrong

    def log(self, values: dict[str, float]) -> None:
        """Take note of plain numbers, to be written after the step's own line."""
        self.services.logger.pending.append(values)
        self.scores |= values
        if self.current is not None:
            self.current.scores |= values

    def settle(self) -> None:
        """Do what is due after a step, also one whose body the recipe has left by a `break`; once for each step."""
        step, logger = self.current, self.services.logger
        if self.left:
            logger.drop_pending()
            if step is not None:
                step.scores = {}
        if step is not None and step.open:
            step.open = False
            self._close(step)
        logger.write_pending(self.steps_done)

    def _close(self, step: CurrentStep) -> None:
        if step.updated:
            self.leaving = self.left or self.services.stopping.due(step.number)
        if step.updated and not step.again:
            self._after_update(step)
        elif step.updated and not self.left:
            self.services.logger.write_pending(step.number)
            self.save()  # which gives the checkpoint that is there the scores
        elif step.again and not step.updated:
            step.undo()  # its checkpoint still says that the step was not evaluated
        elif not step.updated and self.left and step.done:
            self.save()  # of the step before

    def _after_update(self, step: CurrentStep) -> None:
        services = self.services
        services.buffers.agree()
        if self._measures(step):
            rates = {f"lr{numbered(i)}": rate for i, rate in enumerate(self.optimizers.rates())}
            drift = self._drift if self._triggers.checks(step.number) else None
            losses, about = step.metrics.collect(services.buffers, drift)
            services.logger.step(step.number, losses, {**about, **rates})
            for trouble in self.gradients.troubles():
                services.logger.progress.warn(trouble)
        else:
            step.metrics.note()
        services.logger.write_pending(step.number)
        if self._audit:
            self._audit.step(step.number, step.metrics)
        services.logger.progress.advance()
        services.checkpoint_manager.look()
        how = self.scores, step.scores, self.leaving, self.left
        services.checkpoint_manager.save_when_due(step.number, self._triggers, *how)

    def save(self) -> None:
        """Commit a checkpoint of the last step; in a dry run, none."""
        self._check_begun("run.save")
        step = self.current
        if step is not None and step.open and not step.updated:
            raise UserError(f"run.save in step {step.number} before run.step(optimizer): call it after the update")
        if self.plan is not None:
            self.services.checkpoint_manager.save(self.steps_done, self.plan, self.scores, step.scores if step else {})

    def may_leave_evaluation(self) -> bool:
        """Tell whether the run may stop during an evaluation now; else the step is finished first."""
        return self.current is None or not self.current.halfway

    def _measures(self, step: CurrentStep) -> bool:
        """Tell whether a step's loss and gradient are looked at."""
        return self._triggers is not None and self._triggers.measures(step.number)

    def _check_begun(self, call: str) -> None:
        if self.plan is None and self.current is None:
            raise UserError(f"{call} before run.batches: call it in the body of the loop over run.batches, or after it")

    def _inside(self, call: str) -> CurrentStep:
        """Return the step whose body is running.

        Raises:
            UserError: there is none.
        """
        if self.current is None or not self.current.open:
            raise UserError(f"{call} outside a step: call it in the body of the loop over run.batches")
        return self.current
