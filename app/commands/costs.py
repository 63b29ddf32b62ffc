"""What a run has cost and will cost, in words: times, device hours, money, and how often to save."""

import math
from typing import Any

from app.commands.output import table
from app.errors import UserError
from app.rundir.progress import duration
from app.rundir.time_spent import HOUR, Account, Speed, Sum, best_interval, overhead

_NAMES = {
    "counted": "steps that count",
    "again": "steps made again",
    "starting": "start-up",
    "evaluating": "evaluation",
    "saving": "saving",
    "ending": "finished model",
    "between": "between launches",
}


def check(price: float, mtbf: float) -> None:
    """Refuse a price and a mean time between failures that nothing can have.

    Raises:
        UserError: it names the flag.
    """
    if not 0 <= price < math.inf:
        raise UserError(f"--price {price:g}: give what one device costs an hour, for example 2.5")
    if not 0 <= mtbf < math.inf:
        raise UserError(f"--mtbf {mtbf:g}: give the mean hours between two failures of the run's hardware, such as 24")


def money(hours: float, price: float) -> str:
    """Write what device hours cost, in the currency of the price."""
    return f"{hours * price:,.2f}"


def spent_table(spent: Account, price: float) -> str:
    """Lay out where the time of a run went.

    Args:
        price: of one device an hour; 0 for none.
    """
    total = spent.total

    def row(name: str, part: Sum) -> list[str]:
        share = part.seconds / total.seconds if total.seconds else 0.0
        held = [f"{part.device_hours:.3f}", *([money(part.device_hours, price)] if price else [])]
        return [name, duration(part.seconds), f"{share:.1%}", *held]

    rows = [row(_NAMES[name], part) for name, part in spent._asdict().items() if part.seconds]
    head = ["where the time went", "time", "share", "device hours", *(["cost"] if price else [])]
    return table(head, [*rows, row("in all", total)], right=range(1, len(head)))


def saving_lines(pace: Speed, price: float, mtbf: float) -> list[str]:
    """Say how long steps and checkpoints take, and how often to save.

    Args:
        price: of one device an hour; 0 for none.
        mtbf: mean hours between two failures of the run's hardware; 0 where it is not given.
    """
    measured = f"measured on {pace.layout}: {pace.step:.3g} s a step"
    measured += f", and {pace.evaluating:.3g} s of evaluations" if pace.evaluating else ""
    if pace.save is None or pace.every is None:
        return [f"{measured}; no checkpoint was made, so how often to save is not known"]
    lines = [
        f"{measured}; a checkpoint stops training for {pace.save:.3g} s (mean of {pace.saves}), "
        f"every {pace.every:.4g} steps"
    ]
    if mtbf:
        steps = steps_between(pace, mtbf)
        lines.append(
            f"estimated, with a failure every {mtbf:g} hours: --run.save-every {steps} costs least "
            f"({duration(steps * pace.work)} between checkpoints)"
        )
        lines += [
            f"  {name:<18}{_overhead_in_words(pace, every, price, mtbf)}"
            for name, every in ((f"every {steps} steps:", float(steps)), ("as it was:", pace.every))
        ]
    return lines


def ahead(pace: Speed, steps: int) -> Sum:
    """Estimate the time of further steps on the layout that was measured, with evaluations and checkpoints as before.

    Starts and failures are not in it.
    """
    saving = pace.save / pace.every if pace.save and pace.every else 0.0
    seconds = steps * (pace.work + saving)
    return Sum(seconds, seconds * pace.devices)


def sum_in_words(part: Sum, price: float) -> str:
    """Write a time, its device hours, and what they cost; `price` is 0 for none."""
    cost = f", {money(part.device_hours, price)}" if price else ""
    return f"{duration(part.seconds)}, {part.device_hours:.3f} device hours{cost}"


def steps_between(pace: Speed, mtbf: float) -> int:
    """Return the steps between two checkpoints that cost least at a mean time between failures, in hours."""
    return max(1, round(best_interval(pace.save or 0.0, mtbf * HOUR) / pace.work))


def _overhead_in_words(pace: Speed, every: float, price: float, mtbf: float) -> str:
    parts = overhead(every * pace.work, pace.save or 0.0, pace.start, mtbf * HOUR)
    cost = f", {money(parts.total * pace.devices, price)} an hour of training" if price else ""
    told = f"saving {parts.saving:.2%}, steps made again {parts.lost:.2%}, start-up after failures {parts.starting:.2%}"
    return f"{told}: {parts.total:.2%} more than without{cost}"


def for_programs(spent: Account | None, pace: Speed | None, price: float, mtbf: float) -> dict[str, Any]:
    """Return the same for --json; what is not known is null."""
    parts = {} if spent is None else {**spent._asdict(), "total": spent.total}
    hours = None if spent is None else spent.total.device_hours
    known = mtbf and pace is not None and pace.save is not None
    return {
        "seconds": {name: part.seconds for name, part in parts.items()},
        "device_hours": {name: part.device_hours for name, part in parts.items()},
        "goodput": spent and spent.goodput,
        "cost": hours * price if price and hours is not None else None,
        "measured": pace and pace._asdict(),
        "save_every": steps_between(pace, mtbf) if known and pace is not None else None,
    }
