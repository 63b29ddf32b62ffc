"""Time and processor time of a stretch of work, and contestants that take turns in one process."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import psutil

TICK = 0.01
"""Seconds in which the system counts processor time."""


class Cost(NamedTuple):
    """What a stretch of work took."""

    wall: float
    """Seconds."""
    cpu: float
    """Seconds of this process and of its children, running or ended."""
    items: float = 1.0

    def rate(self, clock: str = "wall") -> float:
        """Return the items in a second of a clock."""
        return self.items / max(getattr(self, clock), TICK)


class Timer:
    """Measures a stretch of work: `with Timer() as timer: ...`, then `timer.cost(items)`."""

    def __enter__(self) -> "Timer":
        self._began = time.perf_counter(), processor_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        wall, cpu = self._began
        self._took = time.perf_counter() - wall, processor_seconds() - cpu

    def cost(self, items: float = 1.0) -> Cost:
        """Return what it took."""
        return Cost(*self._took, items)


def processor_seconds() -> float:
    """Return the processor time so far of this process, and of its children, running or ended."""
    process = psutil.Process()
    times = process.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in process.children(recursive=True):
        try:
            of_child = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += of_child.user + of_child.system
    return total


def take_turns(contestants: Mapping[str, Callable[[], Cost]], rounds: int) -> dict[str, list[Cost]]:
    """Let each contestant work once a round, in an order that turns around from round to round."""
    costs: dict[str, list[Cost]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            costs[name].append(contestants[name]())
    return costs


def ratio(ours: list[Cost], theirs: list[Cost], clock: str = "wall") -> str:
    """Write the median and the quartiles of our rates to theirs, round by round."""
    ratios = [o.rate(clock) / t.rate(clock) for o, t in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def rate(costs: list[Cost], clock: str = "wall") -> float:
    """Return the median rate."""
    return statistics.median(cost.rate(clock) for cost in costs)
