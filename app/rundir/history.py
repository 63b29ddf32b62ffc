"""Runs as their folders show them. Nothing here changes a folder or imports torch."""

import functools
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from app import storage
from app.config import BestMetric
from app.config.score_names import ScoreName, seems_lower
from app.errors import UserError, printable, whole_urls
from app.rundir import contents, lock, metrics_file, run_record
from app.rundir.foreign import fields_of, number, section, text, whole
from app.rundir.run_record import RUN, Launch, RunRecord
from app.rundir.time_spent import Account, Spent, account

_PICTURE = re.compile(r"step-(\d{8,12})(-\d+)?\.png")
NOT_SHOWN = ("step", "ids", "samples", "epoch")


class Best(NamedTuple):
    """The best value of a score among all evaluations, and its step."""

    name: str
    value: float
    step: int
    lower: bool
    """Whether lower is better."""

    @property
    def in_words(self) -> str:
        """Return the value with four digits, and the step."""
        return f"{self.value:.4g} at {self.step}"


@dataclass
class History:
    """One run: whether a process holds it, run.json, its settings, and the lines of metrics.jsonl.

    Its texts are printable, whoever wrote them.
    """

    folder: Path
    held: bool
    record: RunRecord
    config: dict[str, Any]
    lines: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """Return the name of the run's folder, printable."""
        return printable(storage.at(self.folder).identity().name)

    @property
    def place(self) -> str:
        """Return the run's folder, printable."""
        return printable(whole_urls(str(self.folder)))

    def section(self, name: str) -> dict[str, Any]:
        """Return the settings of one section, such as `run`; none where there is no such section."""
        return section(self.config, name)

    @property
    def step(self) -> int:
        """Return the last step known."""
        return max([self.record.step, *(line["step"] for line in self.lines[-2:])])

    @property
    def status(self) -> str:
        """Return run.json's status; `lost` for a run that says it is running and whose process is gone."""
        status = self.record.status
        return "lost" if status == "running" and not self.held else status

    @property
    def changed(self) -> float:
        """Return when the run last wrote something, in seconds since the epoch."""
        files = storage.at(self.folder)
        return max(_changed(files, name) for name in ("metrics.jsonl", RUN))

    @property
    def columns(self) -> list[str]:
        """List the names of the numbers in the lines, in the order in which they first occur, without counts."""
        numbers = (name for line in self.lines for name in line if not isinstance(line[name], str))
        return [name for name in dict.fromkeys(numbers) if name not in NOT_SHOWN and not _is_count(name)]

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a number was written, and the numbers; one that was not finite is NaN."""
        pairs = [(line["step"], line[name]) for line in self.lines if not isinstance(line.get(name, ""), str)]
        return [step for step, _ in pairs], [float("nan") if value is None else value for _, value in pairs]

    @property
    def asked_best(self) -> str:
        """Return the run's --run.best; empty if it has none."""
        return str(self.section("run").get("best") or "")

    @property
    def score(self) -> tuple[str, float] | None:
        """Return the name and last value of --run.best's score, else of the first evaluated score, else of the loss."""
        best = BestMetric.parse(self.asked_best).name
        evaluated = [name for name in self.columns if ScoreName.parse(name)]
        for name in [best, *evaluated, "loss", *self.columns]:
            values = self.column(name)[1]
            if values:
                return name, values[-1]
        return None

    @property
    def best(self) -> Best | None:
        """Return the best value of the same score, the last one if there are several; None if there is no score.

        Lower is better where --run.best says so; for other scores, the name tells, such as eval/loss.
        """
        if self.score is None:
            return None
        name, metric = self.score[0], BestMetric.parse(self.asked_best)
        if metric.name != name:
            metric = BestMetric(name, seems_lower(name))  # --run.best does not say it
        ranked = [(metric.rank(value), step) for step, value in zip(*self.column(name), strict=True)]
        ranked = [pair for pair in ranked if math.isfinite(pair[0])]
        if not ranked:
            return None
        value, step = max(ranked)  # of equally good ones the later, as in checkpoints
        return Best(name, metric.rank(value), step, metric.lower)

    @property
    def score_in_words(self) -> str:
        """Return the score's name and value as text, with four digits; empty where there is none."""
        score = self.score
        return f"{score[0]} {score[1]:.4g}" if score else ""

    @property
    def launches(self) -> tuple[Launch, ...]:
        """List the launches of the run."""
        return self.record.launches

    @functools.cached_property
    def spent(self) -> tuple[Spent, ...]:
        """List where the time of each launch went; the end of one that was killed, or goes on, is estimated.

        Empty for a run of an older version, and where no run can have spent such times.
        """
        launches = self.record.spent or ()
        if not all(launch.is_possible for launch in launches):
            return ()
        if launches and launches[-1].end is None:
            step = metrics_file.last_step(self.folder / "metrics.jsonl")
            changed = _changed(storage.at(self.folder), "metrics.jsonl")
            launches = (*launches[:-1], launches[-1].until_seen(changed, step))
        return launches

    @property
    def account(self) -> Account | None:
        """Return where the time of the whole run went; None where that is not known."""
        over = self.status not in ("running", "finished")
        return account(self.spent, self.record.step if over else None) if self.spent else None

    @property
    def layout(self) -> str:
        """Return the layout of the last launch in a few words; empty if there was none."""
        return self.launches[-1].layout if self.launches else ""

    @functools.cached_property
    def diagnostics(self) -> list[dict[str, Any]]:
        """List the lines of diagnostics.jsonl; empty for a run without --run.inspect-every, and if it is unreadable."""
        lines = map(_layers_of, _lines(self.folder / metrics_file.DIAGNOSTICS))
        return [line for line in lines if line is not None]

    @property
    def pictures(self) -> dict[str, list[Path]]:
        """List, by name, the pictures of the last step that has any."""
        files = storage.at(self.folder / "images")
        by_name: dict[str, dict[str, list[Path]]] = {}
        for entry in sorted(files.walk(tolerant=True), key=lambda entry: files.place / entry.name):
            file = files.place / entry.name
            matched = _PICTURE.fullmatch(file.name)
            if matched and entry.kind is storage.Kind.FILE and files.lies_inside(entry.name):
                name = text(file.parent.relative_to(files.place).as_posix())
                by_name.setdefault(name, {}).setdefault(matched[1], []).append(file)
        return {name: steps[max(steps)] for name, steps in by_name.items()}


def _changed(files: storage.Storage, name: str) -> float:
    """Return when a file was last written; 0 where it is not there, or not any more."""
    try:
        entry = files.entry(name, follow=False)
    except OSError:
        return 0.0
    return entry.changed if entry else 0.0


def _is_count(name: str) -> bool:
    score = ScoreName.parse(name)
    return score is not None and score.is_count


def check_reachable(place: Path) -> None:
    """Refuse a place in a store that cannot be asked; what is not there is no such place.

    Raises:
        UserError: it is one, and why.
    """
    files = storage.at(place)
    try:
        if files.is_remote:
            files.exists(RUN)
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror or error}") from None


def read(folder: Path) -> History:
    """Read a run's folder. Damaged and unfinished lines are left out.

    Raises:
        UserError: it holds no run, or its run.json is damaged, or its store cannot be asked.
    """
    check_reachable(folder)
    held = lock.in_use(folder)  # looked at before the status, which a run writes before it releases the lock
    record = run_record.read(folder)
    lines = map(_line_of, _lines(folder / "metrics.jsonl"))
    config = fields_of(folder / "config.yaml") or {}
    return History(folder, held, record, config, [line for line in lines if line is not None])


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        return metrics_file.read(file)
    except OSError:
        return []


def _line_of(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a line of metrics.jsonl has to show: its step, numbers, None for one that was not finite, and texts.

    None for a line whose step no run can have.
    """
    step = whole(fields.get("step"))
    if step is None:
        return None
    shown = {text(name): value for name, value in fields.items() if isinstance(value, int | float | str | None)}
    cleaned = {n: text(v) if isinstance(v, str) else v if v is None else number(v) for n, v in shown.items()}
    return {**cleaned, "step": step}


def _layers_of(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return a line of diagnostics.jsonl with its layers that have all their numbers; None where it has none."""
    step, layers = whole(fields.get("step")), section(fields, "layers")
    complete = {text(name): about for name, about in layers.items() if _is_layer(about)}
    return None if step is None or not complete else {"step": step, "layers": complete}


def _is_layer(about: Any) -> bool:
    if not isinstance(about, dict):
        return False
    counts = section(about, "histogram")
    places = all(name == "zero" or (name.removeprefix("-").isdecimal() and len(name) <= 3) for name in counts)
    numbers = [about.get(name, "") for name in ("weight_norm", "gradient_norm", "update_norm", "update_ratio")]
    return (
        places
        and all(whole(count) is not None for count in counts.values())
        and all(value is None or (isinstance(value, int | float) and abs(number(value)) < 1e300) for value in numbers)
    )


class Listing(NamedTuple):
    """What some folders hold."""

    runs: list[History]
    """The one that changed last comes first."""
    problems: list[str]
    """Why runs are not among them."""


def find(folders: Iterable[Path], depth: int = 3) -> Listing:
    """Read all runs in folders and in their subfolders down to `depth`.

    Raises:
        UserError: one of the folders does not exist, or its store cannot be asked.
    """
    places: dict[Path, Path] = {}
    for folder in folders:
        check_reachable(folder)
        files = storage.at(folder)
        if not files.is_folder():
            raise UserError(
                f"{folder} is not a folder: give folders of runs; runs are in runs/ unless --run.dir says otherwise"
            )
        for place in files.find(RUN, depth):
            places.setdefault(storage.at(place).identity(), place)
    runs, problems = [], []
    for folder in places.values():
        try:
            runs.append(read(folder))
        except UserError as problem:
            if contents.is_run(folder):  # and no other program's
                problems.append(str(problem))
    return Listing(sorted(runs, key=lambda run: -run.changed), problems)


def age(since: float) -> str:
    """Return how long ago a time was, as text: `12 s`, `5 min`, `3 h`, `2 d`."""
    seconds = max(0.0, time.time() - since)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
