"""The shards, made by several processes, and how far they are."""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process

from app.commands.tokenize.shards import Job
from app.data.corpus.token_shards import Listed
from app.errors import UserError
from app.rundir.progress import duration

SECONDS = 5.0  # between two lines of progress, where there is no terminal to draw on


def make_all(job: Job, parts: Sequence[range], workers: int) -> list[Listed]:
    """Make all shards, and show how many there are; return them in their order.

    Args:
        workers: processes; 0: one for each core.

    Raises:
        UserError: one cannot be made; or a process was killed.
    """
    from tqdm import tqdm

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    made: dict[int, Listed | None] = {}
    begun = shown = time.monotonic()
    tokens, draws = 0, sys.stderr.isatty()
    with tqdm(total=len(parts), unit="shard", dynamic_ncols=True, disable=not draws) as bar:
        for number, listed in made_by(job, parts, workers or cores):
            made[number] = listed
            tokens += listed.amount.tokens if listed else 0
            bar.update()
            bar.set_postfix(tokens=f"{tokens:,}", refresh=False)
            now = time.monotonic()
            if not draws and now - shown >= SECONDS:
                shown, left = now, (now - begun) / len(made) * (len(parts) - len(made))
                print(f"shard {len(made)}/{len(parts)}  {tokens:,} tokens  {duration(left)} left", flush=True)
    return [listed for _, listed in sorted(made.items()) if listed is not None]


def made_by(job: Job, parts: Sequence[range], workers: int) -> Iterator[tuple[int, Listed | None]]:
    """Make all shards; yield the number of each when it is there, and what it holds.

    Raises:
        UserError: one cannot be made; or a process was killed.
    """
    if workers == 1 or len(parts) == 1:
        yield from ((number, job.make(number, part)) for number, part in enumerate(parts))
        return
    # Not forked: a process that is forked from one that has used a bucket can use none.
    pool = ProcessPoolExecutor(min(workers, len(parts)), get_context("spawn"), initializer=_begin)
    try:
        numbers = {pool.submit(job.make, number, part): number for number, part in enumerate(parts)}
        for done in as_completed(numbers):
            yield numbers.pop(done), done.result()
    except BrokenProcessPool:
        raise UserError(
            f"--workers {workers}: one of the processes was killed, perhaps for want of memory: run the same command "
            "again, which goes on where it stopped, with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Prepare a process that tokenizes: one thread of it does, and it ends with the process that started it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    started_by = parent_process()
    assert started_by is not None
    threading.Thread(target=_end_with, args=(started_by.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
