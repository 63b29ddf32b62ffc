"""Find a learning rate: train a short run whose rate rises from step to step, and draw its losses.

    python -m app lr-range recipes/cls.py
    python -m app lr-range recipes/lm.py --low 1e-5 --high 0.1 --steps 200 --profile fsdp_cpu --data.block 128

The rate grows by the same factor in each step (Smith, *Cyclical Learning Rates*, 2017). Where it is too high the loss
rises again, and the run is ended. Flags that are not named below go to the recipe. It says where the smoothed loss
falls fastest and where it is lowest. The first rate, or a tenth of the second, is a good first guess for the peak of a
run with a warm-up; it is no measurement of what is best.
"""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from app.commands.own_folder import LR_RANGE
from app.errors import UserError

if TYPE_CHECKING:
    from app.launching.profiles import Profile

CHART, DATA, OUTPUT = "lr-range.png", LR_RANGE.mark, "output.txt"
PART = 20  # a loss is smoothed over a twentieth of all steps, in both directions
FEWEST = 10
PATIENCE = 600.0  # seconds without a step after which the run is given up
WORSE = 4.0  # the run has diverged when the smoothed loss is this many times the lowest one


class _Diverged(Exception):
    """Ends the run early."""


@dataclass
class Options:
    """What to train, between which rates, and where to write."""

    recipe: Annotated[Path, tyro.conf.Positional]
    """The recipe's file."""
    low: float = 1e-7
    """Learning rate of the first step."""
    high: float = 1.0
    """Learning rate of the last step."""
    steps: int = 100
    """Number of training steps between --low and --high."""
    profile: str = "cpu"
    """Profile to train under; FILE:3 starts 3 processes, whatever the file says."""
    report: str = ""
    """Folder for the picture and the numbers. Default: runs/lr-range-RECIPE."""


def main(options: Options, flags: list[str]) -> int:
    """Train, draw, and return the exit status.

    Args:
        flags: of the recipe.

    Raises:
        UserError: an option is wrong, or the run fails before there is anything to see.
    """
    from app.commands.output import write_json
    from app.launching import profiles

    _check(options)
    profile = profiles.read(options.profile)
    profile.check()
    folder = LR_RANGE.make_room(Path(options.report or f"runs/lr-range-{options.recipe.stem}"), keep=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        rates, losses = _train(options, flags, profile, folder, Path(scratch) / "run")
    smoothed = smooth(losses)
    steepest_rate = steepest(rates, smoothed)
    write_json(str(folder / DATA), {"lr": rates, "loss": losses, "smoothed": smoothed, "steepest": steepest_rate})
    drawn = _draw(rates, losses, smoothed, steepest_rate, folder / CHART)
    lowest = rates[min(range(len(smoothed)), key=lambda i: smoothed[i])]
    print(f"the loss falls fastest at {steepest_rate:.2g}, and is lowest at {lowest:.2g} ({len(rates)} steps)")
    guesses = [f"{rate:.1g}" for rate in sorted((steepest_rate, lowest / 10))]
    print(f"try --optim.lr {' to '.join(dict.fromkeys(guesses))}")
    print(f"{folder / DATA}{f', {folder / CHART}' if drawn else ' (a picture needs matplotlib)'}")
    return 0


def _check(options: Options) -> None:
    if not options.recipe.is_file():
        raise UserError(f"{options.recipe}: there is no such file; give a recipe such as recipes/cls.py")
    if not 0 < options.low < options.high < math.inf:
        raise UserError(f"--low {options.low:g} --high {options.high:g}: give rates above 0, the lower one first")
    if options.steps < FEWEST:
        raise UserError(f"--steps {options.steps}: fewer than 10 show nothing; 100 are usual")


def _train(
    options: Options, flags: list[str], profile: "Profile", folder: Path, run_folder: Path
) -> tuple[list[float], list[float]]:
    """Train, and return the rate and the loss of each step until the loss has diverged."""
    from app.commands.prove.trial import reason
    from app.launching.launcher import Stalled, launcher_words, run
    from app.rundir.metrics_file import Follower

    points = [f"{s}:{(options.low / options.high) ** (1 - s / (options.steps - 1))!r}" for s in range(options.steps)]
    settings = {"dir": str(run_folder), "steps": str(options.steps), "log-every": "1"}
    settings |= {"eval-every": "1000000000", "save-every": "1000000000", "save-async": "false"}
    words = [word for name, value in settings.items() for word in (f"--run.{name}", value)]
    words += [
        "--run.trackers",
        "--optim.lr",
        repr(options.high),
        "--optim.schedule",
        "points",
        "--optim.points",
        *points,
    ]
    follower = Follower(run_folder / "metrics.jsonl")
    lines: list[dict] = []

    def moved() -> int:
        lines.extend(line for line in follower.new() if "lr" in line)
        if diverged([loss_of(line) for line in lines]):
            raise _Diverged
        return len(lines)

    print(f"training {options.steps} steps, from {options.low:g} to {options.high:g}", flush=True)
    command = launcher_words(profile.file, profile.processes, options.recipe, *flags, *words)
    try:
        run(command, folder / OUTPUT, moved, patience=PATIENCE)
    except _Diverged:
        pass  # what there is tells enough
    except Stalled:
        raise UserError(f"no step in {PATIENCE:g} s; {folder / OUTPUT} has what the run printed") from None
    losses = [loss_of(line) for line in lines]
    last = next((i for i in range(len(losses)) if diverged(losses[: i + 1])), len(losses))
    if last < FEWEST:
        why = f"the loss diverged in step {last + 1}: give a lower --high or --low, or more --steps"
        if last == len(losses):
            why = reason((folder / OUTPUT).read_text(errors="replace")).removeprefix("error: ")
        raise UserError(f"{last} steps, too few to see anything: {why}")
    return [line["lr"] for line in lines[:last]], losses[:last]


def loss_of(line: dict) -> float:
    """Return the loss of a line of metrics.jsonl; NaN if it was not finite."""
    names = [name for name in line if name == "loss" or name.startswith("loss/")]
    values = [line[name] for name in names]
    return math.nan if None in values else sum(values)


def smooth(losses: list[float]) -> list[float]:
    """Return the mean of each loss and its neighbours; an average of those before it alone would lag behind."""
    width = max(1, len(losses) // PART)
    windows = [losses[max(0, i - width) : i + width + 1] for i in range(len(losses))]
    return [sum(window) / len(window) for window in windows]


def diverged(losses: list[float]) -> bool:
    """Tell whether losses have risen far above their lowest value, or are not finite."""
    if any(not math.isfinite(loss) for loss in losses):
        return True
    smoothed = smooth(losses)
    lowest = min(smoothed, default=0.0)
    return bool(smoothed) and smoothed[-1] > lowest + (WORSE - 1) * abs(lowest)


def steepest(rates: list[float], smoothed: list[float]) -> float:
    """Return the rate at which the smoothed loss falls fastest over the logarithm of the rate, before its minimum."""
    width = max(1, len(rates) // PART)
    lowest = min(range(len(smoothed)), key=lambda i: smoothed[i])
    places = range(width, min(max(lowest, width + 1), len(rates) - width))
    falls = {
        i: (smoothed[i - width] - smoothed[i + width]) / math.log(rates[i + width] / rates[i - width]) for i in places
    }
    return rates[max(falls, key=lambda i: falls[i])]


def _draw(rates: list[float], losses: list[float], smoothed: list[float], steepest_rate: float, path: Path) -> bool:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.plot(rates, losses, color="lightgrey", label="loss of a step")
    axis.plot(rates, smoothed, label="smoothed")
    axis.axvline(steepest_rate, color="grey", linestyle=":", label=f"falls fastest: {steepest_rate:.2g}")
    axis.set(xscale="log", xlabel="learning rate", ylabel="loss")
    # A loss that has diverged would leave nothing to see of the others.
    low, high = min(smoothed), max(smoothed[: max(3, len(smoothed) // 4)])
    axis.set_ylim(low - 0.1 * (high - low), high + 0.6 * (high - low))
    axis.legend()
    figure.savefig(path, dpi=120)
    return True
