"""Which checkpoints are kept: the newest, and the one with the best score."""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from app.checkpoints import record
from app.config import BestMetric


@dataclass(frozen=True)
class Retention:
    """The rule by which checkpoints are kept.

    Args:
        keep: how many of the newest to keep.
        best: the metric whose best checkpoint is kept as well; with a leading minus sign, lower is better.
    """

    keep: int = 2
    best: str = ""

    @property
    def metric(self) -> BestMetric:
        """Return the metric that `best` names."""
        return BestMetric.parse(self.best)

    def value(self, metrics: dict[str, float]) -> float | None:
        """Return the metric that decides, negated where lower is better; None if it is missing or not finite."""
        value = metrics.get(self.metric.name)
        return None if value is None or not math.isfinite(value) else self.metric.rank(value)

    def best_of(self, folders: Iterable[Path]) -> float:
        """Return the best value in checkpoints; those that cannot be read now do not count."""
        best = -math.inf
        for folder in folders:
            with contextlib.suppress(OSError):
                score = self._score(folder)
                best = best if score is None else max(best, score)
        return best

    def wanted(self, folders: dict[int, Path]) -> set[int]:
        """Choose the steps whose checkpoints are kept, of those that have one, in order.

        A checkpoint whose record cannot be read now is kept: it may be the best.
        """
        wanted = set(list(folders)[-self.keep :])
        if not self.best:
            return wanted
        value_by_step, unread = self._values(folders)
        return wanted | unread | ({_best_step(value_by_step)} if value_by_step else set())

    def best_step(self, folders: dict[int, Path], unsaved: dict[int, dict[str, float]]) -> tuple[int, float] | None:
        """Find the checkpoint with the best metric: its step, and the metric as it was measured; None if none has it.

        Args:
            folders: of checkpoints, by step; those that cannot be read now do not count.
            unsaved: metrics of checkpoints that are being written, by step.
        """
        if not self.best:
            return None
        value_by_step = self._values(folders)[0]
        values = {step: self.value(metrics) for step, metrics in unsaved.items()}
        value_by_step |= {step: value for step, value in values.items() if value is not None}
        if not value_by_step:
            return None
        step = _best_step(value_by_step)
        return step, self.metric.rank(value_by_step[step])

    def _values(self, folders: dict[int, Path]) -> tuple[dict[int, float], set[int]]:
        """Return the metric of each step that has it, and the steps that cannot be read now."""
        value_by_step: dict[int, float] = {}
        unread = set()
        for step, folder in folders.items():
            try:
                score = self._score(folder)
            except OSError:
                unread.add(step)
            else:
                value_by_step |= {} if score is None else {step: score}
        return value_by_step, unread

    def _score(self, folder: Path) -> float | None:
        """Read the metric that decides; None where there is none, or the record is damaged.

        Raises:
            OSError: it cannot be read now.
        """
        try:
            return self.value(record.read(folder).metrics)
        except (FileNotFoundError, ValueError):
            return None


def _best_step(value_by_step: dict[int, float]) -> int:
    """Return the step with the highest value, the last one if there are several."""
    return max(value_by_step, key=lambda step: (value_by_step[step], step))
