"""Do everything around the body of a recipe's visible loop, step by step."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor

from app.checkpoints.manager import Measured
from app.checkpoints.resume import Counts, Start
from app.config import RunConfig
from app.distributed.desync import DesyncCheck
from app.errors import UserError
from app.rundir.metrics_file import SKIPPED
from app.sampling.batch_plan import BatchPlan, Step, Turn
from app.sampling.seeding import seed_all
from app.sampling.triggers import Triggers
from app.training.loop.audit import Audit
from app.training.loop.before_step import BeforeStep
from app.training.loop.diagnostics import Diagnostics
from app.training.loop.loss_means import LossMeans
from app.training.loop.nonfinite import FirstNonfinite
from app.training.loop.patience import Patience
from app.training.loop.recompiles import Recompiles
from app.training.loop.services import Services
from app.training.loop.step import Batch, CurrentStep
from app.training.loop.step_metrics import StepMetrics, suffix
from app.training.optim import groups as parameter_groups
from app.training.optim.building import Entry, Optimizers


@dataclass(frozen=True)
class Course:
    """What a run's steps go by, whole once the run has begun.

    Args:
        faults: checks losses and norms of steps that are not logged.
        drift: compares ranks; None on one process.
        audit: records each step; None without --run.audit.
        diagnostics: looks at weights and gradients every --run.inspect-every steps.
    """

    plan: BatchPlan
    triggers: Triggers
    means: LossMeans
    faults: FirstNonfinite
    drift: DesyncCheck | None
    audit: Audit | None
    diagnostics: Diagnostics


class StepLoop:
    """Enter each step, update the weights, and log and save what is due after it."""

    def __init__(self, settings: RunConfig, services: Services, trains: bool = True):
        """Prepare the loop; call `begin` before the first step.

        Args:
            trains: whether steps are made at all; if not, the recipe goes on after its loop without any.
        """
        self.settings, self.services, self._trains = settings, services, trains
        self.optimizers, self.recompiles = Optimizers(), Recompiles()
        self.scores: dict[str, float] = {}
        """The last logged value of each score."""
        self.start = Start()
        self.current: CurrentStep | None = None
        """The step whose body was entered last."""
        self.leaving = False
        """Whether the run stops after this step."""
        self.stopped_in_evaluation = False
        """Whether the run was stopped in the middle of an evaluation."""
        self.patience = Patience(settings, {})
        self._made_here = 0  # steps of this launch, before the current one, that have updated weights
        self._told_observed: set[str] = set()
        self._logged_outside: dict[str, float] = {}  # in this launch, while no step was entered
        self._course: Course | None = None  # from `begin` on

    @property
    def steps_done(self) -> int:
        """Return the number of steps made; while a body runs, its step counts too."""
        if self.current is None:
            return self.start.step
        return self.current.number if self.current.open else self.current.done

    @property
    def steps_counted(self) -> int:
        """Return the number of steps that have updated weights: those that were left out do not count."""
        here = self.current is not None and self.current.open and self.current.took_effect
        return self.start.made + self._made_here + here

    @property
    def plan(self) -> BatchPlan:
        """Return the plan of the run that has begun."""
        return self._course.plan

    @property
    def begun(self) -> bool:
        """Tell whether this launch takes part in the run; from `begin` on."""
        return self._course is not None

    @property
    def finished(self) -> bool:
        """Tell whether all steps of the run are made, or it has stopped early."""
        return self._course is not None and (self.steps_done == self.plan.steps or self.patience.over)

    def begin(
        self,
        plan: BatchPlan,
        start: Start,
        faults: FirstNonfinite,
        drift: DesyncCheck | None,
        audit: Audit | None,
        diagnostics: Diagnostics,
    ) -> range:
        """Set where this launch begins, and return the indices of its steps, counted from 0; see Course."""
        means = LossMeans(self.services.accelerator, self.settings.log_every, start.step, start.losses)
        self._course = Course(plan, Triggers(self.settings, plan), means, faults, drift, audit, diagnostics)
        self.start = start
        if start.step:
            self.scores = dict(start.scores)
        self.patience = Patience(self.settings, start.patience)
        end = min(plan.steps, self.settings.stop_at or plan.steps)
        if self.patience.over and not start.unevaluated:
            end = start.step
        return range(start.step - int(start.unevaluated), end)

    def go_through(self, steps: Iterator[Step]) -> Iterator[Batch]:
        """Yield each step's batch for its body, and do what is due after the body; end early if the run must stop."""
        if self.settings.eval_first and not self.start.step:
            yield self._enter_before_first()
            self.finish_step()
            if self.stopped_in_evaluation:
                return
        for step in steps:
            yield self._enter(step)
            if not self.current.updated:
                missing = f"step {self.steps_done} ended without run.step(optimizer)"
                raise UserError(f"{missing}: call it after the loop over batch.micros")
            self.finish_step()
            if self.leaving:
                break

    def only_evaluation(self) -> Iterator[Batch]:
        """Enter step 0 to evaluate, without a run folder: what the body logs is kept in `scores` alone."""
        yield self._enter_before_first()
        self.services.logger.drop_pending()
        self.current = None

    def _enter_before_first(self) -> Batch:
        """Enter step 0, which has no micro-batches and no update: only the evaluation in its body does something."""
        nothing = Step(-1, [], 0, 0.0)
        metrics = StepMetrics(self.services.accelerator, nothing, None)
        self.current = CurrentStep(0, metrics, Batch(self.services.gradients, nothing), again=True)
        return self.current.batch

    def _enter(self, step: Step) -> Batch:
        """Begin a step, just before its body runs."""
        number, accelerator = step.index + 1, self.services.accelerator
        statistics = self.services.buffers.statistics
        skips, again = self.settings.nonfinite == "skip", number <= self.start.step
        before = BeforeStep(accelerator, statistics) if skips or again else None
        metrics = StepMetrics(accelerator, step, self._course.faults, skips)
        self.current = CurrentStep(number, metrics, Batch(self.services.gradients, step, statistics), before, again)
        self.services.watchdog.beat(number)
        self.optimizers.set_rates(step.index, self.plan.steps, self.plan.sizes.at(step.index))
        self.services.gradients.begin(step, self._course.triggers.reads_losses(number))
        # Loading this rank's rows may have drawn random numbers; seeded again, all ranks draw the same in the body.
        seed_all(self.plan.seed, step.index)
        self.recompiles.begin()
        return self.current.batch

    @contextmanager
    def trying(self, step: CurrentStep) -> Iterator[None]:
        """Run a body in a dry run: nothing is due, and its changes to this loop are undone."""
        before = self.scores, self.current
        self.scores, self.current = dict(self.scores), step
        step.batch.gradients.begin(step.metrics.step, closely=False)
        try:
            yield
        finally:
            self.services.logger.drop_pending()
            self.scores, self.current = before

    def due(self, every: int) -> bool:
        """Tell whether something that happens every `every` steps is due now; in a dry run, never."""
        self.check_begun("run.due")
        if self.current is not None and self.current.number == 0:
            return every == self.settings.eval_every
        return self._course is not None and self._course.triggers.at(self.steps_done, every)

    def backward(self, parts: dict[str, Tensor], loss: Tensor, micro: Turn) -> None:
        """Add a micro-batch's gradient.

        Args:
            parts: of the loss, by name for the log; scalars.
            loss: the sum of the parts, a scalar.
        """
        step = self._inside("run.backward")
        for name, value in parts.items():
            step.metrics.add(name, value, micro)
        step.batch.gradients.backward(loss, micro)

    def observe(self, values: dict[str, Tensor], micro: Turn) -> None:
        """Keep means over a micro-batch, by name for the log; scalars."""
        step = self._inside("run.observe")
        for name, value in values.items():
            step.metrics.add(name, value, micro, trained=False)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients, update the weights, and clear the gradients."""
        entry, step = self.optimizers.find(optimizer), self._inside("run.step")
        step.batch.check_complete()
        step.updated = True
        if slow := self.recompiles.end(step.number):
            self.services.logger.progress.warn(slow)
        parameter_groups.drop_frozen(optimizer, step.number - 1, self.plan.steps if self._course else 0)
        watched = self._course and not step.again
        with self._course.diagnostics.watching(step.number, optimizer) if watched else nullcontext():
            if step.again:
                step.put_back()
            elif step.skipped or not (self._usable(step, optimizer, entry) and self._made(step, optimizer)):
                self._leave_out(step)
        step.batch.gradients.clear(optimizer)

    def _made(self, step: CurrentStep, optimizer: torch.optim.Optimizer) -> bool:
        """Update the weights and their average; return False if the step is to be left out after all."""
        averages, others = self.services.averages, len({*step.made, optimizer}) < len(self.optimizers.known)
        if step.before and others:  # another optimizer's gradient may not be finite
            step.before.keep(optimizer, averages.remember(optimizer))
        optimizer.step()
        if self.services.accelerator.scaler is not None and cast(AcceleratedOptimizer, optimizer).step_was_skipped:
            return self.settings.nonfinite != "skip"  # else the scaler leaves out this update alone, as always
        step.made.append(optimizer)
        averages.update(self.steps_counted, optimizer)
        return True

    def _leave_out(self, step: CurrentStep) -> None:
        """Leave out a step as a whole: what it has changed so far is put back.

        Raises:
            UserError: it has made an update of which no copy was kept.
        """
        if missing := [each for each in step.made if not step.before.keeps(each)]:
            name = type(cast(AcceleratedOptimizer, missing[0]).optimizer).__name__
            raise UserError(
                f"--run.nonfinite skip cannot leave out step {step.number}: {name} had "
                "updated weights in it before, so call run.step once in a step for each optimizer"
            )
        step.skipped = True
        step.put_back()

    def _usable(self, step: CurrentStep, optimizer: torch.optim.Optimizer, entry: Entry) -> bool:
        """Clip the gradient and check its norm; return False if it is not finite and --run.nonfinite is skip.

        Raises:
            UserError: it is not finite, and --run.nonfinite is stop.
        """
        skips, wrong = self.settings.nonfinite == "skip", None
        if entry.clip or self._reads_losses(step) or skips or not step.batch.gradients.finite(optimizer):
            norm = step.batch.gradients.clip(optimizer, entry.clip)
            if not step.metrics.add_norm(norm, entry.place):
                wrong = step.metrics.explain(norm)
        if wrong and not skips:
            raise UserError(wrong.advice())
        if self._course and self._course.audit:
            self._course.audit.gradients(optimizer)
        if wrong:
            self.services.logger.progress.warn(f"warning: {wrong.text}; the step is skipped (--run.nonfinite)")
            self.log({SKIPPED: int(self.scores.get(SKIPPED, 0)) + 1}, of_body=False)
        return not wrong

    def log(self, values: dict[str, float], of_body: bool = True) -> None:
        """Keep plain numbers, which are written after the step's own line; for `of_body`, see RunLogger.keep."""
        self.services.logger.keep(values, of_body)
        self.scores |= values
        self._scores_here().update(values)

    def _scores_here(self) -> dict[str, float]:
        """Return what was logged at the last step, or before the first one."""
        return self._logged_outside if self.current is None else self.current.scores

    def finish_step(self) -> None:
        """Do what is due after a step, once; also if the recipe left the step's body by a `break`."""
        step, logger = self.current, self.services.logger
        if self.stopped_in_evaluation:
            logger.drop_pending()
            if step is not None:
                step.scores = {}
        if step is not None and step.open:
            step.open = False
            self._close(step)
        logger.write_pending(self.steps_done)

    def _close(self, step: CurrentStep) -> None:
        if step.number == 0:
            return
        if step.skipped:
            step.put_back()  # what came after run.step belongs to the step too
        self._made_here += int(step.took_effect)
        if step.updated:
            self.leaving = self.stopped_in_evaluation or self.services.preemption.due(step.number)
            self.patience.note(step.number, step.scores, self._course.triggers.may_be_best(step.number))
            self.leaving |= self.patience.over
        if step.updated and not step.again:
            self._after_update(step)
        elif step.updated and not self.stopped_in_evaluation:
            self.services.logger.write_pending(step.number)
            self.save()  # adds the scores to the checkpoint of this step
        elif step.again and not step.updated:
            step.put_back()  # the checkpoint still says that the step is not evaluated
        elif not step.updated and self.stopped_in_evaluation and step.done:
            self.save()  # the step before

    def _after_update(self, step: CurrentStep) -> None:
        services = self.services
        services.buffers.agree()
        self._course.means.add(step.number, step.losses, step.metrics.step.weight)
        if self._reads_losses(step):
            rates = {f"lr{suffix(i)}": rate for i, rate in enumerate(self.optimizers.rates())}
            drift = self._course.drift if self._course.triggers.checks(step.number) else None
            losses, about = step.metrics.collect(services.buffers, self._course.means, services.gradients.calls, drift)
            services.logger.step(step.number, losses, {**about, **rates})
            self._tell_observed({n: value for n, value in losses.items() if n not in step.metrics.trained}, step.number)
            for trouble in services.gradients.troubles():
                services.logger.progress.warn(trouble)
        else:
            step.metrics.note()
        services.logger.write_pending(step.number)
        services.logger.track(step.number, self._course.diagnostics.write(step.number))
        if self._course.audit:
            services.buffers.statistics.fold()
            self._course.audit.step(step.number, step.metrics)
        services.logger.progress.advance()
        services.checkpoint_manager.look()
        measured = self._measured(step.scores, self._course.means, self.stopped_in_evaluation)
        services.checkpoint_manager.save_when_due(step.number, self._course.triggers, measured, self.leaving)

    def _tell_observed(self, values: dict[str, float], number: int) -> None:
        """Warn, once for each name, of numbers that nothing is trained on and that are not finite."""
        for name, value in values.items():
            if not math.isfinite(value) and name not in self._told_observed:
                self._told_observed.add(name)
                self.services.logger.progress.warn(
                    f"warning: {name} is {value} in step {number}; nothing is trained on it, so the run goes on; "
                    "metrics.jsonl has null for such numbers"
                )

    def save(self) -> None:
        """Commit a checkpoint of the last step; in a dry run, do nothing."""
        self.check_begun("run.save")
        if self.services.averages.applied:
            raise UserError(
                "run.save inside an evaluation, where the model has an average of its weights: call it after"
            )
        step = self.current
        if step is not None and step.open and not step.updated:
            raise UserError(f"run.save in step {step.number} before run.step(optimizer): call it after the update")
        if self._course is None:
            return
        means = self._course.means
        if step is not None and step.open and not step.again:
            means = means.after(step.number, step.losses, step.metrics.step.weight)
        measured = self._measured(self._scores_here(), means)
        self.services.checkpoint_manager.save(self.steps_done, self.plan, measured)

    def _measured(self, scores: dict[str, float], means: LossMeans, unevaluated: bool = False) -> Measured:
        counts = Counts(self.steps_counted, tuple(self.services.averages.counts))  # as they are now
        return Measured(self.scores, scores, means.record, self.patience.record, unevaluated, counts)

    def may_stop_in_evaluation(self) -> bool:
        """Tell whether the run may stop during an evaluation now; if not, the step is finished first.

        DeepSpeed's steps cannot be repeated. Between a step's first forward pass and its update, buffers belong to
        neither step.
        """
        repeats = self.services.accelerator.distributed_type != DistributedType.DEEPSPEED
        return repeats and (self.current is None or not self.current.halfway)

    def _reads_losses(self, step: CurrentStep) -> bool:
        """Tell whether the host reads a step's losses and gradient norms."""
        return self._course is not None and self._course.triggers.reads_losses(step.number)

    def check_begun(self, call: str) -> None:
        """Refuse a call that needs the loop over run.batches, before it.

        Raises:
            UserError: run.batches was not called yet.
        """
        if self._course is None and self.current is None and self._trains:
            raise UserError(f"{call} before run.batches: call it in the body of the loop over run.batches, or after it")

    def _inside(self, call: str) -> CurrentStep:
        """Return the step whose body is running.

        Raises:
            UserError: no body is running.
        """
        if self.current is None or not self.current.open:
            raise UserError(f"{call} outside a step: call it in the body of the loop over run.batches")
        return self.current
