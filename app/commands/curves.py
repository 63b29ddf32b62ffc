"""The curves of runs: which panels there are and what each shows; drawn as a PNG picture with matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.errors import UserError, not_installed
from app.rundir.history import History
from app.rundir.throughput import SPEEDS


@dataclass(frozen=True)
class Panel:
    """Curves that share an axis."""

    title: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Mark:
    """A step after which a run was resumed, and what it was resumed on."""

    step: int
    text: str


def panels(runs: Sequence[History]) -> list[Panel]:
    """Sort logged values into panels: losses, scores, learning rates, gradient norms, speeds, and the others."""
    names = list(dict.fromkeys(name for run in runs for name in run.columns))

    def take(title: str, *starts: str) -> list[Panel]:
        found = tuple(name for name in names if name.split("/")[0] in starts)
        return [Panel(title, found)] if found else []

    known = {"loss", "eval", "lr", "grad_norm", *SPEEDS}
    scores = [Panel(name, (name,)) for name in names if name.startswith("eval/")]
    others = [Panel(name, (name,)) for name in names if name.split("/")[0] not in known]
    return [
        *take("loss", "loss"),
        *scores,
        *take("learning rate", "lr"),
        *take("gradient norm", "grad_norm"),
        *(panel for speed in SPEEDS for panel in take(speed.replace("_", " "), speed)),
        *others,
    ]


def marks(run: History) -> list[Mark]:
    """List the steps after which a run was resumed, with the layout if that had changed."""
    found, before = [], None
    for launch in run.launches:
        step, layout = launch["step"], launch["layout"]
        if 0 < step < run.step and before is not None:
            found.append(Mark(step, "resumed" if layout == before else f"resumed on {layout}"))
        before = layout
    return found


def labels(runs: Sequence[History]) -> list[str]:
    """Name runs by their folders; by their whole paths if two folders have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def widths(count: int) -> list[float]:
    """Return the line width of each run, in points. Earlier lines are wider, so that they show under later ones."""
    return [1.4 + 3 * (count - 1 - place) / max(count - 1, 1) for place in range(count)]


def draw(runs: Sequence[History], file: Path) -> None:
    """Write all panels into a PNG picture.

    Raises:
        UserError: matplotlib is not installed, or nothing has been logged.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"a picture of curves: {not_installed('matplotlib')}") from None
    shown = panels(runs)
    if not shown:
        raise UserError(f"{', '.join(labels(runs))}: nothing has been logged yet, so there is nothing to plot")
    across = min(2, len(shown))
    down = -(-len(shown) // across)
    figure = Figure(figsize=(5.5 * across, 2.6 * down + 0.6), layout="constrained")
    figure.suptitle(", ".join(labels(runs)), fontsize=11)
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    last, thick = max(run.step for run in runs), widths(len(runs))
    for axis, panel in zip(axes, shown, strict=False):
        axis.set_title(panel.title, fontsize=10)
        for place, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
            for nth, name in enumerate(panel.names):
                steps, values = run.column(name)
                told = label if len(panel.names) == 1 else f"{label}: {name}"
                look = {"color": f"C{place}", "linestyle": ("-", "--", ":")[nth % 3], "linewidth": thick[place]}
                look |= {"marker": "." if len(steps) == 1 else "", "alpha": 1 if thick[place] < 2 else 0.5}
                axis.plot(steps, values, label=told, **look)
            for mark in marks(run):
                axis.axvline(mark.step, color=f"C{place}", linewidth=0.8, linestyle=(0, (2, 3)))
                if axis is axes[0]:
                    where = {"transform": axis.get_xaxis_transform(), "rotation": 90, "va": "top", "ha": "right"}
                    axis.text(mark.step, 0.98, mark.text, fontsize=6, color="0.3", **where)
        if len(runs) > 1 or len(panel.names) > 1:
            axis.legend(fontsize=7)
        axis.tick_params(labelsize=8)
        axis.set_xlim(0, last * 1.02)
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    for axis in axes[max(0, len(shown) - across) : len(shown)]:
        axis.set_xlabel("step", fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
