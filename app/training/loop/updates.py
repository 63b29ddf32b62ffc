"""One optimizer's update in a step: clipped, checked, and made or left out."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
from accelerate.optimizer import AcceleratedOptimizer

from app.errors import UserError
from app.rundir.metrics_file import SKIPPED
from app.training.loop.audit import Audit
from app.training.loop.nonfinite import FirstNonfinite
from app.training.loop.opened import Opened
from app.training.loop.step import CurrentStep
from app.training.optim import groups as parameter_groups
from app.training.optim.building import Entry


@dataclass(frozen=True)
class Around:
    """What a run knows and looks at around an update; without any of it, where a command tries a body.

    Args:
        steps: of the whole run.
        counted: steps before this one that have updated weights.
        closely: whether the host reads this step's losses and gradient norms.
        watching: a block around the update that looks at weights and gradients.
        faults: knows what was not finite in earlier steps.
        audit: records the gradients.
    """

    steps: int = 0
    counted: int = 0
    closely: bool = False
    watching: AbstractContextManager = field(default_factory=nullcontext)
    faults: FirstNonfinite | None = None
    audit: Audit | None = None


class Updates:
    """Make the updates of a run's steps."""

    def __init__(self, opened: Opened):
        self._opened = opened
        self._settings, self._services = opened.settings, opened.services
        self._skips = opened.settings.nonfinite == "skip"

    def make(self, step: CurrentStep, optimizer: torch.optim.Optimizer, entry: Entry, around: Around) -> None:
        """Clip the gradients, update the weights, and clear the gradients.

        Raises:
            UserError: a loop over batch.micros is not over, or a gradient is not finite.
        """
        step.batch.check_complete()
        step.updated = True
        if slow := self._opened.recompiles.end(step.number):
            self._services.logger.progress.warn(slow)
        parameter_groups.drop_frozen(optimizer, step.number - 1, around.steps)
        with around.watching:
            if step.again:
                step.put_back()
            elif step.skipped or not (
                self._has_samples(step)
                and self._usable(step, optimizer, entry, around)
                and self._made(step, optimizer, around)
            ):
                _leave_out(step)
        step.batch.gradients.clear(optimizer)

    def _has_samples(self, step: CurrentStep) -> bool:
        """Tell whether a step has any samples; say it if it has none."""
        if step.metrics.step.weight:
            return True
        self._tell_left_out(f"warning: none of the samples of step {step.number} can be read", "--data.bad skip")
        return False

    def _tell_left_out(self, why: str, flag: str) -> None:
        self._services.logger.progress.warn(f"{why}; the step is skipped ({flag})")
        self._opened.log({SKIPPED: int(self._opened.scores.get(SKIPPED, 0)) + 1}, of_body=False)

    def _made(self, step: CurrentStep, optimizer: torch.optim.Optimizer, around: Around) -> bool:
        """Update the weights and their average; return False if the step is to be left out after all."""
        averages = self._services.averages
        others = len({*step.made, optimizer}) < len(self._opened.optimizers.known)
        if step.before and others:  # another optimizer's gradient may not be finite
            step.before.keep(optimizer, averages.remember(optimizer))
        optimizer.step()
        if self._services.accelerator.scaler is not None and cast(AcceleratedOptimizer, optimizer).step_was_skipped:
            return not self._skips  # else the scaler leaves out this update alone, as always
        step.made.append(optimizer)
        averages.update(around.counted + step.took_effect, optimizer)
        return True

    def _usable(self, step: CurrentStep, optimizer: torch.optim.Optimizer, entry: Entry, around: Around) -> bool:
        """Clip the gradient and check its norm; return False if it is not finite and --run.nonfinite is skip.

        Raises:
            UserError: it is not finite, and --run.nonfinite is stop.
        """
        wrong = None
        if entry.clip or around.closely or self._skips or not step.batch.gradients.finite(optimizer):
            norm = step.batch.gradients.clip(optimizer, entry.clip)
            if not step.metrics.add_norm(norm, entry.place):
                wrong = step.metrics.explain(norm, around.faults)
        if wrong and not self._skips:
            raise UserError(wrong.advice())
        if around.audit:
            around.audit.gradients(optimizer)
        if wrong:
            self._tell_left_out(f"warning: {wrong.text}", "--run.nonfinite")
        return not wrong


def _leave_out(step: CurrentStep) -> None:
    """Leave out a step as a whole: what it has changed so far is put back.

    Raises:
        UserError: it has made an update of which no copy was kept.
    """
    if missing := [each for each in step.made if step.before is None or not step.before.keeps(each)]:
        name = type(cast(AcceleratedOptimizer, missing[0]).optimizer).__name__
        raise UserError(
            f"--run.nonfinite skip cannot leave out step {step.number}: {name} had "
            "updated weights in it before, so call run.step once in a step for each optimizer"
        )
    step.skipped = True
    step.put_back()
