"""Agreement between ranks: what one does for all, and how its failure becomes everybody's."""

import atexit
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from app.distributed import accelerate_patches, environment
from app.errors import UserError, mendable

T = TypeVar("T")

_NEVER = timedelta(days=7)

_uses: Counter[str] = Counter()
_clean: bool | None = None
_background: dist.ProcessGroup | None = None


def set_limit(time_limit: timedelta) -> None:
    """Give all process groups of training a time limit; those of a mesh of processes have torch's own until then."""
    if dist.is_initialized():
        accelerate_patches.set_time_limit(time_limit, without=_background)


def store() -> dist.Store:
    """Return the rendezvous store: keys and values between ranks, outside every collective."""
    return accelerate_patches.store()


def alone() -> bool:
    """Tell whether this process trains by itself."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def local_processes() -> list[str]:
    """Name this machine's training processes, for `process.is_alive`. Every rank takes part, outside collectives."""
    own = environment.this_process()
    if alone():
        return [own]
    first = rank() - int(os.environ.get("LOCAL_RANK", "0"))
    store().set(f"samestep/process/{rank()}", own)
    return [store().get(f"samestep/process/{first + i}").decode() for i in range(environment.local_world_size())]


def background() -> dist.ProcessGroup | None:
    """Return the process group of threads beside training, on CPU; every rank asks for it, first, at the same point.

    It has no time limit: ranks wait in it for the slowest one's files. The watchdog looks after whoever waits for them.
    """
    global _background
    if not alone() and _background is None:
        _background = dist.new_group(backend="gloo", timeout=_NEVER)
    return _background


def leave(clean: bool) -> None:
    """Note how a run ended; the process group is given up when the program ends, and only where all went well.

    A rank that fails must not: the others may be in a collective that never ends.
    """
    global _clean
    if _clean is None:
        atexit.register(_end)
    _clean = clean
    aborts = not alone() and (dist.get_backend() == "gloo" or _background is not None)
    environment.leave_with = 0 if clean and aborts else None


def _end() -> None:
    if _clean and dist.is_initialized():
        # Models in reference cycles hold on to process groups, whose threads should not outlive the interpreter.
        gc.collect()
        dist.destroy_process_group()


def from_main(call: Callable[[], T], group: dist.ProcessGroup | None = None, long: bool = False) -> T:
    """Run `call` on the main process and return its result on every rank. Its error is raised on every rank.

    Args:
        group: in whose collective the others wait.
        long: they wait on the store first, for as long as it takes: a collective has a time limit. Not for threads.
    """
    if alone():
        return call()
    key = _next("main") if long else ""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [call(), None]
        except Exception as error:
            outcome = [None, _portable(error)]
            raise
        finally:
            if long:
                store().set(key, "done")
            if outcome[1] is not None:
                dist.broadcast_object_list(outcome, src=0, group=group)
    elif long:
        store().wait([key], _NEVER)
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def from_each_machine(call: Callable[[], T]) -> dict[int, T]:
    """Run `call` on the first process of each machine; return results by rank, on every rank.

    The others wait for it as long as it takes. An error of one is raised on every rank.
    """
    if alone():
        return {0: call()}
    outcome: tuple[Any, Exception | None] | None = None
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        try:
            outcome = call(), None
        except Exception as error:
            outcome = None, _portable(error)
    _meet("machines")
    found = {rank: each for rank, each in enumerate(gather(outcome)) if each is not None}
    for _, error in found.values():
        if error is not None:
            raise error
    return {rank: value for rank, (value, _) in found.items()}


def agree(problem: BaseException | None, group: dist.ProcessGroup | None = None) -> list[str]:
    """Tell every rank what went wrong on any: one line for each failing rank, none where all is well."""
    problems = gather(None if problem is None else _in_words(problem), group)
    return [text if alone() else f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Collect a small value from every rank, on every rank, in rank order."""
    if alone():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def local_main_first() -> Iterator[None]:
    """Let the first process of each machine run the block while the others wait, then the others.

    They wait on the store, for as long as it takes; where the first one fails, they fail at once.
    """
    key = _next("first")
    if alone():
        yield
        return
    rank, local_rank = dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0"))
    key = f"{key}/{rank - local_rank}"
    if local_rank == 0:
        try:
            yield
        except BaseException as error:
            store().set(key, ("user:" if mendable(error) else "fault:") + _in_words(error))
            raise
        store().set(key, "done")
        return
    store().wait([key], _NEVER)
    kind, _, text = store().get(key).decode().partition(":")
    if kind != "done":
        raise UserError(text) if kind == "user" else RuntimeError(f"the first process of this machine failed: {text}")
    yield


def _meet(what: str) -> None:
    """Wait until every rank has come, on the store: a collective has a time limit."""
    key = _next(what)
    if store().add(f"{key}/here", 1) == dist.get_world_size():
        store().set(key, "all")
    store().wait([key], _NEVER)


def _next(what: str) -> str:
    """Name a key of the store that was not used before: the same on every rank, as all do the same in their order."""
    _uses[what] += 1
    return f"samestep/{what}/{_uses[what]}"


def heard_on_main(error: BaseException) -> bool:
    """Tell a rank that fails whether the main process fails with the same words, and so has told the user."""
    if alone():
        return True
    if dist.get_rank() == 0:
        store().set("samestep/error", _in_words(error))
        return True
    try:
        store().wait(["samestep/error"], timedelta(seconds=5))
    except dist.DistStoreError:
        return False
    return store().get("samestep/error").decode() == _in_words(error)


def _in_words(error: BaseException) -> str:
    told = mendable(error)
    return f"{type(error).__name__}: {error}" if told is None else str(told)


def _portable(error: Exception) -> Exception:
    """Make an error that every rank can unpickle."""
    if told := mendable(error):
        return UserError(str(told))
    return RuntimeError(f"the main process failed: {_in_words(error)}")
