"""Work that one rank does for all, values from all ranks, and errors that must end all of them."""

import atexit
import gc
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from app.distributed import accelerate_patches, environment
from app.errors import UserError, mendable

T = TypeVar("T")

_NEVER = timedelta(days=7)


class _Process:
    """What the runs of this process share. There is one object of it, because torch has one default process group."""

    def __init__(self) -> None:
        self.uses: Counter[str] = Counter()
        """How many keys of each kind have been made."""
        self.clean: bool | None = None
        """Whether all went well in the last run; None before its end."""
        self.background: dist.ProcessGroup | None = None
        """The group of threads next to training."""

    def end(self) -> None:
        """Leave the process group at the end of the program, if all went well."""
        # The program is over: another Ctrl-C would only print where Python was.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.clean and dist.is_initialized():
            # Models in reference cycles keep process groups alive, whose threads must not outlive the interpreter.
            gc.collect()
            dist.destroy_process_group()


_process = _Process()


def set_limit(time_limit: timedelta) -> None:
    """Set the time limit of all process groups of training; those of a mesh have torch's default until then."""
    if dist.is_initialized():
        accelerate_patches.set_time_limit(time_limit, without=_process.background)


def store() -> dist.Store:
    """Return the rendezvous store: keys and values that ranks share outside of collectives."""
    return accelerate_patches.store()


def alone() -> bool:
    """Tell whether this process trains alone."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def local_processes() -> list[str]:
    """Name this machine's training processes, for `environment.is_alive`. Every rank takes part, by the store."""
    process = environment.this_process()
    if alone():
        return [process]
    first = rank() - environment.local_rank()
    store().set(f"samestep/process/{rank()}", process)
    return [store().get(f"samestep/process/{first + i}").decode() for i in range(environment.local_world_size())]


def background() -> dist.ProcessGroup | None:
    """Return a process group on CPU for threads next to training. The first call is at the same point on every rank.

    It has no time limit, as ranks wait in it for the slowest one's files. The watchdog watches training that waits for
    those threads.
    """
    if not alone() and _process.background is None:
        _process.background = dist.new_group(backend="gloo", timeout=_NEVER)
    return _process.background


def leave(clean: bool) -> None:
    """Note how a run ended. The process group is destroyed when the program ends, and only if all went well.

    A rank that failed must not destroy it: the others may be in a collective, which would never end.
    """
    if _process.clean is None:
        atexit.register(_process.end)
    _process.clean = clean
    aborts = not alone() and (dist.get_backend() == "gloo" or _process.background is not None)
    environment.end.status = 0 if clean and aborts else None


def from_main(call: Callable[[], T], group: dist.ProcessGroup | None = None, long: bool = False) -> T:
    """Run `call` on the main process and return its result, or raise its error, on every rank.

    Args:
        group: the process group in which the other ranks wait.
        long: `call` may outlast a collective's time limit, so the other ranks first wait on the store. Not for threads.
    """
    if alone():
        return call()
    key = new_key("main") if long else ""
    outcome: list[Any] = [None, None]
    failure: Exception | None = None  # as it is here; the other ranks get one that travels
    if dist.get_rank() == 0:
        try:
            outcome = [call(), None]
        except Exception as error:
            failure, outcome = error, [None, _portable(error)]
        finally:
            if long:
                store().set(key, "done")
    elif long:
        store().wait([key], _NEVER)
    dist.broadcast_object_list(outcome, src=0, group=group)
    try:
        if problem := failure or outcome[1]:
            raise problem
    finally:
        del failure, problem  # else an error and this frame would keep each other alive
    return outcome[0]


def from_each_machine(call: Callable[[], T]) -> dict[int, T]:
    """Run `call` on the first process of each machine; return the results by rank, on every rank.

    The other processes wait without a time limit. An error on one machine is raised on every rank.
    """
    if alone():
        return {0: call()}
    outcome: tuple[Any, Exception | None] | None = None
    if environment.local_rank() == 0:
        try:
            outcome = call(), None
        except Exception as error:
            outcome = None, _portable(error)
    _meet("machines")
    outcome_by_rank = {rank: each for rank, each in enumerate(gather(outcome)) if each is not None}
    for _, problem in outcome_by_rank.values():
        if problem is not None:
            raise problem
    return {rank: value for rank, (value, _) in outcome_by_rank.items()}


def agree(problem: BaseException | None, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return on every rank what went wrong on any: one line for each rank that failed."""
    problems = gather(None if problem is None else in_words(problem), group)
    return [text if alone() else f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]


def everywhere(call: Callable[[], T]) -> T:
    """Run `call` on every rank and return its result; go on only where it has succeeded on all.

    Raises:
        UserError: on every rank, the first one that `call` has raised on any.
    """
    problem, result = None, None
    try:
        result = call()
    except UserError as error:
        problem = error
    if problems := agree(problem):
        raise UserError(problems[0])
    return cast(T, result)


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Collect a small value from every rank, on every rank, in rank order."""
    if alone():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def local_main_first() -> Iterator[None]:
    """Run the block on the first process of each machine, then on its other processes.

    They wait on the store, without a time limit. If the first one fails, they fail at once.
    """
    key = new_key("first")
    if alone():
        yield
        return
    rank, local_rank = dist.get_rank(), environment.local_rank()
    key = f"{key}/{rank - local_rank}"
    if local_rank == 0:
        try:
            yield
        except BaseException as error:
            store().set(key, ("user:" if mendable(error) else "fault:") + in_words(error))
            raise
        store().set(key, "done")
        return
    store().wait([key], _NEVER)
    kind, _, text = store().get(key).decode().partition(":")
    if kind != "done":
        raise UserError(text) if kind == "user" else RuntimeError(f"the first process of this machine failed: {text}")
    yield


def _meet(what: str) -> None:
    """Wait on the store until every rank is here; a collective would have a time limit."""
    key = new_key(what)
    if store().add(f"{key}/here", 1) == dist.get_world_size():
        store().set(key, "all")
    store().wait([key], _NEVER)


def new_key(what: str) -> str:
    """Return a new key of the store. It is the same on every rank, as all ranks make these calls in the same order."""
    _process.uses[what] += 1
    return f"samestep/{what}/{_process.uses[what]}"


def heard_on_main(error: BaseException) -> bool:
    """Tell a rank that fails whether the main process fails with the same message, and so tells the user."""
    if alone():
        return True
    if dist.get_rank() == 0:
        store().set("samestep/error", in_words(error))
        return True
    try:
        store().wait(["samestep/error"], timedelta(seconds=5))
    except dist.DistStoreError:
        return False
    return store().get("samestep/error").decode() == in_words(error)


def failed_before(error: BaseException | None) -> str:
    """Return which rank's error came before this rank's, and ended it; empty if none did. No rank waits for another.

    Every rank calls it once at the end of a run, also without an error.
    """
    key = new_key("failed")
    if alone() or not isinstance(error, Exception):
        return ""
    words = in_words(error)
    try:
        first = store().compare_set(key, "", f"rank {dist.get_rank()}: {words}").decode()
    except RuntimeError:  # the process that holds the store has gone
        return ""
    return "" if first.partition(": ")[2] == words else first


def in_words(error: BaseException) -> str:
    """Return what to tell of an error: the message alone if the user can mend it."""
    told = mendable(error)
    return f"{type(error).__name__}: {error}" if told is None else str(told)


def _portable(error: Exception) -> Exception:
    """Turn an error into one that every rank can unpickle."""
    if told := mendable(error):
        return UserError(str(told))
    return RuntimeError(f"the main process failed: {in_words(error)}")
