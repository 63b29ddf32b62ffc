"""What an index costs when it is opened, for growing numbers of chunks, and what a first batch costs at step 10^6."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil

from app.commands.output import table
from app.data.streams.chunk_cache import ReadByChunks

if TYPE_CHECKING:
    from app.data.streams.shards import Shards

CHUNKS, ROWS, SHARDS = (10**4, 10**5, 10**6), (100, 1000), 1000
BATCH, MICRO, WINDOW = 64, 16, 16
SAMPLE = 10**9


def write_index(chunks: int, rows: int) -> "Shards":
    """Put an index that is made by hand where a run finds it; return its shards."""
    import datasets

    from app.data.streams.index import Index, cached_at, to_bytes
    from app.data.streams.shards import Shard, Shards

    each, size = chunks // SHARDS if chunks >= SHARDS else chunks, 8 << 20
    count = chunks // each
    files = tuple(Shard(f"train-{n:05}.parquet", each * size + 100, "tag") for n in range(count))
    shards = Shards("/nowhere/data", files)
    numbers = np.arange(chunks)
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.Value("string")})
    index = Index(
        shards,
        (100,) * count,
        ("digest",) * count,
        (numbers // each).astype(np.int32),
        numbers % each * size + 4,
        np.full(chunks, size, np.int64),
        np.full(chunks, rows, np.int32),
        features,
    )
    file = cached_at(shards)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(to_bytes(index))
    return shards


def opened(chunks: int, rows: int) -> None:
    """Print the seconds and the memory of opening an index, and of locating the batch at sample 10^9."""
    import datasets  # noqa: F401
    import pyarrow as pa

    import app.data.streams.index as indexes
    from app.data.streams.rows import StreamedRows
    from app.sampling.batch_plan import BatchPlan
    from app.training.feeding import loader  # noqa: F401

    shards = write_index(1, 1)  # what is loaded or allocated once only
    indexes.index_of("--data.path", "", shards)
    shards = write_index(chunks, rows)
    pa.default_memory_pool().release_unused()
    memory = psutil.Process().memory_info().rss
    began = time.perf_counter()
    index = indexes.index_of("--data.path", "", shards)
    took = time.perf_counter() - began
    read = StreamedRows(index, cast(Any, _Roomy()), WINDOW)  # no chunk is read
    plan = BatchPlan(len(read), 10**12, BATCH, MICRO)
    plan = plan.ordered(read.order(plan))
    first = time.perf_counter()
    plan.coming(plan.step(SAMPLE // BATCH, 0, 1), SAMPLE // BATCH, 0, 1)
    located = time.perf_counter() - first
    began = time.perf_counter()
    _ = plan.fingerprint, read.fingerprint
    hashed = time.perf_counter() - began
    again = time.perf_counter()
    for index in range(SAMPLE // BATCH, SAMPLE // BATCH + 100):
        plan.coming(plan.step(index, 0, 1), index, 0, 1)
    next_ones = (time.perf_counter() - again) / 100
    more = psutil.Process().memory_info().rss - memory
    print(json.dumps([took, located, hashed, next_ones, more / 1e6]))


class _Roomy:
    def read_by(self, window: int, sort_over: int) -> ReadByChunks:
        """Say that there is room for anything."""
        return ReadByChunks("", cast(Any, None), window, sort_over, 1 << 60)


def run(folder: Path, rows: int, rounds: int) -> None:
    """Print a line for each number of chunks and of rows in them."""
    lines = []
    for chunks in CHUNKS:
        for each in ROWS:
            code = f"from benchmarks.streams.starting import opened; opened({chunks}, {each})"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            *seconds, more = json.loads(done.stdout.splitlines()[-1])
            lines.append([f"{chunks:,}", f"{chunks * each:,}", *(f"{1000 * s:,.1f}" for s in seconds), f"{more:.1f}"])
    head = ["chunks", "rows", "open, ms", "batch at sample 10^9, ms", "fingerprints, ms", "next batch, ms", "MB more"]
    print(table(head, lines, right=tuple(range(7))))
