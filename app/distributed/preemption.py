"""Preemption: the signals that ask a run to stop, and the step after which all ranks leave together."""

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from app.distributed import collectives, environment
from app.distributed.watchdog import note_in_time

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_ALL_HERE = str(2**63)  # a turn that no evaluation has


class StoppedInEvaluation(BaseException):
    """Ends an evaluation and, through the recipe's loop, its run. It is not an error."""


class _Process:
    """The run of this process that hears signals. There is one object of it, because signals have one handler."""

    def __init__(self) -> None:
        self.listening: Preemption | None = None

    def forget(self) -> None:
        """Have a forked process leave its parent's run."""
        if self.listening is not None:
            self.listening.forget()
            self.listening = None


_process = _Process()


class Preemption:
    """Listens for SIGTERM, SIGINT and SIGUSR1 on any rank, and has all ranks leave after the same step.

    A thread reads the signals, so that one is noticed while training waits for another rank. It saves nothing.
    """

    def __init__(self, device: torch.device, failed: Callable[[str], None], left: Callable[[str], None]):
        """Prepare to listen; `start` begins.

        Args:
            device: of the model.
            failed: notes, on the main process, why the run ends without another step.
            left: notes that the user has left it.
        """
        self.asked = ""  # the signal that asked this rank
        self._failed, self._left = failed, left
        self._device = device
        self._events: deque[torch.Event] = deque()
        self._last: int | None = None
        self._key, self._evaluations = "", 0
        self._before: dict[int, Any] = {}  # handlers of signals, that are given back
        self._pipe: tuple[int, int] | None = None
        self._siblings: list[str] = []  # this machine's processes of the run; from `start` on
        self._wakeup = -1  # the file that got signals before

    @property
    def happened(self) -> bool:
        """Tell whether a signal has asked this run to stop, on this rank or, as far as is known here, on another."""
        return bool(self.asked) or self._last is not None

    @property
    def stops_cell(self) -> bool:
        """Tell whether an interrupt of a notebook's cell has stopped the run: the cell must then not go on."""
        return bool(self.asked) and environment.in_notebook()

    def start(self) -> None:
        """Begin to listen. Every rank takes part. In a notebook, an interrupt stops the run and then the cell."""
        self._key = collectives.new_key("stop")
        self._siblings = collectives.local_processes()
        if threading.current_thread() is not threading.main_thread():
            return
        if environment.in_notebook():
            self._before = {signal.SIGINT: signal.signal(signal.SIGINT, self._interrupt_cell)}
            return
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        # Python writes a signal's number into the pipe at once, even while the main thread waits.
        self._before = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
        _process.listening = self
        threading.Thread(target=self._listen, args=self._pipe, name="signals", daemon=True).start()

    def _listen(self, read: int, write: int) -> None:
        while 0 not in (numbers := os.read(read, 64)):  # `close` writes it
            for number in numbers:
                if number in SIGNALS:
                    self._hear(signal.Signals(number))
        os.close(read)
        os.close(write)

    def _hear(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self.asked == "SIGINT":
            try:
                note_in_time(self._left, "Ctrl-C again", seconds=2.0)
            finally:
                os._exit(130)
        if number == signal.SIGTERM and not all(environment.is_alive(one) for one in self._siblings):
            # When one rank has died, the launcher ends the others: no step can be finished any more.
            try:
                note_in_time(self._failed, "another process of this run has died")
            finally:
                os._exit(143)
        if not self.asked and environment.is_main_process():
            again = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
            print(f"\n{number.name}: the run stops after this step and saves{again}", file=sys.stderr, flush=True)
        self.asked = self.asked or number.name

    def _interrupt_cell(self, number: int, frame: Any) -> None:
        """Have the run of this process stop after its step; a second interrupt comes at once, anywhere."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
        print("the run stops after this step and saves; another interrupt stops it at once", file=sys.stderr)

    def due(self, step: int) -> bool:
        """Tell whether a step is the last one for now. Every rank asks after each step and gets the same answer.

        It needs no collective: a rank that was asked to stop names a step that no rank has finished yet.
        """
        ahead = self._hold_back()
        if collectives.alone():
            return bool(self.asked)
        store = collectives.store()
        if self.asked and self._last is None:
            # No rank can finish the next step without this rank, which writes this before it takes part in that step.
            store.compare_set(self._key, "", str(step + 1 + ahead))
        if self._last is None and store.check([self._key]):
            self._last = int(store.get(self._key))
        return self._last is not None and step >= self._last

    def turns(self, count: int, together: bool) -> Iterator[int]:
        """Yield the turns of an evaluation. Every rank takes part, with the same `count`.

        Args:
            together: ranks need each other in each turn, as under FSDP, so all must make the same number of turns.

        Raises:
            StoppedInEvaluation: a rank was asked to stop. Raised on all ranks: no rank must wait for one that has left.
        """
        if not self._key:  # before the first step
            yield from range(count)
            return
        self._evaluations += 1
        if collectives.alone():
            yield from self._turns_alone(count)
        else:
            yield from self._turns_of_ranks(count, together, f"{self._key}/evaluation/{self._evaluations}")

    def _turns_alone(self, count: int) -> Iterator[int]:
        for turn in range(count):
            self._hold_back()
            if self.asked:
                raise StoppedInEvaluation
            yield turn

    def _turns_of_ranks(self, count: int, together: bool, key: str) -> Iterator[int]:
        """Yield the turns up to the one that the store names under `key`."""
        store = collectives.store()
        for turn in range(count):
            ahead = self._hold_back()
            if self.asked:
                # If together: a turn that no rank can have begun.
                store.compare_set(key, "", str(turn + 1 + ahead) if together else "0")
            if store.check([key]) and turn >= int(store.get(key)):
                raise StoppedInEvaluation
            yield turn
        # All ranks meet here, so that all see the same: either every rank came, or one was asked before.
        if store.add(f"{key}/here", 1) == dist.get_world_size():
            store.compare_set(key, "", _ALL_HERE)
        while not store.check([key]):
            if self.asked:
                store.compare_set(key, "", str(count) if together else "0")
            time.sleep(0.002)
        if store.get(key).decode() != _ALL_HERE:
            raise StoppedInEvaluation

    def _hold_back(self) -> int:
        """Keep the host at most two steps ahead of its device; return how many steps ahead it can be."""
        if self._device.type == "cpu":
            return 0
        event = torch.Event(self._device)
        event.record()
        self._events.append(event)
        if len(self._events) > 2:
            self._events.popleft().synchronize()
        return 2

    def close(self) -> None:
        """Stop listening, and restore the signal handlers from before."""
        if self._pipe is None:
            self._restore()
            return
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._pipe[1], b"\0")
        self._restore()
        self._pipe = None
        _process.listening = None

    def forget(self) -> None:
        """Keep a forked process from writing its signals into its parent's pipe."""
        signal.set_wakeup_fd(-1)
        self._restore()
        self._pipe = None

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


os.register_at_fork(after_in_child=_process.forget)


@contextmanager
def starting_helpers() -> Iterator[None]:
    """Start the processes that load data inside this block; each calls `leave_to_parent` when it begins.

    Terminals, torchrun and schedulers send a stop signal to all processes of a run. It must not end a helper, nor its
    threads that exist before its first line of Python. So helpers are started with the signals blocked.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if hasattr(signal, "sigwaitinfo") else ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def leave_to_parent() -> None:
    """Have a process that loads data ignore signals that ask the run to stop; only its parent ends it.

    Programs that it starts (such as a video decoder) inherit SIGTERM as blocked, and are ended by SIGKILL.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_end_with_parent, name="signals", daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
