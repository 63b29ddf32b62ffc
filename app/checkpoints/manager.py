"""Saving and resuming one run: when checkpoints are due, what their records say, and what the user is told."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from accelerate.utils import DistributedType

from app.checkpoints import finite, resume
from app.checkpoints.background import BackgroundSave
from app.checkpoints.record import Counts, Record
from app.checkpoints.store import CheckpointStore
from app.config import RunConfig
from app.distributed import collectives, layout
from app.distributed.accelerator import Accelerator
from app.distributed.buffers import Buffers
from app.distributed.state import sharded, state_dict
from app.distributed.state.attempt import SaveOutcome
from app.distributed.state.staging import Stager
from app.distributed.watchdog import Watchdog
from app.errors import UserError
from app.rundir import room
from app.rundir.logger import RunLogger
from app.sampling.batch_plan import BatchPlan
from app.sampling.triggers import Triggers


class Measured(NamedTuple):
    """What training has measured when a checkpoint is made."""

    scores: dict[str, float]
    """The last value of each score."""
    step_scores: dict[str, float]
    """The scores that were measured at this very step; they decide which checkpoint is best."""
    losses: Callable[[], dict[str, Any]]
    """Returns sums of losses, with which a resumed run goes on; called on every rank."""
    patience: dict[str, Any]
    """How long ago the best score was measured."""
    unevaluated: bool = False
    """Whether the run stops inside this step's evaluation."""
    counts: Counts = Counts()
    """What has happened in the steps so far."""


class CheckpointManager:
    """Commit checkpoints of a run when they are due, and load the newest good one."""

    def __init__(
        self,
        accelerator: Accelerator,
        buffers: Buffers,
        store: CheckpointStore,
        logger: RunLogger,
        watchdog: Watchdog,
        in_background: bool,
    ):
        """Look after a run's checkpoints.

        Args:
            buffers: of the models; all ranks agree on them before they are saved.
            watchdog: is told when ranks wait for files, which may take long.
            in_background: write while training goes on, from a copy in the host's memory; DeepSpeed's engine cannot.
        """
        self.accelerator, self.store, self.logger = accelerator, store, logger
        self.buffers, self._watchdog = buffers, watchdog
        self._in_background = in_background and accelerator.distributed_type != DistributedType.DEEPSPEED
        self._stager = Stager()
        self._writing: BackgroundSave | None = None
        self._contents: dict[str, Any] = {}
        self.constants: finite.Kinds = {}
        """What was not finite in the models before the first step."""
        self._warned = False
        self.seconds = 0.0
        """How long the last checkpoint took, from its copy to its commit."""
        self._began = 0.0  # when it was begun

    def resume(self, plan: BatchPlan, contents: dict[str, Any], settings: RunConfig) -> tuple[resume.Start, BatchPlan]:
        """Load the newest good checkpoint, and say so. Every rank takes part.

        Args:
            contents: the digest of the training data, which every checkpoint of this run will hold.

        Returns:
            Where this launch begins, and the plan of what follows.

        Raises:
            UserError: it is of other settings or data, of a longer run, of another model, or bound to another layout;
                or --run.stop-at names a step that the run does not have.
        """
        self._contents, self.constants = contents, finite.constants(self.accelerator.models)
        self.store.clear_staged()
        newest = self.store.newest(self.logger.progress.warn)
        if newest is None:
            plan.check_stop(settings)
            plan.check_limit()
            resume.check_every_source_is_read(plan)
            return resume.Start(), plan
        state, saved = newest
        self._go_on_with_folder(saved)
        here, folder = layout.layout(self.accelerator), self.logger.folder.path
        here.check_reads(saved.layout)
        plan = resume.fitting(saved, plan, settings, folder, contents)
        plan.check_limit()
        if note := resume.check_contents(saved.data, contents, folder, settings.changed == "accept"):
            self.logger.progress.say(note)
        sharded.load(self.accelerator, str(state))
        plan.check_stop(settings)
        since = self.logger.folder.changed_since
        changed = collectives.from_main(lambda: since(saved.config)) | resume.changed_mix(saved, plan)
        if "data.mix" in changed:
            was, now = changed["data.mix"]
            self.logger.progress.say(f"another mix from here on: {now}; it was {was}")
        start = resume.start(saved, changed)
        self.logger.progress.say(resume.described(start, plan, saved.layout, here, folder))
        changes = layout.changes_bits(saved.layout, saved.versions, here) if settings.exact else []
        if changes:
            warning = f"warning: --run.exact: {'; '.join(changes)}: bits from here on may differ from those before"
            self.logger.progress.warn(warning)
        return start, plan

    def _go_on_with_folder(self, saved: Record) -> None:
        """Take from a record what the folder could not tell: the run's settings, and its trackers' names for it."""
        folder = self.logger.folder
        for note in collectives.from_main(lambda: folder.check_saved_settings(saved.config)):
            self.logger.progress.say(note)
        folder.trackers = folder.trackers or saved.trackers

    def save_when_due(self, step: int, due: Triggers, measured: Measured, leaving: bool) -> None:
        """Commit a checkpoint where one is due, or this step's scores are the best yet. Every rank takes part.

        Args:
            leaving: the run stops here for now.
        """
        saving = self._writing.step_scores if self._writing else {}
        improves = due.may_be_best(step) and collectives.from_main(
            lambda: self.store.improves(step, measured.step_scores, saving)
        )
        ends = leaving or step in (due.plan.steps, due.settings.stop_at)
        if ends or improves or (due.saves(step) and not self._still_goes_up(step)):
            self.save(step, due.plan, measured)
        if due.may_be_best(step) and measured.step_scores:
            self._check_best(self.store.retention.metric.name, measured.scores)

    def _still_goes_up(self, step: int) -> bool:
        """Tell, and say, whether a step is not saved because an earlier one is still on its way to a store.

        Every rank takes part. A disk is waited for, as it is not away for long.
        """
        if not self.store.is_remote:
            return False
        earlier = collectives.from_main(lambda: self._writing.in_words() if self._writing else "")
        if earlier:
            self.logger.progress.warn(
                f"warning: step {step} is not saved: the checkpoint of {earlier}, is still going up to "
                f"{self.store.folder}; the next save is tried when it is due"
            )
        return bool(earlier)

    def best(self) -> tuple[int, float] | None:
        """Find the best checkpoint, one that is being written too: its step and its value of --run.best."""
        return self.store.best({self._writing.step: self._writing.step_scores} if self._writing else {})

    def _check_best(self, best: str, scores: dict[str, float]) -> None:
        """Warn once where --run.best names a score that there is not."""
        if best not in scores and not self._warned:
            self._warned = True
            self.logger.progress.warn(
                f"warning: --run.best {best}: there is no such score, so no checkpoint is kept for it; there are "
                f"{', '.join(sorted(scores))}"
            )

    def save(self, step: int, plan: BatchPlan, measured: Measured) -> None:
        """Commit a checkpoint, or begin to, after the one that is being written. Every rank takes part.

        If the step has a checkpoint already, it is kept, and takes over what was measured since.
        """
        with self.logger.time_aside("saving"):
            self.logger.clock.saves += 1
            self.wait()
            self._began = time.monotonic()
            self.buffers.find_changes()
            finite.check_state(self.accelerator, step, self.constants, self.newest_in_words)
            record = self._record(step, plan, measured)
            if self._in_background:
                snapshot, group = sharded.snapshot(self.accelerator, self._stager), collectives.background()
                self._writing = BackgroundSave(self.store, record, snapshot, group, self.accelerator.device)
                return
            with self._watchdog.long_work():
                outcome = self.store.save(record, partial(sharded.save, self.accelerator))
            self._report(step, outcome)

    def _record(self, step: int, plan: BatchPlan, measured: Measured) -> Record:
        """Collect what a checkpoint's record says: copies, as training logs on while it is written."""
        folder = self.logger.folder
        return Record(
            step=step,
            metrics=dict(measured.step_scores),
            scores=dict(measured.scores),
            unevaluated=measured.unevaluated,
            patience=measured.patience,
            losses=measured.losses(),
            counts=measured.counts,
            seen=plan.seen(step),
            layout=layout.layout(self.accelerator),
            versions=layout.versions(),
            data=resume.data_of(plan, self._contents),
            config=folder.config,
            trackers=folder.trackers,
            buffers=list(self.buffers.changing),
            nonfinite=self.constants,
        )

    def look(self) -> None:
        """Report a checkpoint whose writing has ended; does not wait.

        What ends the run is left to `wait`, which all ranks come to after the same step.
        """
        if self._writing and self._writing.over():
            self.wait()

    def wait(self, quietly: bool = False) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Args:
            quietly: what went wrong costs a warning, because the run fails for another reason.

        Raises:
            UserError: what went wrong will not pass by itself.
        """
        if not self._writing:
            return
        writing, self._writing = self._writing, None
        if self.store.is_remote and (words := writing.in_words()):
            self.logger.progress.say(f"waiting for the checkpoint of {words}, which is still going up")
        with self.logger.clock.during("saving"), self._watchdog.long_work():
            writing.join()
        try:
            outcome = writing.outcome()
        except Exception as error:
            if not quietly:
                raise
            outcome = SaveOutcome([str(error)])
        self._report(writing.step, outcome, quietly)

    def _report(self, step: int, outcome: SaveOutcome, quietly: bool = False) -> None:
        """Tell how saving ended. A failure that may pass costs a warning; earlier checkpoints stay.

        Raises:
            UserError: the failure will not pass by itself.
        """
        self.seconds = time.monotonic() - self._began
        problems = "; ".join(outcome.problems)
        if not problems:
            self.logger.note(step=step)
            return
        if outcome.lasting and not quietly:
            raise UserError(problems)
        self.logger.progress.warn(
            f"warning: no checkpoint was saved at step {step}: {problems}{self._room()}. The run goes on, and tries "
            f"again later; {self.newest_in_words()}"
        )

    def newest_in_words(self) -> str:
        """Say which checkpoint is the newest."""
        try:
            steps = self.store.known_steps()
        except OSError:
            steps = []
        return f"the newest checkpoint is {f'step {steps[-1]}' if steps else 'none'}"

    def _room(self) -> str:
        """Say what a checkpoint needs and what the disk has, where that is too little."""
        return room.lacking(self.needed, self.logger.folder.path)

    @property
    def needed(self) -> int:
        """Return about how many bytes a checkpoint has."""
        return state_dict.size(self.accelerator.models, self.accelerator.optimizers)
