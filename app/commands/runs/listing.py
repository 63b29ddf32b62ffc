"""The columns of a list of runs, for people and for programs, and the order of the list."""

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

from app.commands import costs
from app.config import flatten
from app.errors import UserError
from app.rundir import history
from app.rundir.history import History
from app.rundir.time_spent import speed


def head(settings: Sequence[str], price: float) -> list[str]:
    """Return the titles of the columns.

    Args:
        settings: those that were asked for.
        price: of one device an hour; 0 for none.
    """
    money = ["device hours", "cost"] if price else []
    return ["run", "status", "steps", "score", "best", *settings, *money, "layout", "changed"]


def row(run: History, settings: Sequence[str], price: float) -> list[Any]:
    """Return what stands in the columns of a run; for `price`, see `head`."""
    hours = run.account.total.device_hours if run.account else None
    money = ["", ""] if hours is None else [f"{hours:.3f}", costs.money(hours, price)]
    best, steps = run.best, f"{run.step}/{run.record.steps}"
    values = [in_words(setting(run, name)) for name in settings]
    score = [run.score_in_words, best.in_words if best else "", *values]
    return [run.place, run.status, steps, *score, *(money if price else []), run.layout, history.age(run.changed)]


def for_programs(run: History, settings: Sequence[str], price: float) -> dict[str, Any]:
    """Return what --json says of a run; for `price`, see `head`."""
    score, best = run.score, run.best
    return {
        "folder": str(run.folder),
        "status": run.status,
        "step": run.step,
        "steps": run.record.steps,
        "score": dict([score] if score else []),
        "best": {best.name: best.value, "step": best.step} if best else {},
        "settings": {name: setting(run, name) for name in settings},
        "layout": run.layout,
        "changed": run.changed,
        "time": costs.for_programs(run.account, speed(run.spent), price, mtbf=0.0),
    }


def setting(run: History, name: str) -> Any:
    """Return a run's setting by its dotted name; None if it has none of that name."""
    return flatten(run.config).get(name)


def in_words(value: Any) -> str:
    """Write a setting's value as it is typed."""
    return " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def settings_named(asked: Sequence[str], runs: Sequence[History]) -> list[str]:
    """Return the dotted names of settings, as config.yaml has them, for names as they are typed.

    Raises:
        UserError: no run has such a setting.
    """
    return [_setting_named(name, runs, f"--columns {name}: no run has a setting of this name") for name in asked]


def _setting_named(asked: str, runs: Sequence[History], problem: str) -> str:
    name = asked.removeprefix("--").replace("-", "_")
    setting_names = {each for run in runs for each in flatten(run.config)}
    if name in setting_names:
        return name
    near = difflib.get_close_matches(name, setting_names, 3) or sorted(k for k in setting_names if name in k.split("."))
    advice = f"did you mean {' or '.join(near)}?" if near else "a run's config.yaml has them all, as in optim.lr"
    raise UserError(f"{problem}; {advice}")


def ordered(runs: Sequence[History], by: str) -> list[History]:
    """Sort runs by a column or a setting; with a minus sign, the other way round. Those without a value come last.

    Raises:
        UserError: there is no such column or setting.
    """
    if not by:
        return list(runs)
    name = by.removeprefix("-")
    if name in _COLUMNS:
        value = _COLUMNS[name]
    else:
        columns = ", ".join(_COLUMNS)
        dotted = _setting_named(name, runs, f"--sort {by}: it is neither a setting of a run nor one of {columns}")

        def value(run: History) -> Any:
            return setting(run, dotted)

    keys = [(run, value(run)) for run in runs]
    there = [(run, key) for run, key in keys if key is not None]
    there.sort(key=lambda pair: _sortable(pair[1]), reverse=by.startswith("-"))
    return [run for run, _ in there] + [run for run, key in keys if key is None]


def _sortable(value: Any) -> tuple:
    """Make values of several types comparable: numbers, then texts, then all others as texts."""
    if isinstance(value, tuple):
        return tuple(map(_sortable, value))
    if isinstance(value, int | float):
        return (0, value)
    return (1, value) if isinstance(value, str) else (2, str(value))


def _best_first(run: History) -> tuple | None:
    """Order by the best score, the best one first; runs with other scores stand apart."""
    best = run.best
    return None if best is None else (best.name, best.value if best.lower else -best.value)


def _score_first(run: History) -> tuple | None:
    best, score = run.best, run.score
    if best is None or score is None or not math.isfinite(score[1]):
        return None
    return (best.name, score[1] if best.lower else -score[1])


_COLUMNS: dict[str, Callable[[History], Any]] = {
    "best": _best_first,
    "score": _score_first,
    "changed": lambda run: -run.changed,
    "run": lambda run: str(run.folder),
    "status": lambda run: run.status,
    "steps": lambda run: run.step,
    "layout": lambda run: run.layout,
}
