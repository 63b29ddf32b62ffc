"""What a run tells its user: lines on the terminal, run.json, metrics.jsonl, trackers and speeds."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from app import storage
from app.config import RunConfig
from app.rundir import images, metrics_file
from app.rundir.folder import RunFolder
from app.rundir.logs import Logs
from app.rundir.metrics_file import MetricsFile
from app.rundir.progress import Progress, duration
from app.rundir.run_record import RUN, Launch, RunRecord
from app.rundir.throughput import Cost
from app.rundir.time_spent import Clock, Part, Spent
from app.rundir.trackers import Trackers
from app.sampling.batch_plan import BatchPlan


class _Pace:
    """How fast steps are made, from the first one of this launch on."""

    def __init__(self, plan: BatchPlan, done: int, cost: Cost | None, peak: float | None):
        """Begin after step `done`; for `cost` and `peak` see RunLogger.start."""
        self.plan, self.cost, self.peak = plan, cost, peak
        self.began = self._clock = time.perf_counter()
        self.first = self._step = done

    def lap(self, done: int, aside: float) -> dict[str, float]:
        """Return the speeds since the last lap, without the seconds `aside`: samples per second first."""
        now = time.perf_counter()
        rate = (self.plan.seen(done) - self.plan.seen(self._step)) / max(now - self._clock - aside, 1e-9)
        self._clock, self._step = now, done
        return {"samples_per_second": rate, **(self.cost.speeds(rate, self.peak) if self.cost else {})}


class _Pending(NamedTuple):
    """Values that are written after the step's own line."""

    values: dict[str, Any]
    of_body: bool
    """Whether the step's body has logged them, and will again if it runs again."""


class RunLogger:
    """Write a run, its steps and scores on the main process; do nothing on the others."""

    def __init__(self, speaks: bool, folder: RunFolder, quiet: bool = False):
        self.folder, self.speaks = folder, speaks
        self.progress = Progress(speaks, quiet)
        self.file: MetricsFile | None = None
        self.logs = Logs()
        """The growing files of the run, which its other parts may add to."""
        self.trackers: Trackers | None = None
        self._pending: list[_Pending] = []
        self.pending_images: images.Images = {}
        self.pace: _Pace | None = None
        """How fast steps are made; None before `start`."""
        self.aside = 0.0
        self.clock = Clock()
        """Where the time of this launch goes."""
        self._launch: tuple[Launch, int] | None = None  # this one and its processes, once run.json tells of it
        self._earlier: tuple[Spent, ...] = ()  # where the time of earlier launches went
        self.over = False
        """Whether this launch ends now, as far as run.json is to say."""
        self._failed = False

    def open(
        self,
        record: RunRecord,
        settings: RunConfig,
        config: dict,
        scores_too: bool = False,
    ) -> None:
        """Write what this run is, and open metrics.jsonl and the trackers after its step, on the main process.

        Args:
            record: of this launch.
            scores_too: see MetricsFile.

        Raises:
            UserError: the folder cannot be written.
        """
        done, folder = record.step, self.folder
        names = folder.trackers if done else {}
        try:
            self._earlier = _closed(folder)
            self._launch = record.launches[-1], record.layout.processes
            folder.begin(dataclasses.replace(record.after(folder.record), spent=self.time_spent()))
            self.file = MetricsFile(folder.path / "metrics.jsonl", done, self.progress.warn, scores_too, self.logs)
            self.trackers = Trackers(settings.trackers, folder.path, names, self.progress.warn)
            self.trackers.start({**config, "commit": record.commit}, done)  # which adds its names for a new run
            folder.trackers = names
            folder.update(trackers=names)
        except OSError as error:
            raise folder.cannot_write(error) from None

    def note(self, **fields: Any) -> None:
        """Change fields of run.json; a full disk costs a warning."""
        if self.speaks:
            try:
                self.folder.update(spent=self.time_spent(), **fields)
            except OSError as error:
                path = self.folder.path / RUN
                self.progress.warn(f"warning: {path} could not be brought up to date: {error.strerror}")

    def time_spent(self) -> tuple[Spent, ...] | None:
        """Return what run.json says of where the time went; before `open`, what earlier launches have said."""
        if self._launch is None:
            return self.folder.record.spent if self.folder.record else None
        launch, devices = self._launch
        return *self._earlier, self.clock.spent(devices, launch.layout, launch.step, self.over)

    def failed(self, why: str) -> None:
        """Note in run.json why the run has failed. The first reason stays: later ones may follow from it."""
        if not self._failed:
            self._failed = True
            self.note(status="failed", error=why)

    def start(self, plan: BatchPlan, done: int, cost: Cost | None = None, peak: float | None = None) -> None:
        """Begin to count and to time after step `done`.

        Args:
            cost: what one sample costs, where it is known.
            peak: the most floating-point operations per second that all devices together can do, where it is known.
        """
        self.progress.start(done, plan.steps)
        self.pace, self.aside = _Pace(plan, done, cost, peak), 0.0
        self.clock.turn_to("stepping")

    def _started(self) -> _Pace:
        """Return the pace, for what is said of steps; `start` comes before them."""
        if self.pace is None:
            raise RuntimeError("no step was begun: RunLogger.start comes first")
        return self.pace

    @contextmanager
    def time_aside(self, part: Part) -> Iterator[None]:
        """Leave the time of this block, which is not training, out of samples per second.

        Args:
            part: of the launch's time, as which it counts.
        """
        start = time.perf_counter()
        with self.clock.during(part):
            yield
        self.aside += time.perf_counter() - start

    def step(self, done: int, losses: dict[str, float], measured: dict[str, Any]) -> None:
        """Write the line of a step."""
        pace = self._started()
        plan, speeds = pace.plan, pace.lap(done, self.aside)
        self.aside, seen = 0.0, plan.seen(done)
        by_source = {f"samples/{name}": count for name, count in plan.order.counts(seen).items()}
        self._write(done, {**losses, **measured, "samples": seen, "epoch": seen / plan.samples, **by_source, **speeds})
        self.progress.show(done, losses, measured.get("lr"), speeds, (plan.total - seen) / speeds["samples_per_second"])

    def keep(self, values: dict[str, Any], of_body: bool = True) -> None:
        """Keep values until the step's own line is written.

        Args:
            of_body: the step's body has logged them, and will again if it runs again.
        """
        self._pending.append(_Pending(values, of_body))

    def write_pending(self, done: int) -> None:
        """Write the scores and pictures that a step's body logged, after the step's own line."""
        for values, _ in self._pending:
            self._write(done, values)
            words = [f"step {done}", *(f"{name} {_short(value)}" for name, value in values.items())]
            self.progress.say("  ".join(words))
        if self.pending_images and self.speaks:
            self._write_images(done, self.pending_images)
            if self.trackers is not None:
                self.trackers.log_images(done, self.pending_images)
        self._pending, self.pending_images = [], {}

    def _write_images(self, done: int, pictures: images.Images) -> None:
        def left_out(why: str) -> None:
            self.progress.warn(f"warning: the pictures of step {done} are not written: {why}")

        def write() -> None:
            images.write(self.folder.path / "images", done, pictures)

        if self.folder.is_remote:
            return self.logs.send(write, left_out)
        try:
            write()
        except OSError as error:
            left_out(error.strerror or str(error))

    @contextmanager
    def pictures_renamed(self, rename: Callable[[images.Images], images.Images]) -> Iterator[None]:
        """Rename the pictures that are logged in a block."""
        before, self.pending_images = self.pending_images, {}
        try:
            yield
        finally:
            self.pending_images = before | rename(self.pending_images)

    def drop_pending(self) -> None:
        """Forget what a step's body logged, because it will run again; the note of a skipped update stays."""
        self._pending = [each for each in self._pending if not each.of_body]
        self.pending_images = {}

    def _write(self, done: int, values: dict[str, Any]) -> None:
        if self.file is not None and self.trackers is not None:  # on the main process
            with suppress(OSError):  # the disk is away for a while
                self.folder.check(anew=not self.folder.is_remote)
            self.file.write(done, values)
            self.trackers.log(done, values)

    def track(self, done: int, values: dict[str, float]) -> None:
        """Hand numbers that have a file of their own to the trackers alone."""
        if self.trackers is not None and values:
            self.trackers.log(done, values)

    def log_model(self, model: Path) -> None:
        """Hand a finished model to the trackers that store models."""
        if self.trackers is not None:
            self.trackers.log_model(model)

    def column(self, name: str) -> list[float]:
        """Return the numbers of this name that the run has written from its beginning on; none on other ranks."""
        if self.file is None:
            return []
        with suppress(OSError):
            self.logs.flush()
        return metrics_file.column(self.file.path, name)

    def summary(
        self,
        done: int,
        scores: dict[str, Any],
        model: Path,
        weights: str,
        use: str,
        go_on: str,
        best: str,
        meanings: dict[str, str],
        faults: Sequence[str],
    ) -> None:
        """Say how the run went, where the model is, how to use it, and how to go on.

        Args:
            weights: which weights the model has; empty for those of the last step.
            go_on: how the same command goes on.
            best: which step was the best one, and how to get its model.
            meanings: of scores, by their names, to stand next to them.
            faults: what makes the scores worth little, a line each.
        """
        self.progress.close()
        pace = self._started()
        taken = duration(time.perf_counter() - pace.began)
        now = f"{done - pace.first} of them now, in {taken}" if done > pace.first else "all of them before"
        lines = {name: with_meaning(_short(value), meanings.get(name)) for name, value in scores.items()}
        lines |= {"model": f"{model}: {weights}" if weights else str(model)}
        lines |= {"use it": use.format(model=model)} if use else {}
        lines |= {"best": best} if best else {}
        lines["go on"] = f"the same command {go_on}; another --run.dir starts another run"
        self.progress.say(f"finished: {done} steps, {now}")
        width = max(map(len, lines))
        for name, value in lines.items():
            self.progress.say(f"  {name:<{width}}   {value}")
        for fault in faults:
            self.progress.warn(f"warning: {fault}")

    def stopped(self, done: int, saved: list[int], asked: bool, in_evaluation: bool = False) -> None:
        """Say how to go on with a run that is not finished.

        Args:
            saved: the steps that have a checkpoint.
            asked: --run.stop-at has stopped the run.
            in_evaluation: the run stopped inside an evaluation.
        """
        place = "in the evaluation of" if in_evaluation else "after"
        where = f"after step {saved[-1]}" if saved else "from the start"
        again = "the same command without --run.stop-at" if asked else "the same command"
        then = "evaluates, and goes on" if in_evaluation else "goes on"
        self.progress.say(f"stopped {place} step {done} of {self._started().plan.steps}; {again} {then} {where}")

    def close(self) -> None:
        """Close the bar, the trackers and the growing files."""
        self.progress.close()
        if self.trackers is not None:
            self.trackers.finish()
        self.logs.close()


def _closed(folder: RunFolder) -> tuple[Spent, ...]:
    """Return where the time of a folder's earlier launches went; the end of one that was killed is estimated."""
    earlier = (folder.record and folder.record.spent) or ()
    if not earlier or earlier[-1].end is not None:
        return earlier
    path = folder.path / "metrics.jsonl"
    entry = storage.at(folder.path).entry(path.name, follow=False)
    last = earlier[-1].until_seen(entry.changed if entry else 0.0, metrics_file.last_step(path))
    return (*earlier[:-1], last)


def with_meaning(number: str, meaning: str | None) -> str:
    """Return a score in words, with what it is if its name does not say it."""
    return f"{number} ({meaning})" if meaning else number


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
