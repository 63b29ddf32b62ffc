"""Seconds from the start of an iterator to its first batch: at step 10^6 of a stream, and for datasets' own ways.

Each has a process of its own and an empty cache, where the chunks of the first batch are fetched and decoded.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from app.commands.output import table
from benchmarks.streams import shards

STEP, BATCH, MICRO = 10**6, 64, 16


def ours(path: str, step: int, window: int, cache: str) -> None:
    """Read the first batch from a step on, of a run over many epochs."""
    import datasets  # noqa: F401
    import torch

    from app.data.streams.chunk_cache import ChunkCache
    from app.data.streams.index import index_of
    from app.data.streams.rows import StreamedRows
    from app.data.streams.shards import find_shards
    from app.sampling.batch_plan import BatchPlan
    from app.training.feeding.loader import load

    began = time.perf_counter()
    index = index_of("--data.path", path, find_shards("--data.path", path))
    rows = StreamedRows(index, ChunkCache("--data.path", index, Path(cache), 10**12), window)
    plan = BatchPlan(len(rows), 10**9, BATCH, MICRO)
    plan = plan.ordered(rows.order(plan))
    steps = load(plan, range(step, plan.steps), rows, list, 0, 1, torch.device("cpu"))
    next(iter(steps))
    print(json.dumps(time.perf_counter() - began))


def of_datasets(path: str, way: str, sample: int) -> None:
    """Go to a sample of one epoch by datasets' skip, or by the state that it had saved there."""
    import datasets

    files = sorted(map(str, Path(path).glob("*.parquet")))

    def opened() -> datasets.IterableDataset:
        stream = datasets.load_dataset("parquet", data_files=files, streaming=True, split="train")
        return stream.shuffle(0, buffer_size=2048)

    if way == "skip":
        began = time.perf_counter()
        next(iter(opened().skip(sample)))
    else:
        before = opened()
        for number, _ in enumerate(before):
            if number == sample:
                break
        state = before.state_dict()
        began = time.perf_counter()
        after = opened()
        after.load_state_dict(state)
        if next(iter(after), None) is None:  # rows in the buffer are not in the state
            print(json.dumps(None))
            return
    print(json.dumps(time.perf_counter() - began))


def run(folder: Path, rows: int, rounds: int) -> None:
    """Print a line for each case."""
    path = shards.write_parquet(folder / "parquet", shards.texts(rows), 8)
    cases = {
        f"ours, step {step:,}, window {window}": f"ours({str(path)!r}, {step}, {window}, CACHE)"
        for step in (0, STEP)
        for window in (1, 16)
    }
    cases |= {
        f"datasets, {way}, sample {sample:,}": f"of_datasets({str(path)!r}, {way!r}, {sample})"
        for way in ("skip", "state_dict")
        for sample in (rows // 10, rows * 9 // 10)
    }
    lines = []
    for name, call in cases.items():
        seconds = []
        for number in range(max(rounds // 4, 1)):
            code = call.replace("CACHE", repr(str(folder / f"cache {name} {number}")))
            code = f"from benchmarks.streams.resuming import *; {code}"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            seconds.append(json.loads(done.stdout.splitlines()[-1]))
        told = "none: the rest was in the lost buffer" if None in seconds else f"{min(seconds):.3f}"
        lines.append([name, told])
    print(table(["", "seconds to the first batch"], lines, right=(1,)))
