"""Requests and bytes that a run makes for its samples, by window and by number of machines, counted at the storage."""

import shutil
from pathlib import Path

from app.commands.output import table
from app.data.streams.chunk_cache import ChunkCache
from app.data.streams.index import Index, index_of
from app.data.streams.rows import StreamedRows
from app.data.streams.shards import find_shards
from app.sampling.batch_plan import BatchPlan
from app.storage.local import LocalStorage
from benchmarks.streams import shards

WINDOWS, MACHINES, BATCH, MICRO, EPOCHS = (1, 4, 16), (1, 2), 64, 8, 1


class Counted:
    """Counts what is read of shards."""

    def __init__(self) -> None:
        self.requests = self.bytes = 0
        self._read = LocalStorage.read

    def __enter__(self) -> "Counted":
        counted, read = self, self._read

        def counting(storage, name, *arguments, **named):
            data = read(storage, name, *arguments, **named)
            if name.endswith(".parquet"):
                counted.requests += 1
                counted.bytes += len(data)
            return data

        LocalStorage.read = counting  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        LocalStorage.read = self._read  # type: ignore[method-assign]


def go_through(index: Index, folder: Path, window: int, machines: int, share: float) -> tuple[int, int, float, int]:
    """Read a run on some machines, each with a cache of its own.

    Args:
        share: what each cache holds, of all decoded data.

    Returns:
        Requests, bytes read, bytes of the chunks that the rows used are of, by rows, and samples.
    """
    requests = read = samples = 0
    used = 0.0
    limit = int(share * float((index.size * index.growth).sum()))
    for machine in range(machines):
        shutil.rmtree(folder, ignore_errors=True)
        cache = ChunkCache("--data.path", index, folder, limit)
        rows = StreamedRows(index, cache, window)
        plan = BatchPlan(len(rows), round(EPOCHS * len(rows)), BATCH, MICRO)
        plan = plan.ordered(rows.order(plan))
        with Counted() as counted:
            for index in range(plan.steps):
                step = plan.step(index, machine, machines)
                rows.prepare(plan.coming(step, index, machine, machines))
                for turn in step.turns:
                    if not turn.idle:
                        rows.__getitems__(turn.ids.tolist())
                        chunks, _ = rows.places(turn.ids)
                        used += float((index.size[chunks] / index.rows[chunks]).sum())
                        samples += len(turn.ids)
            cache.close()
            cache._ahead.shutdown(wait=True)
        requests, read = requests + counted.requests, read + counted.bytes
    return requests, read, used, samples


def run(folder: Path, rows: int, rounds: int) -> None:
    """Print a line for each window and number of machines."""
    path = str(shards.write_parquet(folder / "parquet", shards.texts(rows), 8, 128))
    index = index_of("--data.path", path, find_shards("--data.path", path))
    lines = []
    for share in (4.0, 0.0):
        for window in WINDOWS:
            for machines in MACHINES:
                lanes = BATCH // MICRO
                # The check takes all lanes to be on this one machine.
                holds = share or min(2.0, 1.25 * (2 * lanes * window + 3) / len(index.rows))
                requests, read, used, samples = go_through(index, folder / "cache", window, machines, holds)
                numbers = [f"{requests / samples:.5f}", f"{read / used:.3f}"]
                lines.append([str(window), str(machines), f"{holds:.2f}", *numbers])
    head = ["window", "machines", "a cache holds", "requests a sample", "bytes read a byte used"]
    print(f"{len(index.rows)} chunks of 128 rows, one epoch, {BATCH // MICRO} lanes")
    print(table(head, lines, right=tuple(range(5))))
