"""When a run evaluates, saves, and reads losses: pure functions of the step."""

from dataclasses import dataclass

from app.config import RunConfig
from app.sampling.batch_plan import BatchPlan


@dataclass(frozen=True)
class Triggers:
    """Tell what is due after a step of a run; steps are counted from 1."""

    settings: RunConfig
    plan: BatchPlan
    next_save: int = 0
    """The step after which a checkpoint is due with --run.save-every auto; 0: not known yet."""

    def at(self, step: int, every: int) -> bool:
        """Tell whether something that happens every `every` steps is due; 0: at the end of each epoch.

        The last step of the run is always due.
        """
        if step == self.plan.steps:
            return True
        return step % every == 0 if every else self.plan.epoch_ends(step - 1)

    def saves(self, step: int) -> bool:
        """Tell whether a checkpoint is due."""
        every = self.settings.save_every
        due = step in (self.next_save, self.plan.steps) if isinstance(every, str) else self.at(step, every)
        return due or step == self.settings.stop_at

    def reads_losses(self, step: int) -> bool:
        """Tell whether the host reads losses and gradient norms: to log them, or to check them before a save."""
        logs = step == 1 or step % self.settings.log_every == 0
        return logs or self.saves(step) or self.may_be_best(step) or self.checks(step)

    def checks(self, step: int) -> bool:
        """Tell whether ranks compare their weights: after step 1 too, the first in which they can differ."""
        return step == 1 or self.at(step, self.settings.check_every)

    def may_be_best(self, step: int) -> bool:
        """Tell whether an evaluation is due that may make this step's checkpoint the best one."""
        return bool(self.settings.best) and self.at(step, self.settings.eval_every)


def as_steps(value: float, total_steps: int) -> int:
    """Turn a point of a run into steps: a fraction of the run if below 1, else a number of steps."""
    return round(value * total_steps if value < 1 else value)
