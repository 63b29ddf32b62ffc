"""A watchdog for ranks that hang: it shows the stacks of every rank and ends it; the launcher may restart the run."""

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from app import storage
from app.distributed import accelerate_patches, collectives, environment


class Watchdog:
    """Ends all ranks when one of them makes no progress for too long."""

    def __init__(
        self,
        seconds: float,
        failed: Callable[[str], None],
        folders: Sequence[Path] = (),
        drafts: Callable[[], Sequence[Path]] = lambda: (),
    ):
        """Prepare to watch; `start` begins.

        Args:
            seconds: to wait for a step, a micro-batch of an evaluation, or a checkpoint; 0: do not watch.
            failed: notes, on the main process, why the run ends.
            folders: in which checkpoints are written.
            drafts: lists the folders in which the finished model is written.
        """
        self.seconds, self.failed, self.folders, self._drafts = seconds, failed, folders, drafts
        self.step = 0
        self._beat = time.monotonic()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._long = self._away = False
        # Blocks read; blocks and bytes, as last seen; how often any rank has moved.
        self._blocks, self._seen, self._heard = 0, (0, 0), 0

    def start(self) -> None:
        """Begin to watch. Every rank takes part."""
        key = collectives.new_key("hang")
        self.beat(self.step)
        if collectives.rank() == 0 and self.folders:
            # Files of an earlier run on more ranks would be mixed with those of this one.
            files = storage.at(self._collectives)
            for record in files.entries() if files.is_folder() else []:
                if record.name.startswith("rank_"):
                    files.delete(record.name)
        if self.seconds:
            # A connection of its own, as another thread may be waiting on the shared one.
            store = None if collectives.alone() else collectives.store().clone()  # type: ignore[attr-defined]  # torch's stub lacks it
            self._thread = threading.Thread(target=self._watch, args=(store, key), name="watchdog", daemon=True)
            self._thread.start()

    @property
    def _collectives(self) -> Path:
        return self.folders[0].parent / "collectives"

    def beat(self, step: int | None = None) -> None:
        """Note progress, and the step that this rank is in."""
        self._beat = time.monotonic()
        self.step = self.step if step is None else step

    def moved(self) -> None:
        """Note that a block of a file has been read. May be called from any thread."""
        self._blocks += 1

    @contextlib.contextmanager
    def long_work(self) -> Iterator[None]:
        """Allow this block, such as saving a checkpoint, any time, as long as something moves.

        Bytes written into the folders and blocks read count as progress. They count on all ranks, as the other ranks
        may wait for this one.
        """
        self._long = True
        try:
            yield
        finally:
            self._long = False
            self.beat()

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Do not watch this block, which has its own time limits and makes no progress that could be seen here."""
        self._away = True
        try:
            yield
        finally:
            self.beat()
            self._away = False

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread is not None:
            # A thread that asks the store while the interpreter ends aborts the process. Without a store it may hang.
            self._thread.join(5)

    def _watch(self, store: dist.Store | None, key: str) -> None:
        every = min(max(self.seconds / 10, 1.0), 10.0)
        try:
            while not self._closed.wait(every):
                if not environment.in_notebook():
                    # For code that never lets another Python thread run: then nothing postpones this end any more.
                    _end_in(self.seconds + 60)
                self._look(store, f"{key}/moved")
                late = not self._away and time.monotonic() - self._beat > self.seconds
                if late and store is not None:
                    store.compare_set(key, "", f"noticed by rank {collectives.rank()} in step {self.step}")
                if late or (store is not None and store.check([key])):
                    who = store.get(key).decode() if store is not None else f"in step {self.step}"
                    self._end(f"no progress for {self.seconds:g} s (--run.timeout), {who}")
                    return
        except RuntimeError:
            # The store is gone with its launcher, on another machine: our own launcher would have ended this process.
            if not self._closed.is_set():
                self._end("the launcher of the first machine has gone")
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _look(self, store: dist.Store | None, key: str) -> None:
        """Count as progress what has moved in a long block, here or on another rank."""
        moved = False
        if self._long:
            seen, self._seen = self._seen, (self._blocks, _bytes_in([*self.folders, *self._drafts()]))
            moved = self._seen != seen
        if store is not None:
            heard, self._heard = self._heard, store.add(key, int(moved))
            moved = self._heard != heard
        if moved:
            self._beat = time.monotonic()

    def _record(self, reason: str) -> None:
        """Write this rank's last collectives to a file; NCCL would do so only after this process has ended."""
        folder = self._collectives
        files = storage.at(folder)
        files.make()
        # A new file: a link with its name is not followed.
        files.put_if_absent(f"rank_{collectives.rank()}", accelerate_patches.last_collectives())
        if collectives.rank() == 0:
            # torchfrtrace reads the record of NCCL only; that of gloo is a plain pickle.
            how = "" if torch.distributed.get_backend() == "gloo" else f": torchfrtrace --prefix rank_ {folder}"
            print(f"the last collectives of each rank are in {folder}{how}", file=sys.stderr, flush=True)

    def _end(self, reason: str) -> None:
        where = f"stacks of rank {collectives.rank()}, step {self.step}"
        if not environment.in_notebook():
            _end_in(30)  # a call of torch below may wait for the GPU and let no other Python thread run
        try:
            print(f"{reason}; {where}:\n{_stacks()}", file=sys.stderr, flush=True)
            if environment.in_notebook():
                return  # the user can interrupt the cell
            note_in_time(self.failed, reason)
            if not collectives.alone() and self.folders:
                note_in_time(self._record, reason)
            time.sleep(3)  # lets the other ranks show their stacks before the launcher ends them
        finally:
            if not environment.in_notebook():
                os._exit(1)


def _end_in(seconds: float) -> None:
    """Have this process show its stacks and end after a time, unless this is called again or cancelled before."""
    with contextlib.suppress(ValueError, OSError, AttributeError):  # standard error is closed
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)


def note_in_time(note: Callable[[str], None], reason: str, seconds: float = 10.0) -> None:
    """Note why a run ends, but do not wait for long: the disk may hang, or the folder belong to another run by now."""

    def attempt() -> None:
        with contextlib.suppress(Exception):
            note(reason)

    thread = threading.Thread(target=attempt, name="note", daemon=True)
    thread.start()
    thread.join(seconds)


def _bytes_in(folders: Sequence[Path]) -> int:
    """Sum the sizes of all files in folders, while some may be created or deleted; of a store, what is on its way."""
    return sum(_bytes_of(storage.at(folder)) for folder in folders)


def _bytes_of(files: storage.Storage) -> int:
    if files.is_remote:  # which is not asked, as it may be away
        return files.staged()
    return sum(entry.size for entry in files.walk(tolerant=True) if entry.kind is storage.Kind.FILE)


def _stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
