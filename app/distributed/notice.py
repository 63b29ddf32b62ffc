"""A notice that this run is to end: who gave it, when, and how long is left.

It is a signal, the word of a command that knows of this machine's end (--run.notice), Slurm's time limit, or the notice
of another rank. A thread hears it, also while training computes or waits for another rank. Where the run can leave by
itself, `Preemption` has it do so. Where there is nothing to save yet, or when the time is over, the thread ends it.
"""

import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

from app.distributed import asking, collectives, environment
from app.distributed.watchdog import note_in_time

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_LOOK, _LOOK_CLOSELY = 1.0, 0.1  # seconds between two looks of the thread, before and after a notice
_MARGIN = 2.0  # seconds that saying how a run stands, and ending it, may take
_WAKE = b"\xff"  # has the thread look; no signal has this number


class Work(Enum):
    """What a run is doing, which decides what follows from a notice."""

    PREPARING = "preparing"  # no step is begun, and there is nothing to save
    TRAINING = "training"
    EXPORTING = "exporting"  # all steps are saved, and the finished model is being written


class Reactions(NamedTuple):
    """What a run does where this thread ends it. Each is called in a thread, and does something on the main process."""

    failed: Callable[[str], None]
    """Notes why it has failed."""
    left: Callable[[str], None]
    """Notes that the user has left it."""
    cut_short: Callable[[str, Work], None]
    """Notes that it is to be repeated, and says what of it is saved; called with who gave the notice."""


class _Process:
    """The run of this process that hears signals. There is one object of it, because signals have one handler."""

    def __init__(self) -> None:
        self.listening: Notice | None = None

    def forget(self) -> None:
        """Have a forked process leave its parent's run."""
        if self.listening is not None:
            self.listening.forget()
            self.listening = None


_process = _Process()
os.register_at_fork(after_in_child=_process.forget)


class Notice:
    """Hears that the run is to end. It saves nothing."""

    def __init__(self, grace: float, command: str, reactions: Reactions):
        """Prepare to listen; `start` begins.

        Args:
            grace: seconds in which a run has to have saved; 0: as many as it takes.
            command: tells whether this machine is to end, see `asking.of_machine`; empty: nothing does.
        """
        self.grace = grace
        self.asked = ""
        """Who gave the notice; empty: nobody did."""
        self.over = False
        """Whether the thread is ending this process. What fails from then on fails because other ranks have ended."""
        self.work = Work.PREPARING
        self.saving = 0.0
        """Seconds that the last checkpoint took."""
        self._command, self._reactions = command, reactions
        self._deadline = self._end = float("inf")  # by the monotonic clock: of this notice; of the job, known before it
        self._interrupted = self._settled = False
        self._lock = threading.Lock()
        self._before: dict[int, Any] = {}  # handlers of signals, that are given back
        self._wakeup = -1  # the file that got signals before
        self._pipe: tuple[int, int] | None = None
        self._outer: Notice | None = None
        self._siblings: list[str] = []  # this machine's processes of the run; from `start` on
        # A connection of its own, as the main thread may be waiting on the shared one.
        self._store: dist.Store | None = None
        self._key, self._told = "", False
        self._threads: list[threading.Thread] = []
        self._asking: list[asking.Asking] = []

    @property
    def reserve(self) -> float:
        """Return how many seconds before a known end a run begins to leave."""
        return max(self.grace, 1.5 * self.saving + 2 * _MARGIN)

    @property
    def stops_cell(self) -> bool:
        """Tell whether an interrupt of a notebook's cell has stopped the run: the cell must then not go on."""
        return bool(self.asked) and environment.in_notebook()

    def start(self) -> None:
        """Begin to listen; from here on, a notice ends the run at once, until `begin_steps`. Every rank takes part."""
        self._key = collectives.new_key("notice")
        self._siblings = collectives.local_processes()
        if environment.in_notebook():
            return
        if not collectives.alone():
            self._store = collectives.store().clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        if threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            # Python writes a signal's number into the pipe at once, even while the main thread waits.
            self._before = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
            self._outer, _process.listening = _process.listening, self
        thread = threading.Thread(target=self._listen, args=self._pipe, name="notice", daemon=True)
        self._threads = [thread]
        thread.start()
        if self._command and environment.local_rank() == 0:
            self._asking.append(asking.of_machine(self._command, self.hear))
        if environment.is_main_process() and (squeue := asking.of_slurm(self.ends_in, lambda: self.reserve)):
            self._asking.append(squeue)

    def begin_steps(self) -> None:
        """Have a notice end the run after its step from here on. In a notebook, an interrupt does; then it is heard."""
        self.work = Work.TRAINING
        if environment.in_notebook() and threading.current_thread() is threading.main_thread():
            self._before = {signal.SIGINT: signal.signal(signal.SIGINT, self._interrupt_cell)}

    def _interrupt_cell(self, number: int, frame: Any) -> None:
        """Have the run of this process stop after its step; a second interrupt comes at once, anywhere."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
        print("the run stops after this step and saves; another interrupt stops it at once", file=sys.stderr)

    def hear(self, who: str, left: float | None = None) -> None:
        """Take a notice; the first one counts. May be called from any thread.

        Args:
            who: gave it, or what.
            left: seconds, where they are known; else --run.grace says how many.
        """
        with self._lock:
            if self.asked or self._settled:
                return
            seconds = left or self.grace or float("inf")
            self._deadline = min(time.monotonic() + seconds, self._end)
            self.asked = who
        if environment.is_main_process() and self.work is not Work.PREPARING:
            seconds = max(0.0, self._deadline - time.monotonic())
            within = f" within {seconds:.0f} s" if seconds < float("inf") else ""
            does = "saves and stops" if self.work is Work.TRAINING else "writes its model and ends"
            again = "; Ctrl-C again leaves at once" if who.startswith("SIGINT") else ""
            print(f"\n{who}: the run {does}{within}{again}", file=sys.stderr, flush=True)
        self._wake()

    def ends_in(self, seconds: float) -> None:
        """Take the time of this job's end, which may be far; a later word replaces an earlier one."""
        self._end = time.monotonic() + seconds
        self._wake()

    def leaves_time_for(self, seconds: float) -> bool:
        """Tell whether what takes so long, and saving, can be done before the job ends; where not, that is a notice."""
        if time.monotonic() + seconds + self.reserve < self._end:
            return True
        self._hear_end()
        return False

    def _hear_end(self) -> None:
        self.hear(asking.SLURM, max(self._end - time.monotonic(), 0.1))

    def settle(self) -> None:
        """Let the run end by itself, as nothing is left that takes long."""
        with self._lock:
            self._settled = not self.over
        self.wait_if_over()

    def wait_if_over(self) -> None:
        """Wait for the end of this process, if the thread is ending it."""
        if self.over:
            threading.Event().wait()

    def _wake(self) -> None:
        with suppress(OSError, TypeError):  # closed meanwhile, or full
            os.write(self._pipe[1], _WAKE)  # type: ignore[index]

    def _listen(self, read: int, write: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(read, selectors.EVENT_READ)
            while True:
                numbers = os.read(read, 64) if selector.select(self._pause()) else b""
                if 0 in numbers:  # `close` writes it
                    break
                for number in numbers:
                    if number in SIGNALS:
                        self._take(signal.Signals(number))
                self._look()
        os.close(read)
        os.close(write)

    def _pause(self) -> float | None:
        if self.asked:
            return _LOOK_CLOSELY
        return min(_LOOK, self.grace / 8 or _LOOK) if self._store or self._end < float("inf") else None

    def _take(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._interrupted:
            try:
                note_in_time(self._reactions.left, "Ctrl-C again", seconds=2.0)
            finally:
                os._exit(130)
        self._interrupted |= number == signal.SIGINT
        if number == signal.SIGTERM and not all(environment.is_alive(one) for one in self._siblings):
            # When one rank has died, the launcher ends the others: no step can be finished any more.
            try:
                if self.work is not Work.PREPARING:
                    note_in_time(self._reactions.failed, "another process of this run has died")
            finally:
                os._exit(143)
        self.hear(number.name if collectives.alone() else f"{number.name} on rank {collectives.rank()}")

    def _look(self) -> None:
        """Tell the other ranks, or hear from them; end the run if it is time to."""
        try:
            ended = self._share()
        except RuntimeError:  # the store has gone with its launcher
            self._store, ended = None, False
        if not self.asked and time.monotonic() + self.reserve >= self._end:
            self._hear_end()
        margin = min(_MARGIN, self.grace / 4 or _MARGIN)
        if self.asked and (ended or self.work is Work.PREPARING or time.monotonic() + margin >= self._deadline):
            self._cut_short(margin)

    def _share(self) -> bool:
        """Exchange a notice with the other ranks, by the store; tell whether one of them is ending."""
        store = self._store
        if store is None:
            return False
        if self.asked and not self._told:
            store.compare_set(self._key, "", f"{self._deadline - time.monotonic()} {self.asked}")
            self._told = True
        elif not self._told and store.check([self._key]):
            seconds, _, who = store.get(self._key).decode().partition(" ")
            self._told = True
            self.hear(who, float(seconds))
        return bool(self.asked) and store.check([f"{self._key}/over"])

    def _cut_short(self, seconds: float) -> None:
        """End this process, together with the other ranks; the run is to be repeated.

        Args:
            seconds: until the time is over.
        """
        with self._lock:
            if self._settled:
                return
            self.over = True
        early = self.work is Work.PREPARING  # there is more time than that
        try:
            if early:
                _end_children()
            with suppress(RuntimeError):
                self._meet(2 * _LOOK if early else seconds / 4)
            to_note = max(seconds, self.grace / 2) if early else seconds / 2
            note_in_time(lambda who: self._reactions.cut_short(who, self.work), self.asked, to_note)
            note_in_time(lambda _: sys.stdout.flush(), "", seconds / 8)
            environment.tell_preempted(True)
        finally:
            os._exit(environment.end.status or 0)

    def _meet(self, seconds: float) -> None:
        """Have all ranks end together: one whose peers have gone would fail in its next collective.

        Args:
            seconds: to wait for them. Some may have a look only now and then.
        """
        if self._store is None:
            return
        self._store.set(f"{self._key}/over", "")
        until, here = time.monotonic() + seconds, self._store.add(f"{self._key}/ending", 1)
        while here < dist.get_world_size() and time.monotonic() < until:
            time.sleep(0.01)
            here = self._store.add(f"{self._key}/ending", 0)

    def close(self) -> None:
        """Stop listening, and restore the signal handlers from before."""
        for each in self._asking:
            each.close()
        if self._pipe is None:
            self._restore()
            return
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
            _process.listening = self._outer
        os.write(self._pipe[1], b"\0")
        self._restore()
        self._pipe = None
        for thread in self._threads:
            # A thread that asks the store while the interpreter ends aborts the process.
            thread.join(5)

    def forget(self) -> None:
        """Keep a forked process from writing its signals into its parent's pipe."""
        signal.set_wakeup_fd(-1)
        self._restore()
        self._pipe, self._asking = None, []

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def _end_children() -> None:
    """End the processes that prepare data with this one: some would wait for their parent for ever."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
