"""The curves of runs: which panels there are and what each shows; drawn as a PNG picture with matplotlib."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config.score_names import PLAIN, ScoreName
from app.errors import UserError, not_installed
from app.rundir.history import History
from app.rundir.throughput import SPEEDS
from app.storage import drafts

FEW = 3  # scores by class that are drawn as curves; of more, only the last values are shown
MARK = "samestep plot"  # in the files that are drawn
TURN = 5  # length of the dashes of curves that lie on each other, in line widths
_MARKED = 60  # points of a score that are marked
_LABEL = 36  # characters of a mark's text that fit next to its line in the picture


@dataclass(frozen=True)
class Panel:
    """What shares an axis: curves over the steps, or the last values of one score for each of many classes."""

    title: str
    names: tuple[str, ...]
    by_class: bool = False


@dataclass(frozen=True)
class Curve:
    """One number of a run over the steps."""

    name: str
    style: int
    """Which of the line styles it has; a loss and its mean have the same one."""
    behind: bool = False
    """Whether it is drawn faintly: a loss of single steps whose mean is drawn too."""


@dataclass(frozen=True)
class Mark:
    """A step after which a run was resumed: on what, and which settings changed there."""

    step: int
    text: str


def panels(runs: Sequence[History]) -> list[Panel]:
    """Sort logged values into panels: losses, scores, learning rates, gradient norms, speeds, and the others."""
    names = list(dict.fromkeys(name for run in runs for name in run.columns))

    def take(title: str, *starts: str) -> list[Panel]:
        panel_names = tuple(name for name in names if name.split("/")[0] in starts)
        return [Panel(title, panel_names)] if panel_names else []

    first_parts = {"loss", "loss_mean", "eval", "lr", "grad_norm", *SPEEDS}
    scores = [name for name in names if ScoreName.parse(name)]
    others = [Panel(name, (name,)) for name in names if name.split("/")[0] not in first_parts and name not in scores]
    return [
        *take("loss", "loss", "loss_mean"),
        *_scores(scores),
        *take("learning rate", "lr"),
        *take("gradient norm", "grad_norm"),
        *(panel for speed in SPEEDS for panel in take(speed.replace("_", " "), speed)),
        *others,
    ]


def _scores(names: list[str]) -> list[Panel]:
    """Give each score a panel, and those of classes, such as eval/dice_bone next to eval/dice, one together.

    Scores of further evaluation sets, and of the average of the weights, share the panel of their main one.
    """
    parsed = {name: ScoreName.parse(name) for name in names}
    mains = {name: f"{PLAIN}/{score.metric}" for name, score in parsed.items() if score is not None}
    further = {name: main for name, main in mains.items() if name != main and main in names}
    names = [name for name in names if name not in further]
    of_classes = {name: [other for other in names if other.startswith((f"{name}_", f"{name}/"))] for name in names}
    of_classes = {name: of_class for name, of_class in of_classes.items() if len(of_class) > 1}
    taken = {name for of_class in of_classes.values() for name in of_class}
    shown = []
    for name in names:
        same = [other for other, main in further.items() if main == name]
        shown += [] if name in taken and not same else [Panel(name, (name, *same))]
        if of_class := of_classes.get(name):
            shown.append(Panel(f"{name} by class", tuple(of_class), by_class=len(of_class) > FEW))
    return shown


def curves_of(panel: Panel, run: History) -> list[Curve]:
    """List a run's curves in a panel, those behind first."""
    averaged = any(name.split("/")[0] == "loss_mean" for name in run.columns)
    seen: Counter[str] = Counter()
    curves = []
    for name in panel.names:
        start = name.split("/")[0]
        if run.column(name)[0]:
            curves.append(Curve(name, seen[start], behind=averaged and start == "loss"))
        seen[start] += 1
    return sorted(curves, key=lambda curve: not curve.behind)


def marks(run: History) -> list[Mark]:
    """List the steps after which a run was resumed, with the layout and the settings that had changed."""
    changed = {segment.step: segment.changed for segment in run.record.segments}
    text_by_step: dict[int, str] = {}
    before = None
    for launch in run.launches:
        step, layout = launch.step, launch.layout
        if 0 < step < run.step and before is not None:
            settings = [f"{name} {old} to {new}" for name, (old, new) in changed.get(step, {}).items()]
            text_by_step[step] = ", ".join(["resumed" if layout == before else f"resumed on {layout}", *settings])
        before = layout
    return [Mark(step, text) for step, text in text_by_step.items()]


def neighbours(in_order: Sequence[Mark], apart: float) -> list[list[Mark]]:
    """Put marks together that are fewer than `apart` steps after the first of them: their texts would overlap."""
    groups: list[list[Mark]] = []
    for mark in in_order:
        if groups and mark.step - groups[-1][0].step < apart:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return groups


def labels(runs: Sequence[History]) -> list[str]:
    """Name runs by their folders; by their whole paths if two folders have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [run.place for run in runs]


def widths(count: int) -> list[float]:
    """Return the line width of each run, in points. Earlier lines are wider, so that they show under later ones."""
    return [1.4 + 3 * (count - 1 - place) / max(count - 1, 1) for place in range(count)]


def has_markers(curve: Curve, count: int) -> bool:
    """Tell whether a curve's points are marked: those of scores, which are measured now and then, and the only ones."""
    return count == 1 or (count <= _MARKED and ScoreName.parse(curve.name) is not None)


@dataclass(frozen=True)
class Turn:
    """Which part of a dashed line is a curve's own, where several curves lie on each other."""

    number: int = 0
    of: int = 1


def turns_of(runs: Sequence[History], drawn: Sequence[Sequence[Curve]]) -> dict[tuple[int, str], Turn]:
    """Give curves of several runs that lie on each other dashes in turn, so that each colour shows.

    Returns:
        By the place of the run and the name of the curve.
    """
    alike: dict[str, list[tuple[int, str]]] = {}
    for place, (run, curves) in enumerate(zip(runs, drawn, strict=True)):
        for curve in curves:
            if not curve.behind:
                alike.setdefault(repr(run.column(curve.name)), []).append((place, curve.name))
    return {key: Turn(number, len(keys)) for keys in alike.values() for number, key in enumerate(keys)}


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
    for axis, panel in zip(axes, shown, strict=False):
        axis.set_title(panel.title, fontsize=10)
        axis.tick_params(labelsize=8)
        if panel.by_class:
            _draw_classes(axis, panel, runs)
        else:
            _draw_curves(axis, panel, runs, told=axis is axes[0])
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    """Write a figure of matplotlib as PNG, with a mark by which a later one may replace it; texts are no formulas."""
    import matplotlib

    file.parent.mkdir(parents=True, exist_ok=True)
    for text in figure.findobj(matplotlib.text.Text):
        text.set_parse_math(False)  # names may hold dollar signs
    with drafts.drafted(file) as draft:
        figure.savefig(draft, dpi=120, format="png", metadata={"Software": MARK})


def _draw_curves(axis: Any, panel: Panel, runs: Sequence[History], told: bool) -> None:
    """Draw a panel over the steps.

    Args:
        told: write what the marks mean.
    """
    last, thick = max(run.step for run in runs), widths(len(runs))
    drawn = [curves_of(panel, run) for run in runs]
    several = max(len([curve for curve in curves if not curve.behind]) for curves in drawn) > 1
    turns = turns_of(runs, drawn)
    if all(turn.of > 1 for turn in turns.values()) and len(runs) > 1:
        axis.set_title(f"{panel.title} (the same in {'both' if len(runs) == 2 else f'all {len(runs)}'})", fontsize=10)
    for place, (run, label, curves) in enumerate(zip(runs, labels(runs), drawn, strict=True)):
        for curve in curves:
            steps, values = run.column(curve.name)
            look = {"color": f"C{place}", "linestyle": ("-", "--", ":")[curve.style % 3], "linewidth": thick[place]}
            look |= {"marker": "." if has_markers(curve, len(steps)) else "", "alpha": 1 if thick[place] < 2 else 0.5}
            if (turn := turns.get((place, curve.name), Turn())).of > 1:
                dash: Any = (turn.number * TURN, (TURN, TURN * (turn.of - 1)))
                look |= {"linestyle": dash, "linewidth": 1.8, "alpha": 1}
            if curve.behind:
                look |= {"alpha": 0.3, "linewidth": 0.8}
            name = f"{label}: {curve.name}" if several else label
            axis.plot(steps, values, label=f"_{name}" if curve.behind else name, **look)  # _: not in the legend
        for mark in marks(run):
            axis.axvline(mark.step, color=f"C{place}", linewidth=0.8, linestyle=(0, (2, 3)))
        for group in neighbours(marks(run), apart=last * 0.04) if told else []:
            where = {"transform": axis.get_xaxis_transform(), "rotation": 90, "va": "top", "ha": "right"}
            axis.text(group[0].step, 0.98, _in_short(group), fontsize=6, color="0.3", **where)
    if len(runs) > 1 or several:
        for line in axis.legend(fontsize=7).get_lines():
            # A dash of a later turn does not begin within the short line of a legend.
            line.set_linestyle("-" if turns and not several else line.get_linestyle())
    axis.set_xlim(0, last * 1.02)
    axis.set_xlabel("step", fontsize=8)


def _in_short(group: Sequence[Mark]) -> str:
    """Say in one line what a few marks mean; the page has the whole texts."""
    text = group[0].text
    if len(group) > 1:
        more = [mark.text.removeprefix("resumed").lstrip(", ") for mark in group]
        text = "; ".join([f"resumed {len(group)} times", *filter(None, more)])
    return text if len(text) <= _LABEL else f"{text[: _LABEL - 1]}…"


def last_values(panel: Panel, run: History) -> list[float | None]:
    """Return the last value of each name in a panel; None where the run has none."""
    columns = [run.column(name)[1] for name in panel.names]
    return [values[-1] if values else None for values in columns]


def class_names(panel: Panel) -> list[str]:
    """Return the class of each name in a panel by class: `bone` of eval/dice_bone."""
    start = len(panel.title.removesuffix(" by class")) + 1
    return [name[start:] for name in panel.names]


def _draw_classes(axis: Any, panel: Panel, runs: Sequence[History]) -> None:
    """Draw the last value of each class as a dot."""
    places = range(len(panel.names))
    for place, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        dots = [(x, y) for x, y in zip(last_values(panel, run), places, strict=True) if x is not None]
        axis.plot([x for x, _ in dots], [y for _, y in dots], ".", color=f"C{place}", label=label)
    axis.set_yticks(list(places), class_names(panel), fontsize=min(7, 110 / len(panel.names)))
    axis.invert_yaxis()
    axis.grid(axis="y", linewidth=0.3)
    axis.set_xlabel("last value", fontsize=8)
