"""What stands next to the scores: what a name means, and what makes the numbers worth little."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.training.scores.base import Metric

Rename = Callable[[dict[str, str]], dict[str, str]]


class Remarks:
    """Remarks on the last evaluation of each set, by the names of its scores."""

    def __init__(self):
        self.meanings: dict[str, str] = {}
        """What a score is, in words, by its name in the log."""
        self.faults: dict[str, str] = {}
        """What is wrong with an evaluation, by its name in the log and the kind of the metric that saw it."""
        self._rename: Rename = dict

    @contextmanager
    def renamed(self, rename: Rename) -> Iterator[None]:
        """Keep remarks of a block under the names that its scores get."""
        before, self._rename = self._rename, rename
        try:
            yield
        finally:
            self._rename = before

    def add(self, metric: Metric, names: list[str], prefix: str) -> None:
        """Note what a metric says after an evaluation; it replaces what it said after the one before.

        Args:
            names: of its scores, which `prefix` goes before in the log.
        """
        said = {prefix + name: metric.meanings[name] for name in names if name in metric.meanings}
        self.meanings |= self._rename(said)
        self.faults |= self._rename({f"{prefix}{type(metric).__name__}": metric.fault()})

    def lines(self) -> list[str]:
        """Return what is wrong, a line for each evaluation that something is wrong with."""
        return [f"{name.partition('/')[0]}: {fault}" for name, fault in self.faults.items() if fault]
