"""Saving and resuming one run: what a checkpoint says beside its state, and what must agree before a run goes on."""

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType

from app.checkpoints import sharded, state_dict
from app.checkpoints.staging import Stager
from app.checkpoints.store import Checkpoints
from app.config import RunConfig
from app.data.fingerprint import contents, difference
from app.distributed import collectives, layout
from app.distributed.accelerator import Accelerator
from app.distributed.buffers import Buffers
from app.distributed.watchdog import Watchdog
from app.errors import UserError
from app.rundir.logger import Records
from app.sampling.batch_plan import BatchPlan
from app.sampling.triggers import Triggers


class Flight(NamedTuple):
    """A checkpoint that is being written beside training."""

    step: int
    measured: dict[str, float]
    problems: Future
    thread: threading.Thread


class Saving:
    """Commit checkpoints of a run when they are due, and load the newest good one."""

    def __init__(
        self,
        accelerator: Accelerator,
        buffers: Buffers,
        checkpoints: Checkpoints,
        records: Records,
        watchdog: Watchdog,
        beside: bool,
    ):
        """Look after a run's checkpoints.

        Args:
            buffers: of the models; all ranks agree on them before they are saved.
            watchdog: is told where ranks wait for files, which may take long.
            beside: write while training goes on, from a copy in the host's memory; DeepSpeed's engine cannot.
        """
        self.accelerator, self.checkpoints, self.records = accelerator, checkpoints, records
        self.buffers, self._watchdog = buffers, watchdog
        self._beside = beside and accelerator.distributed_type != DistributedType.DEEPSPEED
        self._stager = Stager()
        self._flight: Flight | None = None
        self._contents: dict[str, Any] = {}
        self._warned = False

    def resume(self, plan: BatchPlan, data: Sequence, settings: RunConfig) -> tuple[dict[str, Any] | None, BatchPlan]:
        """Load the newest good checkpoint. Every rank takes part.

        Returns:
            Its record, None where there is none; and the plan of what follows it.

        Raises:
            UserError: it is of other settings or data, of a longer run, of another model, or bound to another layout.
        """
        self._contents = _contents_everywhere(data)
        found = self.checkpoints.newest(self.records.progress.warn)
        if found is None:
            return None, plan
        path, saved = found
        folder = self.records.folder.path
        for note in collectives.from_main(lambda: self.records.folder.settle(saved.get("config", {}))):
            self.records.progress.say(note)
        self.records.folder.info.setdefault("trackers", saved.get("trackers", {}))
        layout.check_bound(saved["layout"], layout.layout(self.accelerator))
        plan = fitting(saved, plan, settings, folder)
        self._check_contents(folder, saved["data"], settings.changed == "accept")
        sharded.load(self.accelerator, str(path))
        return saved, plan

    def _check_contents(self, folder: Path, saved: dict[str, Any], accept: bool) -> None:
        changed = difference(saved["contents"], self._contents) if "contents" in saved else ""
        if changed and not accept:
            raise UserError(
                f"{folder} holds a run over other training data: {changed}. Give it the data that it had, accept these "
                "with --run.changed accept, or give another --run.dir"
            )
        if changed:
            self.records.progress.say(f"the training data have changed, which is accepted (--run.changed): {changed}")

    def save_when_due(
        self,
        step: int,
        due: Triggers,
        scores: dict[str, float],
        measured: dict[str, float],
        leaving: bool,
        unevaluated: bool = False,
    ) -> None:
        """Commit a checkpoint where one is due, or this step's scores are the best yet. Every rank takes part.

        Args:
            leaving: the run stops here for now.
            scores: the last value of each.
            measured: those that were measured at this very step; they decide which checkpoint is best.
            unevaluated: the run stops inside this step's evaluation.
        """
        best = due.settings.best.removeprefix("-")
        flying = self._flight.measured if self._flight else {}
        improves = due.may_be_best(step) and collectives.from_main(
            lambda: self.checkpoints.improves(step, measured, flying)
        )
        if due.saves(step) or leaving or improves:
            self.save(step, due.plan, scores, measured, unevaluated)
        if due.may_be_best(step) and measured and best not in scores and not self._warned:
            self._warned = True
            self.records.progress.warn(
                f"warning: --run.best {best}: there is no such score, so none is kept for it; there are "
                f"{', '.join(sorted(scores))}"
            )

    def save(
        self,
        step: int,
        plan: BatchPlan,
        scores: dict[str, float],
        measured: dict[str, float],
        unevaluated: bool = False,
    ) -> None:
        """Commit a checkpoint, or begin to, after the one that is being written. Every rank takes part.

        One that the step has already is kept, and takes over what was measured since.
        """
        with self.records.time_aside():
            self.wait()
            self.buffers.find_changes()
            state_dict.check_finite(self.accelerator.models, step)
            data = {"rows": plan.samples, "fingerprint": plan.fingerprint, "contents": self._contents}
            folder = self.records.folder
            run = {"config": folder.config, "trackers": folder.info.get("trackers", {})}
            here = {"layout": layout.layout(self.accelerator), "versions": layout.versions()}
            # Copies: training logs on while this is written.
            record = {"seen": plan.seen(step), "metrics": dict(measured), "scores": dict(scores)}
            record["unevaluated"] = unevaluated
            record |= {**here, "data": data, **run, "buffers": self.buffers.changing}
            if not self._beside:
                with self._watchdog.long_work():
                    problems = self.checkpoints.save(
                        step, record, lambda folder: sharded.save(self.accelerator, folder)
                    )
                self._report(step, problems)
                return
            write, group = sharded.snapshot(self.accelerator, self._stager), collectives.background()
            started = _in_thread(
                lambda: self.checkpoints.save(step, record, lambda folder: write(folder, group), group),
                self.accelerator.device,
            )
            self._flight = Flight(step, record["metrics"], *started)

    def look(self) -> None:
        """Report a checkpoint whose writing has ended; does not wait.

        What ends the run is left to `wait`, which all ranks come to behind the same step.
        """
        if self._flight and self._flight.problems.done() and not self._flight.problems.exception():
            self.wait()

    def wait(self, quietly: bool = False) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Args:
            quietly: what went wrong costs a warning, because the run fails for another reason.

        Raises:
            UserError: what went wrong will not pass by itself.
        """
        if not self._flight:
            return
        flight, self._flight = self._flight, None
        # Joined, because it frees the copies after its result: torch's C++ aborts a thread that the interpreter's end
        # meets there (CPython 3.11).
        with self._watchdog.long_work():
            flight.thread.join()
        try:
            problems = flight.problems.result()
        except Exception as error:
            if not quietly:
                raise
            problems = [str(error)]
        self._report(flight.step, problems)

    def _report(self, step: int, problems: list[str]) -> None:
        """Tell of a checkpoint. A failure costs a warning; earlier checkpoints stay."""
        if problems:
            try:
                kept = self.checkpoints.steps()
            except OSError:
                kept = []
            self.records.progress.warn(
                f"warning: no checkpoint was saved at step {step}: {'; '.join(problems)}{self._room()}. Training goes "
                f"on; the newest checkpoint is {f'step {kept[-1]}' if kept else 'none'}"
            )
        else:
            self.records.note(step=step)

    def _room(self) -> str:
        """Say what a checkpoint needs and what the disk has, where that is too little."""
        needed = state_dict.size(self.accelerator.models, self.accelerator.optimizers)
        folder = self.records.folder.path
        try:
            free = shutil.disk_usage(folder).free
        except OSError:
            return ""
        return f" (it needs {needed:,} bytes, and {folder} has {free:,} free)" if free < needed else ""


def _contents_everywhere(data: Sequence) -> dict[str, Any]:
    """Digest the training data, once on each machine. Every rank takes part.

    Raises:
        UserError: a machine has other data than the main process.
    """
    found = collectives.from_each_machine(lambda: contents(data))
    for rank, other in found.items():
        if changed := difference(found[0], other):
            raise UserError(
                f"rank {rank} would train on other data than rank 0: {changed}. Give every machine the same data, for "
                "example on a disk that all of them share"
            )
    return found[0]


def fitting(saved: dict[str, Any], plan: BatchPlan, settings: RunConfig, folder: Path) -> BatchPlan:
    """Plan what follows a checkpoint, from its record.

    Raises:
        UserError: it is of other data, or of a longer run.
    """
    step, seen = saved["step"], saved.get("seen")
    if seen is not None:  # an earlier version did not write it
        plan = plan.going_on(settings, step, seen)
    if step > plan.steps or (seen or 0) > plan.total:
        asked = f"{plan.steps} steps" if step > plan.steps else f"{plan.total:,} samples, fewer than it has seen,"
        raise UserError(
            f"{folder} holds a run after step {step}, and {asked} are asked for: give at least as many with "
            "--run.steps or --run.epochs, or another --run.dir"
        )
    rows, before = plan.samples, saved["data"]["rows"]
    if plan.fingerprint != saved["data"]["fingerprint"]:
        now = f"now there are {rows:,}" if rows != before else "their lengths or weights were others"
        raise UserError(
            f"{folder} holds a run over other training data: it had {before:,} rows, and {now}. Give it the "
            "data that it had, or another --run.dir"
        )
    return plan


def _in_thread(call: Callable[[], list[str]], device: torch.device) -> tuple[Future, threading.Thread]:
    """Run a call while training goes on; whoever takes its result joins the thread first."""
    future = Future()

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins on the first one
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    # A daemon, so that Ctrl-C does not wait for a write.
    thread = threading.Thread(target=run, name="saving", daemon=True)
    thread.start()
    return future, thread
