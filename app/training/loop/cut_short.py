"""What is said, and noted, of a run that a notice ends before it could leave by itself."""

import sys
from collections.abc import Callable

from app.checkpoints.store import CheckpointStore
from app.distributed.notice import Work
from app.distributed.watchdog import Watchdog
from app.rundir.logger import RunLogger
from app.rundir.run_record import RunRecord


class CutShort:
    """Notes that a run is to be repeated, and says what of it is saved; on the main process, from a thread."""

    def __init__(
        self,
        logger: RunLogger,
        store: CheckpointStore,
        watchdog: Watchdog,
        grace: float,
        unbegun: Callable[[], RunRecord],
    ):
        self._logger, self._store, self._watchdog = logger, store, watchdog
        self._grace, self._unbegun = grace, unbegun

    def __call__(self, who: str, work: Work) -> None:
        """Say it, note it and release the folder.

        Args:
            who: gave the notice.
        """
        if not self._logger.speaks:
            return
        steps, over = self._steps(), f"{who}: the time is over (--run.grace {self._grace:g})"
        newest = "there is no checkpoint yet, and the same command begins again"
        if steps:
            newest = f"the newest checkpoint is step {steps[-1]}, from which the same command goes on"
        match work:
            case Work.PREPARING:
                told = f"{who}: stopped before a step was begun; {newest}"
            case Work.TRAINING:
                told = f"{over} in step {self._watchdog.step}; {newest}"
            case Work.EXPORTING:
                told = f"{over}, and the finished model is not written; {newest} and writes it"
        print(f"\n{told}", file=sys.stderr, flush=True)
        folder = self._logger.folder
        self._logger.over = True
        if folder.record is not None:
            folder.update(status="preempted", error=None, spent=self._logger.time_spent())
        elif folder.config:  # this run has taken the folder
            folder.begin(self._unbegun())
        folder.release()

    def _steps(self) -> list[int]:
        try:
            return self._store.steps()
        except OSError:
            return []
