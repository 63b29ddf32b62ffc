"""Do everything around the body of a recipe's visible loop, step by step."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from app.checkpoints.manager import Measured
from app.checkpoints.resume import Counts, Start
from app.distributed import deepspeed
from app.distributed.desync import DesyncCheck
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan, Step
from app.sampling.seeding import seed_all
from app.sampling.triggers import Triggers
from app.training.loop.audit import Audit
from app.training.loop.before_step import BeforeStep
from app.training.loop.diagnostics import Diagnostics
from app.training.loop.loss_means import LossMeans
from app.training.loop.nonfinite import FirstNonfinite
from app.training.loop.opened import Opened
from app.training.loop.patience import Patience
from app.training.loop.save_interval import Pace, SaveInterval
from app.training.loop.step import Batch, CurrentStep, before_first
from app.training.loop.step_metrics import StepMetrics, suffix
from app.training.loop.updates import Around, Updates
from app.training.optim.building import Entry


@dataclass(frozen=True)
class Checks:
    """What looks at a run's steps.

    Args:
        faults: checks losses and norms of steps that are not logged.
        drift: compares ranks; None on one process.
        audit: records each step; None without --run.audit.
        diagnostics: looks at weights and gradients every --run.inspect-every steps.
    """

    faults: FirstNonfinite
    drift: DesyncCheck | None
    audit: Audit | None
    diagnostics: Diagnostics


class StepLoop:
    """Enter each step, update the weights, and log and save what is due after it."""

    def __init__(self, opened: Opened, plan: BatchPlan, start: Start, checks: Checks):
        """Begin this launch's part of the run after `start`; its scores become the run's."""
        self.opened, self.plan, self.start, self.checks = opened, plan, start, checks
        self.settings, self.services = opened.settings, opened.services
        self.save_interval = SaveInterval(self.settings, start.step)
        self.triggers = Triggers(self.settings, plan, self.save_interval.next)
        self.patience = Patience(self.settings, start.patience)
        self.means = LossMeans(self.services.accelerator, self.settings.log_every, start.step, start.losses)
        if start.step:
            opened.scores = dict(start.scores)
        self.leaving = False
        """Whether the run stops after this step."""
        self.stopped_in_evaluation = False
        """Whether the run was stopped in the middle of an evaluation."""
        self._updates = Updates(opened)
        self._made_here = 0  # steps of this launch, before the current one, that have updated weights
        self._missing = start.counts.missing or 0  # samples of the run, before the current step, that were left out
        self._told_observed: set[str] = set()
        self._pace = Pace()  # as all ranks have learnt it in the last logged step

    @property
    def steps(self) -> range:
        """Return the indices of the steps that this launch is to make, counted from 0."""
        end = min(self.plan.steps, self.settings.stop_at or self.plan.steps)
        if self.patience.over and not self.start.unevaluated:
            end = self.start.step
        return range(self.start.step - int(self.start.unevaluated), end)

    @property
    def steps_done(self) -> int:
        """Return the number of steps made; while a body runs, its step counts too."""
        return self.start.step if self.opened.current is None else self.opened.current.reached

    @property
    def steps_counted(self) -> int:
        """Return the number of steps that have updated weights: those that were left out do not count."""
        step = self.opened.current
        return self._counted_before + (step is not None and step.open and step.took_effect)

    @property
    def _counted_before(self) -> int:
        return self.start.made + self._made_here

    @property
    def missing(self) -> int:
        """Return the number of samples of the run that could not be read; each use of one counts."""
        step = self.opened.current
        return self._missing + (_missing_in(step) if step is not None and step.open else 0)

    @property
    def finished(self) -> bool:
        """Tell whether all steps of the run are made, or it has stopped early."""
        return self.steps_done == self.plan.steps or self.patience.over

    def go_through(self, steps: Iterator[Step]) -> Iterator[Batch]:
        """Yield each step's batch for its body, and do what is due after the body; end early if the run must stop."""
        preemption = self.services.preemption
        if self.steps and preemption.due(self.start.step):
            self.leaving = True
            return
        preemption.begin()
        if self.settings.eval_first and not self.start.step:
            self.opened.current = current = before_first(self.services.accelerator, self.services.gradients)
            yield current.batch
            self.finish_step()
            if self.stopped_in_evaluation:
                return
        for step in steps:
            self.opened.current = current = self._enter(step)
            yield current.batch
            if not current.updated:
                missing = f"step {self.steps_done} ended without run.step(optimizer)"
                raise UserError(f"{missing}: call it after the loop over batch.micros")
            self.finish_step()
            if self.leaving:
                break
            preemption.begin()

    def _enter(self, step: Step) -> CurrentStep:
        """Begin a step, just before its body runs."""
        number, accelerator = step.index + 1, self.services.accelerator
        statistics = self.services.buffers.statistics
        skips, again = self.settings.nonfinite == "skip", number <= self.start.step
        if step.missing and not step.weight:
            deepspeed.refuse("--data.bad skip", accelerator.distributed_type)
        before = BeforeStep(accelerator, statistics) if skips or again or not step.weight else None
        metrics = StepMetrics(accelerator, step, skips, self.plan.order)
        current = CurrentStep(number, metrics, Batch(self.services.gradients, step, statistics), before, again)
        self.services.watchdog.beat(number)
        self.opened.optimizers.set_rates(step.index, self.plan.steps, self.plan.sizes.at(step.index))
        self.services.gradients.begin(step, self.triggers.reads_losses(number))
        # Loading this rank's rows may have drawn random numbers; seeded again, all ranks draw the same in the body.
        seed_all(self.plan.seed, step.index)
        self.opened.recompiles.begin()
        return current

    def due(self, every: int) -> bool:
        """Tell whether something that happens every `every` steps is due now."""
        if self.opened.current is not None and self.opened.current.number == 0:
            return every == self.settings.eval_every
        return self.triggers.at(self.steps_done, every)

    def update(self, step: CurrentStep, optimizer: torch.optim.Optimizer, entry: Entry) -> None:
        """Clip the gradients, update the weights, and clear the gradients."""
        looks = nullcontext() if step.again else self.checks.diagnostics.watching(step.number, optimizer)
        around = Around(
            steps=self.plan.steps,
            counted=self._counted_before,
            closely=self.triggers.reads_losses(step.number),
            watching=looks,
            faults=self.checks.faults,
            audit=self.checks.audit,
        )
        self._updates.make(step, optimizer, entry, around)

    def finish_step(self) -> None:
        """Do what is due after a step, once; also if the recipe left the step's body by a `break`."""
        step, logger = self.opened.current, self.services.logger
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
        self._missing += _missing_in(step)
        if step.updated:
            self.leaving = self.stopped_in_evaluation or self.services.preemption.due(step.number)
            self.patience.note(step.number, step.scores, self.triggers.may_be_best(step.number))
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
        services, checks = self.services, self.checks
        services.logger.clock.step = step.number
        services.buffers.agree()
        self.means.add(step.number, step.losses, step.metrics.step.weight)
        if self.triggers.reads_losses(step.number):
            self._log_losses(step)
        else:
            step.metrics.note(checks.faults)
        services.logger.write_pending(step.number)
        services.logger.track(step.number, checks.diagnostics.write(step.number))
        if checks.audit:
            services.buffers.statistics.fold()
            checks.audit.step(step.number, step.metrics)
        services.logger.progress.advance()
        services.checkpoint_manager.look()
        measured = self._measured(step.scores, self.means, self.stopped_in_evaluation)
        services.checkpoint_manager.save_when_due(step.number, self.triggers, measured, self.leaving)
        services.notice.saving = services.checkpoint_manager.seconds
        self._space_saves(step.number)

    def _space_saves(self, number: int) -> None:
        """Decide, after all that this step is due, when a checkpoint is due next: by what all ranks know."""
        if not self.save_interval.asked:
            return
        logged = self.triggers.reads_losses(number)
        if self.triggers.saves(number):
            self.save_interval.saved(number)
        if logged and (line := self.save_interval.learn(number, self._pace)):
            self.services.logger.progress.say(line)
        self.triggers = dataclasses.replace(self.triggers, next_save=self.save_interval.next)

    def _log_losses(self, step: CurrentStep) -> None:
        services = self.services
        rates = {f"lr{suffix(i)}": rate for i, rate in enumerate(self.opened.optimizers.rates())}
        drift = self.checks.drift if self.triggers.checks(step.number) else None
        here, interval = services.checkpoint_manager.seconds, self.save_interval
        told = interval.measured(services.logger.clock, self.start.step, here) if interval.asked else ()
        losses, about, main = step.metrics.collect(
            self.checks.faults, services.buffers, self.means, services.gradients.calls, drift, told
        )
        self._pace = Pace(*main)
        missing = {"missing_samples": self.missing} if self.missing else {}
        services.logger.step(step.number, losses, {**about, **rates, **missing})
        self._tell_observed({n: value for n, value in losses.items() if n not in step.metrics.trained}, step.number)
        for trouble in services.gradients.troubles():
            services.logger.progress.warn(trouble)

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
        """Commit a checkpoint of the last step."""
        self.opened.check_savable()
        step, means = self.opened.current, self.means
        if step is not None and step.open and not step.again:
            means = means.after(step.number, step.losses, step.metrics.step.weight)
        measured = self._measured(self.opened.scores_here, means)
        self.services.checkpoint_manager.save(self.steps_done, self.plan, measured)

    def _measured(self, scores: dict[str, float], means: LossMeans, unevaluated: bool = False) -> Measured:
        averaged = tuple(self.services.averages.counts)  # as they are now
        counts = Counts(self.steps_counted, averaged, self.missing or None)
        return Measured(self.opened.scores, scores, means.record, self.patience.record, unevaluated, counts)


def _missing_in(step: CurrentStep) -> int:
    """Count the samples of a step that could not be read, once its update is made; a step that runs again has none."""
    return step.metrics.step.missing if step.updated and not step.again else 0
