"""What a run opens once, for its steps, its evaluations and its end."""

from collections.abc import Callable, Generator, Iterator
from typing import Any
from weakref import WeakSet

from app import storage
from app.checkpoints.manager import CheckpointManager
from app.checkpoints.store import CheckpointStore
from app.config import EMAConfig, RunConfig
from app.data.rows import Rows
from app.distributed.accelerator import Accelerator
from app.distributed.buffers import Buffers
from app.distributed.notice import Notice, Reactions
from app.distributed.preemption import Preemption
from app.distributed.running_statistics import RunningStatistics
from app.distributed.watchdog import Watchdog
from app.rundir.folder import RunFolder
from app.rundir.logger import RunLogger
from app.rundir.run_record import RunRecord
from app.sampling.batch_plan import BatchPlan, EvaluationPlan, Length, Step, Weigh
from app.training.exact.gradients import ExactGradients
from app.training.feeding.fetching import Fetch
from app.training.feeding.loader import Augment, load
from app.training.feeding.weighing import agreed
from app.training.loop.cut_short import CutShort
from app.training.loop.gradients import Gradients
from app.training.optim.averages import Averages
from app.training.scores.remarks import Remarks


class Services:
    """The services of one run; each is described in its own module."""

    def __init__(
        self,
        settings: RunConfig,
        averaging: EMAConfig | None,
        folder: RunFolder,
        accelerator: Accelerator,
        unbegun: Callable[[], RunRecord],
    ):
        """Make them; nothing is locked, written or listened to yet.

        Args:
            averaging: None where the recipe has no such settings.
            unbegun: returns the record of a run that has not read its data yet.
        """
        self.accelerator, self.folder = accelerator, folder
        self.logger = RunLogger(accelerator.is_main_process, folder, settings.quiet)
        kind = ExactGradients if settings.exact else Gradients
        self.gradients = kind(accelerator, settings.seed, self.logger.failed)
        checkpoints, self.model_folder = folder.path / "checkpoints", folder.path / "model"
        files = storage.at(folder.path)
        self.watchdog = Watchdog(
            settings.timeout,
            self.logger.failed,
            [checkpoints],
            # On the way to a store they are staged, below the folder's own name.
            lambda: [folder.path] if files.is_remote else [folder.path / draft for draft in files.drafts("model")],
        )
        self.checkpoint_store = CheckpointStore(
            checkpoints,
            accelerator.process_index,
            accelerator.num_processes,
            check_owner=folder.check,
            on_block=self.watchdog.moved,
            before_commit=self.logger.logs.flush,
            warn=self.logger.progress.warn,
        )
        statistics = RunningStatistics(accelerator, settings.exact)
        self.buffers = Buffers(accelerator, statistics, self.logger.progress.warn)
        self.averages = Averages(averaging, accelerator, self.buffers)
        self.checkpoint_manager = CheckpointManager(
            accelerator, self.buffers, self.checkpoint_store, self.logger, self.watchdog, settings.save_async
        )
        cut_short = CutShort(self.logger, self.checkpoint_store, self.watchdog, settings.grace, unbegun)
        self.notice = Notice(
            settings.grace,
            settings.notice,
            Reactions(self.logger.failed, lambda _: self.logger.note(status="preempted"), cut_short),
        )
        self.preemption = Preemption(accelerator.device, self.notice)
        # On a CPU, loading processes would take the cores that train.
        self._workers = settings.workers if settings.workers >= 0 else (0 if accelerator.device.type == "cpu" else 4)
        self._fetching = WeakSet[Any]()
        self.remarks = Remarks()

    def load(
        self,
        plan: BatchPlan | EvaluationPlan,
        steps: range,
        data: Rows,
        collate: Callable[[list], Any],
        augment: Augment | None = None,
        fetch: Fetch = (),
        weigh: Weigh | None = None,
        length: Length | None = None,
    ) -> Iterator[Step]:
        """Yield this data rank's part of each step, on its device; with `weigh`, every rank takes part."""
        ours = self.accelerator
        place = ours.data_rank, ours.data_ranks, ours.device
        loaded = load(plan, steps, data, collate, *place, self._workers, augment, fetch, weigh, length)
        if isinstance(loaded, Generator):
            self._fetching.add(loaded)
        if weigh is None:
            return loaded
        return agreed(loaded, ours, plan.order.sort_over if isinstance(plan, BatchPlan) else 1)

    def stop_fetching(self) -> None:
        """End the threads of `load` that are still ahead of a step, because the run was left in its middle."""
        for loaded in list(self._fetching):
            loaded.close()
