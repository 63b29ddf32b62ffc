"""--run.save-every auto: how far apart checkpoints are, from what a checkpoint and a step are measured to take."""

from typing import NamedTuple

from app.config import RunConfig
from app.rundir.progress import duration
from app.rundir.time_spent import HOUR, Clock, best_interval


class Pace(NamedTuple):
    """What the main process has measured in this launch, in seconds; all ranks get it when a step is logged."""

    step: float = 0.0
    """Of a step, with its share of the evaluations; 0: not known yet."""
    save: float = 0.0
    """For which a checkpoint stops training."""
    writing: float = 0.0
    """From the copy of the newest checkpoint to its commit."""

    def interval(self, mtbf: float) -> int:
        """Return the steps between two checkpoints; 0 where that is not known yet.

        They are never closer than a checkpoint takes to be written.

        Args:
            mtbf: mean hours between two failures of the run's hardware.
        """
        if not (self.step and self.save):
            return 0
        return max(1, round(max(best_interval(self.save, mtbf * HOUR), self.writing) / self.step))


class SaveInterval:
    """Decide after which step the next checkpoint is due: the same step on every rank.

    The first one of a launch is due at its first line of metrics.jsonl after a step that is a multiple of
    --run.log-every, and is measured. The others follow what the ranks have learnt since, always before the step in
    question begins.
    """

    def __init__(self, settings: RunConfig, start: int):
        """Begin after step `start`."""
        self.settings = settings
        self.asked = settings.save_every == "auto"
        self._saved = start
        self.next = (start // settings.log_every + 1) * settings.log_every if self.asked else 0
        """The step after which the next checkpoint is due; 0: not known yet, or another setting decides."""
        self.steps = 0
        """Between two checkpoints; 0: not known yet."""

    def measured(self, clock: Clock, start: int, writing: float) -> Pace:
        """Return what this process has measured since step `start`, of which the main process's is taken."""
        spent = clock.spent(1, "", start)
        if not spent.steps or not spent.saves:
            return Pace()
        return Pace((spent.stepping + spent.evaluating) / spent.steps, spent.saving / spent.saves, writing)

    def saved(self, step: int) -> None:
        """Note that a checkpoint of this step was due."""
        self._saved, self.next = step, 0

    def learn(self, step: int, pace: Pace) -> str:
        """Decide after a logged step when to save next, by what all ranks have learnt in it.

        Returns:
            A line for the user at the first decision; else empty.
        """
        first, steps = not self.steps, pace.interval(self.settings.mtbf)
        if not self.asked or not steps:
            return ""
        self.steps, self.next = steps, max(step + 1, self._saved + steps)
        return first * (
            f"--run.save-every auto: a checkpoint stops training for {pace.save:.3g} s, and a step takes "
            f"{pace.step:.3g} s; with a failure every {self.settings.mtbf:g} hours (--run.mtbf), checkpoints are "
            f"{steps} steps ({duration(steps * pace.step)}) apart from here on"
        )
