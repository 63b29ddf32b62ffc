"""Early stopping: how many evaluations ago the best score was measured."""

import math
from typing import Any

from app.config import BestMetric, RunConfig
from app.errors import UserError, did_you_mean


class Patience:
    """Count evaluations since the last one with a better value of a run's metric."""

    def __init__(self, settings: RunConfig, saved: dict[str, Any]):
        """Go on counting.

        Args:
            saved: `record` of the checkpoint from which the run goes on; empty if there is none.
        """
        self.allowed, self._least, self._named = settings.patience, settings.min_change, settings.best
        self._picks_model = settings.model == "best"
        self.metric = BestMetric.parse(settings.best)
        if saved.get("metric") != settings.best:
            saved = {}
        self._best: float | None = saved.get("best")
        self._best_step: int = saved.get("best_step", 0)
        self._after: list[int] = list(saved.get("after", ()))  # steps of the evaluations since then

    def note(self, step: int, scores: dict[str, float], due: bool) -> None:
        """Count the evaluation of a step, if it had one; one that was evaluated before counts once.

        Args:
            due: whether an evaluation was.

        Raises:
            UserError: the evaluation that was due has no score of the metric, which decides when the run ends or which
                model it leaves.
        """
        value = scores.get(self.metric.name)
        if value is None and scores and due and (self.allowed or self._picks_model):
            needs = f"--run.patience {self.allowed}" if self.allowed else "--run.model best"
            raise UserError(
                f"{needs} goes by --run.best {self.metric.name}, and there is no such score"
                f"{did_you_mean(self.metric.name, scores)}; the evaluation of step {step} has {', '.join(scores)}"
            )
        if value is None or step in self._after or (self._best is not None and step == self._best_step):
            return
        if math.isfinite(value) and (self._best is None or self._gain(value, self._best) > self._least):
            self._best, self._best_step, self._after = value, step, []
        else:
            self._after.append(step)

    def _gain(self, value: float, best: float) -> float:
        return self.metric.rank(value) - self.metric.rank(best)

    @property
    def over(self) -> bool:
        """Tell whether the run ends early."""
        return 0 < self.allowed <= len(self._after)

    @property
    def record(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {"metric": self._named, "best": self._best, "best_step": self._best_step, "after": list(self._after)}

    def __str__(self) -> str:
        """Say why the run ends early."""
        count = f"{len(self._after)} evaluation{'s' * (len(self._after) > 1)}"
        if self._best is None:
            return f"{self.metric.name} was not finite in {count} (--run.patience {self.allowed})"
        best = f"{self._best:.4f}, its value after step {self._best_step}"
        return f"{self.metric.name} has not become better than {best}, in {count} (--run.patience {self.allowed})"
