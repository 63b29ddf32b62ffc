"""Progress on the screen: a bar on a terminal, a bar and a curve in a notebook, elsewhere a line now and then.

Only the main process prints.
"""

import sys
import time

from tqdm import tqdm

from app.distributed import environment
from app.errors import whole_urls
from app.rundir.cell import CellView

# Speeds that are shown: the name and the format of each.
_SPEEDS = {
    "samples_per_second": ("samples/s", lambda rate: f"{rate:.{0 if rate >= 10 else 1}f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "mfu": ("MFU", "{:.1%}".format),
}


class Progress:
    """Show how far a run is."""

    def __init__(self, speaks: bool, quiet: bool = False, seconds_between_lines: float = 5.0):
        """Decide what is printed.

        Args:
            speaks: this is the main process.
            quiet: print only warnings.
        """
        self.warns, self.speaks, self.seconds = speaks, speaks and not quiet, seconds_between_lines
        self.bar: tqdm | None = None
        self.cell: CellView | None = None
        self.steps = 0
        self.shown = 0.0

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if self.speaks:
            tqdm.write(whole_urls(text), file=sys.stdout)
            sys.stdout.flush()

    def warn(self, text: str) -> None:
        """Print a line to standard error."""
        if self.warns:
            tqdm.write(whole_urls(text), file=sys.stderr)

    def start(self, step: int, steps: int) -> None:
        """Begin at `step` of `steps`."""
        self.steps = steps
        if self.speaks and environment.in_kernel():
            self.cell = CellView(step, steps)
        elif self.speaks and _draws_again():
            self.bar = tqdm(initial=step, total=steps, unit="step", dynamic_ncols=True, leave=True)

    def advance(self) -> None:
        """Count one step."""
        if self.bar is not None:
            self.bar.update()
        if self.cell is not None:
            self.cell.advance()

    def show(
        self, step: int, losses: dict[str, float], lr: float | None, speeds: dict[str, float], seconds_left: float
    ) -> None:
        """Show the numbers of a logged step."""
        if not self.speaks:
            return
        parts = {name: f"{loss:.4g}" for name, loss in losses.items()}
        parts |= {"lr": f"{lr:.2e}"} if lr is not None else {}
        parts |= {short: form(speeds[name]) for name, (short, form) in _SPEEDS.items() if name in speeds}
        if self.bar is not None:
            self.bar.set_postfix(parts, refresh=False)
            return
        numbers = "  ".join([*(f"{name} {text}" for name, text in parts.items()), f"{duration(seconds_left)} left"])
        now = time.monotonic()
        if self.cell is not None:
            self.cell.show(next(iter(losses.values()), float("nan")), numbers)
        elif now - self.shown >= self.seconds or step >= self.steps:
            self.shown = now
            print(f"step {step}/{self.steps}  {numbers}", flush=True)

    def close(self) -> None:
        """Close the bar, and leave it on the screen."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self.cell is not None:
            self.cell.close()
            self.cell = None


def _draws_again() -> bool:
    """Tell whether standard error is a terminal on which a bar can be drawn again and again.

    A notebook gives the command of a `!` cell a terminal too, but keeps every drawing as a line.
    """
    return sys.stderr.isatty() and not environment.below_kernel()


def duration(seconds: float) -> str:
    """Return a time as text: h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
