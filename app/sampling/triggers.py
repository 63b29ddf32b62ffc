"""When a run evaluates, saves and measures: pure functions of the step."""

from dataclasses import dataclass

from app.config import RunConfig
from app.sampling.batch_plan import BatchPlan


@dataclass(frozen=True)
class Triggers:
    """What is due after a step of a run; steps are counted from 1."""

    settings: RunConfig
    plan: BatchPlan

    def at(self, step: int, every: int) -> bool:
        """Tell whether something that happens every so many steps is due; 0 means at the end of each epoch.

        The last step of the run is always due.
        """
        if step == self.plan.steps:
            return True
        return step % every == 0 if every else self.plan.epoch_ends(step - 1)

    def saves(self, step: int) -> bool:
        """Tell whether a checkpoint is due."""
        return self.at(step, self.settings.save_every) or step == self.settings.stop_at

    def measures(self, step: int) -> bool:
        """Tell whether loss and gradient are looked at: to show them, or to save nothing that is not finite."""
        logs = step == 1 or step % self.settings.log_every == 0
        return logs or self.saves(step) or self.may_be_best(step) or self.checks(step)

    def checks(self, step: int) -> bool:
        """Tell whether ranks are compared with each other: the first time as soon as a mistake can show."""
        return step == 1 or self.at(step, self.settings.check_every)

    def may_be_best(self, step: int) -> bool:
        """Tell whether an evaluation is due that decides which checkpoint is best."""
        return bool(self.settings.best) and self.at(step, self.settings.eval_every)
