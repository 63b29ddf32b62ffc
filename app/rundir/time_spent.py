"""Where the time of a run went: what a launch measures of itself, and what that says of all launches together."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from app.storage.records import IF_ANY, JsonRecord

HOUR = 3600.0
_LONGEST = 1e11  # seconds
Part = Literal["starting", "stepping", "evaluating", "saving", "ending"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class Spent(JsonRecord):
    """Where the time of one launch went, in seconds on the main process, as of when it was last written."""

    began: float
    """When the run was opened, in seconds since the epoch."""
    devices: int
    """Processes."""
    layout: str
    """In a few words."""
    first: int
    """The step after which the launch began or resumed the run."""
    last: int
    """The last step that it has made."""
    starting: float
    """From the opening of the run to its first step: data, model, checkpoint."""
    stepping: float
    evaluating: float
    saving: float
    """How long training stood still for checkpoints; what is written while it goes on does not count."""
    ending: float
    """From the last step on: the finished model."""
    saves: int
    """How many checkpoints `saving` was for."""
    end: Literal["recorded", "estimated"] | None = field(default=None, metadata=IF_ANY)
    """Whether the launch has written its own end; None while it goes on, and where it was killed."""

    @property
    def seconds(self) -> float:
        """Return the time of all parts."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def until(self) -> float:
        """Return the end of what is told, in seconds since the epoch."""
        return self.began + self.seconds

    @property
    def steps(self) -> int:
        """Return the number of steps that it has made."""
        return self.last - self.first

    @property
    def is_possible(self) -> bool:
        """Tell whether a launch can have spent such times; anybody may have written the file."""
        times = [self.began, *(getattr(self, part) for part in PARTS)]
        return all(0 <= each < _LONGEST for each in times) and self.first <= self.last and self.devices > 0

    def until_seen(self, changed: float, step: int) -> "Spent":
        """Add what a launch that was killed has done after its last record, as metrics.jsonl shows it: an estimate.

        Args:
            changed: when metrics.jsonl was last written, in seconds since the epoch. The time until then is that of
                steps, or of the start-up where none was made.
            step: of its last line.
        """
        more, last = max(0.0, changed - self.until), max(self.last, step)
        if last > self.first:
            return replace(self, stepping=self.stepping + more, last=last, end="estimated")
        return replace(self, starting=self.starting + more, end="estimated")


class Clock:
    """Measure where the time of a launch goes; always in one part."""

    def __init__(self, now: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time):
        """Begin with the start-up."""
        self._now, self._part = now, PARTS[0]
        self._since, self.began = now(), wall()
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.step: int | None = None
        """The last step made; None before the first one may begin."""
        self.saves = 0
        """How many checkpoints were begun."""

    def turn_to(self, part: Part) -> Part:
        """End the part that goes on, and begin another; return the one that ends."""
        before, now = self._part, self._now()
        self._seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """Count the time of a block as that of a part."""
        before = self.turn_to(part)
        try:
            yield
        finally:
            self.turn_to(before)

    def spent(self, devices: int, layout: str, first: int, over: bool = False) -> Spent:
        """Return what was measured until now.

        Args:
            devices: processes of this launch.
            first: the step after which it begins.
            over: whether the launch ends now.
        """
        seconds: dict[str, Any] = dict(self._seconds)
        seconds[self._part] += self._now() - self._since
        last = first if self.step is None else max(first, self.step)
        end: Literal["recorded"] | None = "recorded" if over else None
        return Spent(self.began, devices, layout, first, last, **seconds, saves=self.saves, end=end)


class Sum(NamedTuple):
    """A time, on the clock and times the devices that were held, in seconds."""

    seconds: float = 0.0
    device_seconds: float = 0.0

    @property
    def device_hours(self) -> float:
        """Return the hours of devices."""
        return self.device_seconds / HOUR


class Account(NamedTuple):
    """Where the time of a run went, from its first launch to the end of its last one."""

    counted: Sum
    """Steps that count."""
    again: Sum
    """Steps that were lost, and that a later launch has made or has to make again."""
    starting: Sum
    evaluating: Sum
    saving: Sum
    ending: Sum
    between: Sum
    """Between launches, where no device is held by this run."""

    @property
    def total(self) -> Sum:
        """Return the time of the whole run."""
        return Sum(sum(part.seconds for part in self), sum(part.device_seconds for part in self))

    @property
    def goodput(self) -> float:
        """Return the share of the time in which steps were made that count; 0 for a run without time."""
        return self.counted.seconds / self.total.seconds if self.total.seconds else 0.0


def account(launches: Sequence[Spent], newest: int | None = None) -> Account:
    """Add up the launches of a run, in order.

    Of a launch's steps, those after which a later launch has resumed are lost: each has its mean share of the launch's
    time for steps.

    Args:
        newest: the step of the newest checkpoint, where the last launch is over and a next one would resume there;
            None where the last launch goes on or has finished the run.
    """
    sums = dict.fromkeys(Account._fields, Sum())

    def add(name: str, seconds: float, devices: int) -> None:
        sums[name] = Sum(sums[name].seconds + seconds, sums[name].device_seconds + seconds * devices)

    kept = math.inf if newest is None else newest
    for each in reversed(launches):
        good = max(0.0, min(each.last, kept) - each.first)
        share = good / each.steps if each.steps else 0.0
        add("counted", each.stepping * share, each.devices)
        add("again", each.stepping * (1 - share), each.devices)
        for name in ("starting", "evaluating", "saving", "ending"):
            add(name, getattr(each, name), each.devices)
        kept = min(kept, each.first)
    for before, after in itertools.pairwise(launches):
        add("between", max(0.0, after.began - before.until), 0)
    return Account(**sums)


class Speed(NamedTuple):
    """What one layout of a run takes, as measured by all its launches."""

    devices: int
    layout: str
    step: float
    """Seconds of a step."""
    evaluating: float
    """Seconds of evaluations, for each step."""
    save: float | None
    """Seconds for which a checkpoint stops training; None if none was made."""
    saves: int
    """How many checkpoints that is the mean of."""
    every: float | None
    """Steps between two checkpoints."""
    start: float
    """Seconds from the opening of the run to its first step."""

    @property
    def work(self) -> float:
        """Return the seconds of a step with its share of the evaluations."""
        return self.step + self.evaluating


def speed(launches: Sequence[Spent]) -> Speed | None:
    """Return what the layout of the newest launch with steps takes; None if no step was made."""
    made = [each for each in launches if each.steps > 0 and each.stepping > 0]
    if not made:
        return None
    newest = made[-1]
    same = [each for each in made if (each.devices, each.layout) == (newest.devices, newest.layout)]
    steps, saves = sum(each.steps for each in same), sum(each.saves for each in same)
    return Speed(
        devices=newest.devices,
        layout=newest.layout,
        step=sum(each.stepping for each in same) / steps,
        evaluating=sum(each.evaluating for each in same) / steps,
        save=sum(each.saving for each in same) / saves if saves else None,
        saves=saves,
        every=steps / saves if saves else None,
        start=sum(each.starting for each in same) / len(same),
    )


def best_interval(save: float, mtbf: float) -> float:
    """Return the seconds of training between two checkpoints at which saving and lost work cost least together.

    The square root of 2 x save x mtbf: Young, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17 (9), 1974. It holds while a save is short against the mean time between failures
    (Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
    Systems 22 (3), 2006, who takes mtbf itself where a save is longer than twice that); here mtbf is the most.

    Args:
        save: seconds for which a checkpoint stops training.
        mtbf: mean seconds between two failures of the hardware of the whole run.
    """
    return min(math.sqrt(2 * save * mtbf), mtbf)


class Overhead(NamedTuple):
    """What saving and failures cost, as shares of the time of training without them: a first-order estimate."""

    saving: float
    lost: float
    """Steps made again: half of an interval for each failure."""
    starting: float
    """Starts after failures."""

    @property
    def total(self) -> float:
        """Return all of it."""
        return sum(self)


def overhead(interval: float, save: float, start: float, mtbf: float) -> Overhead:
    """Estimate what an interval between checkpoints costs; all arguments in seconds, as in `best_interval`."""
    return Overhead(save / interval, interval / 2 / mtbf, start / mtbf)
