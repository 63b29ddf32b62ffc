"""Writing a checkpoint in a thread, while training goes on."""

import threading
import time
from concurrent.futures import Future
from functools import partial

import torch
import torch.distributed as dist

from app.checkpoints.record import Record
from app.checkpoints.store import CheckpointStore
from app.distributed.state.attempt import SaveOutcome
from app.distributed.state.sharded import Snapshot
from app.rundir.progress import duration


class BackgroundSave:
    """A checkpoint that is being written in a thread."""

    def __init__(
        self,
        store: CheckpointStore,
        record: Record,
        snapshot: Snapshot,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        """Begin to write.

        Args:
            snapshot: a copy of the state, which training leaves alone.
            group: the process group in which the ranks' threads talk.
            device: of this process.
        """
        self.step, self.step_scores, self._began = record.step, record.metrics, time.monotonic()
        self._store, self._record, self._snapshot = store, record, snapshot
        self._group, self._device = group, device
        self._outcome: Future[SaveOutcome] = Future()
        # A daemon, so that Ctrl-C does not wait for a write.
        self._thread = threading.Thread(target=self._run, name="saving", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread begins on the first GPU
            write = partial(self._snapshot.write, group=self._group)
            self._outcome.set_result(self._store.save(self._record, write, self._group))
        except BaseException as error:
            self._outcome.set_exception(error)

    def over(self) -> bool:
        """Tell whether it has ended in a way that lets the run go on; does not wait."""
        return self._outcome.done() and not self._outcome.exception() and not self._outcome.result().lasting

    def in_words(self) -> str:
        """Say which checkpoint is being written, and for how long; empty once it has ended."""
        return "" if self._outcome.done() else f"step {self.step}, after {duration(time.monotonic() - self._began)}"

    def join(self) -> None:
        """Wait until the thread has ended.

        Its result is not enough: the thread frees the copies after that, and torch's C++ aborts a thread that is still
        running there when the interpreter ends (CPython 3.11).
        """
        self._thread.join()

    def outcome(self) -> SaveOutcome:
        """Return how it ended, once it was joined; a fault of the program is raised."""
        return self._outcome.result()
