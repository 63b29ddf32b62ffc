"""Noticing a rank that hangs: every rank's stacks are shown, and the launcher is left to end or restart the run."""

import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from app import process, ranks

_runs = 0


class Watchdog:
    """End all ranks when one of them makes no progress for too long."""

    def __init__(self, seconds: float, failed: Callable[[str], None]):
        """Watch from `start` on.

        Args:
            seconds: without a step, a micro-batch of an evaluation, or a checkpoint; 0: do not watch.
            failed: notes, on the main process, why the run ends.
        """
        self.seconds, self.failed = seconds, failed
        self.step = 0
        self._beat = time.monotonic()
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to watch. Every rank takes part."""
        global _runs
        _runs += 1
        self.beat(self.step)
        if self.seconds:
            # A connection of its own: another thread may be waiting on the other one.
            store = None if ranks.alone() else ranks.store().clone()
            threading.Thread(
                target=self._watch, args=(store, f"samestep/hang/{_runs}"), name="watchdog", daemon=True
            ).start()

    def beat(self, step: int | None = None) -> None:
        """Note progress, and the step that this rank is in."""
        self._beat = time.monotonic()
        self.step = self.step if step is None else step

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self, store, key: str) -> None:
        every = min(max(self.seconds / 10, 1.0), 10.0)
        try:
            while not self._closed.wait(every):
                if not process.in_notebook():
                    # For code that never lets another thread of Python run: this one comes too late to put it off.
                    faulthandler.dump_traceback_later(self.seconds + 60, exit=True, file=sys.__stderr__)
                late = time.monotonic() - self._beat > self.seconds
                if late and store is not None:
                    store.compare_set(key, "", f"noticed by rank {ranks.rank()} in step {self.step}")
                if late or (store is not None and store.check([key])):
                    who = store.get(key).decode() if store is not None else f"in step {self.step}"
                    self._end(f"no progress for {self.seconds:g} s (--run.timeout), {who}")
                    return
        except RuntimeError:
            # The store has gone with its launcher, on another machine: this one's would have ended this process.
            if not self._closed.is_set():
                self._end("the launcher of the first machine has gone")
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _end(self, reason: str) -> None:
        print(f"{reason}; stacks of rank {ranks.rank()}, step {self.step}:\n{_stacks()}", file=sys.stderr, flush=True)
        if process.in_notebook():
            return  # its user can interrupt the cell
        self.failed(reason)
        time.sleep(3)  # for the other ranks to show theirs, before the launcher ends them
        os._exit(1)


def _stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
