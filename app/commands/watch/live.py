"""What `python -m app watch` shows of a run: how far it is, its latest numbers, and the shape of its curves."""

import itertools
import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from app.config import RunConfig
from app.errors import UserError
from app.rundir.history import History, age
from app.rundir.progress import duration
from app.sampling.batch_plan import batch_sizes

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 24
_LONGEST = 1e9  # seconds of a time that is shown
STYLES = {"running": "green", "finished": "green", "preempted": "yellow", "failed": "red", "lost": "red"}


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Draw numbers as blocks of eight heights; neighbours are averaged if there are more than `width`."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    cuts = [len(finite) * i // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def seconds_left(run: History) -> float | None:
    """Estimate, by the last speed, the seconds that the remaining steps take; None if no speed is known."""
    speeds = [value for value in run.column("samples_per_second")[1] if value > 0]
    settings, steps = run.section("run"), run.record.steps
    if not speeds or not steps:
        return None
    try:
        sizes = batch_sizes(RunConfig(global_batch=settings["global_batch"], batch_ramp=settings.get("batch_ramp", ())))
        left = max(0, sizes.before(steps) - sizes.before(run.step)) / speeds[-1]
    except (UserError, KeyError, TypeError, ValueError, ArithmeticError):  # of settings that no run has
        return None
    return left if left < _LONGEST else None


def view(run: History) -> RenderableType:
    """Lay out the state of a run: how far it is, its numbers, its error."""
    status, steps = run.status, run.record.steps
    head = Text.assemble((run.place, "bold"), "  ", (status, STYLES.get(status, "")))
    if run.launches:
        head.append(f"  {run.layout}")
    left = seconds_left(run) if status == "running" else None
    about = [f"step {run.step} of {steps}"]
    about += [f"{duration(left)} left"] if left is not None else []
    about += [f"last written {age(run.changed)} ago"]
    numbers = Table(box=None, pad_edge=False)
    for title, right in (("", False), ("last", True), ("smallest", True), ("largest", True), ("so far", False)):
        numbers.add_column(title, justify="right" if right else "left")
    for name in run.columns:
        values = [value for value in run.column(name)[1] if math.isfinite(value)]
        if values:
            shown = (f"{value:.5g}" for value in (values[-1], min(values), max(values)))
            numbers.add_row(Text(name), *shown, sparkline(values))  # as a plain str it could be markup
    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(total=max(1, steps), completed=run.step, width=WIDTH), ", ".join(about))
    parts: list[RenderableType] = [head, bar, numbers]
    if run.record.error:
        parts.append(Text(run.record.error, style="red"))
    if status == "lost":
        parts.append(Text("its process is gone; the same command resumes it from the last checkpoint", style="red"))
    return Group(*parts)
