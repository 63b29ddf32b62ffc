"""Reading rows without training: ours through the cache, datasets' streaming, WebDataset and LitData.

All give one row after another, shuffled, in one process. Ours brings chunks in threads, which count by processor time.
"""

import contextlib
import io
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from app.commands.output import table
from app.data.streams.chunk_cache import ChunkCache
from app.data.streams.index import index_of
from app.data.streams.rows import StreamedRows
from app.data.streams.shards import find_shards
from app.sampling.batch_plan import BatchPlan
from benchmarks.streams import shards, store
from benchmarks.streams.measuring import Cost, Timer, rate, take_turns

BUFFER, BATCH, MICRO, WINDOW = 2048, 64, 16, 4
"""Rows that the others shuffle at a time; ours: lanes x window x rows of a chunk."""

Reader = Callable[[], Iterator[object]]


def ours(path: str, folder: Path, cold: bool) -> Reader:
    """Read by chunks through a cache in `folder`, as a run does; cold: the cache is emptied before."""

    def read() -> Iterator[object]:
        if cold:
            shutil.rmtree(folder, ignore_errors=True)
        index = index_of("--data.path", path, find_shards("--data.path", path))
        cache = ChunkCache("--data.path", index, folder, 10**12)
        rows = StreamedRows(index, cache, WINDOW)
        plan = BatchPlan(len(rows), len(rows), BATCH, MICRO)
        plan = plan.ordered(rows.order(plan))
        try:
            for index in range(plan.steps):
                step = plan.step(index, 0, 1)
                rows.prepare(plan.coming(step, index, 0, 1))
                for turn in step.turns:
                    yield from rows.__getitems__(turn.ids.tolist())
        finally:
            cache.close()

    return read


def of_datasets(files: list[str], **options: object) -> Reader:
    """Read parquet files by the streaming of datasets."""

    def read() -> Iterator[object]:
        import datasets

        stream = datasets.load_dataset("parquet", data_files=files, streaming=True, split="train", **options)
        return iter(stream.shuffle(0, buffer_size=BUFFER))

    return read


def of_webdataset(urls: list[str]) -> Reader:
    """Read tar files by WebDataset, and decode what is in them."""

    def read() -> Iterator[object]:
        import webdataset

        return iter(webdataset.WebDataset(urls, shardshuffle=len(urls), seed=0).shuffle(BUFFER).decode())

    return read


def of_litdata(folder: Path) -> Reader:
    """Read chunks of LitData."""

    def read() -> Iterator[object]:
        import litdata

        return iter(litdata.StreamingDataset(str(folder), shuffle=True, seed=0))

    return read


def litdata_chunks(folder: Path, rows: pa.Table) -> Path:
    """Write rows as LitData's optimize does, in this process."""
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_size=shards.GROUP)
    for number, row in enumerate(rows.to_pylist()):
        writer[number] = row
    writer.done()
    writer.merge()
    return folder


def turn(read: Reader, most: int) -> Cost:
    """Read some rows."""
    with Timer() as timer:
        count = sum(1 for _ in itertools.islice(read(), most))
    return timer.cost(count)


def measure(readers: dict[str, Reader], rounds: int, most: int) -> list[list[str]]:
    """Return a line for each that works."""
    works = {}
    for name, read in readers.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                turn(read, 100)
            works[name] = lambda read=read: turn(read, most)
        except Exception as error:
            print(f"{name}: left out: {type(error).__name__}: {' '.join(str(error).split()):.200}")
    costs = take_turns(works, rounds)
    return [[name, f"{rate(each):,.0f}", f"{rate(each, 'cpu'):,.0f}"] for name, each in costs.items()]


def run(folder: Path, rows: int, rounds: int) -> None:
    """Print rows a second from a disk, and from a store over http."""
    texts = shards.texts(rows)
    parquet, tar = shards.write_parquet(folder / "parquet", texts, 8), shards.write_tar(folder / "tar", texts, 8)
    files = {each: sorted(map(str, each.iterdir())) for each in (parquet, tar)}
    readers = {
        "ours, parquet, cold": ours(str(parquet), folder / "cold", True),
        "ours, parquet, warm": ours(str(parquet), folder / "warm", False),
        "ours, tar, cold": ours(str(tar), folder / "cold-tar", True),
        "ours, tar, warm": ours(str(tar), folder / "warm-tar", False),
        "datasets, parquet": of_datasets(files[parquet]),
        "webdataset, tar": of_webdataset(files[tar]),
    }
    try:
        readers["litdata"] = of_litdata(litdata_chunks(folder / "litdata", texts))
    except ImportError as error:
        print(f"litdata: left out: {error}")
    for name in ("ours, parquet, warm", "ours, tar, warm"):
        turn(readers[name], rows)
    head = ["reader", "rows/s", "rows/s of processor time"]
    print(f"from a disk, {rows:,} rows, {shards.bytes_of(parquet) / 1e6:.1f} MB of parquet, {rounds} rounds")
    print(table(head, measure(readers, rounds, rows), right=(1, 2)))
    with store.running(folder / "moto.log") as place:
        for each in (parquet, tar):
            store.upload(each, each.name)
        headers = {"Authorization": store.SIGNED}
        urls = {each: [f"{place}/{each.name}/{Path(file).name}" for file in files[each]] for each in (parquet, tar)}
        remote = {
            "ours, parquet, cold": ours(f"s3://{store.BUCKET}/parquet", folder / "cold-s3", True),
            "ours, tar, cold": ours(f"s3://{store.BUCKET}/tar", folder / "cold-s3-tar", True),
            "datasets, parquet": of_datasets(
                urls[parquet], storage_options={"http": {"client_kwargs": {"headers": headers}}}
            ),
            "webdataset, tar": of_webdataset(
                [f"pipe:curl -s -f -H 'Authorization: {store.SIGNED}' {url}" for url in urls[tar]]
            ),
        }
        print("from moto over http, which is slow itself: 2 rounds")
        print(table(head, measure(remote, 2, rows), right=(1, 2)))
