"""Rows that are read one by one by their numbers against whole chunks: what a request for each row costs.

Lance is made for the former. parquet and Arrow's files are read by pyarrow, whole row groups for whatever row.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from app.commands.output import table
from benchmarks.streams import shards
from benchmarks.streams.measuring import Cost, Timer, rate, take_turns

SCATTERED, BATCH = 256, 16


def run(folder: Path, rows: int, rounds: int) -> None:
    """Print rows a second for each format, scattered and by chunks."""
    texts = shards.texts(rows)
    draw = np.random.default_rng(0)
    file = shards.write_parquet(folder / "parquet", texts, 1) / "train-00000.parquet"
    indexed = folder / "indexed.parquet"
    parquet.write_table(
        texts, indexed, row_group_size=shards.GROUP, compression="zstd", write_page_index=True, data_page_size=8 << 10
    )
    arrow = folder / "rows.arrow"
    with pa.ipc.new_file(str(arrow), texts.schema) as writer:
        for batch in texts.to_batches(shards.GROUP):
            writer.write_batch(batch)

    def of_parquet(path: Path) -> Callable[[list[int]], None]:
        def read(numbers: list[int]) -> None:
            with parquet.ParquetFile(path) as opened:
                for number in numbers:
                    group, row = divmod(number, shards.GROUP)
                    opened.read_row_group(group).slice(row, 1).to_pylist()

        return read

    def of_arrow(numbers: list[int]) -> None:
        opened = pa.ipc.open_file(pa.memory_map(str(arrow)))
        for number in numbers:
            batch, row = divmod(number, shards.GROUP)
            opened.get_batch(batch).slice(row, 1).to_pylist()

    readers: dict[str, Callable[[list[int]], None]] = {
        "parquet": of_parquet(file),
        "parquet, small pages with an index": of_parquet(indexed),
        "arrow, mapped": of_arrow,
    }
    whole: dict[str, Callable[[int], None]] = {
        "parquet": lambda group: _rows_of(parquet.ParquetFile(file).read_row_group(group)),
        "arrow, mapped": lambda group: _rows_of(
            pa.Table.from_batches([pa.ipc.open_file(pa.memory_map(str(arrow))).get_batch(group)])
        ),
    }
    try:
        import lance

        lance.write_dataset(texts, str(folder / "lance"), max_rows_per_group=shards.GROUP)
        opened = lance.dataset(str(folder / "lance"))

        def of_lance(numbers: list[int]) -> None:
            for low in range(0, len(numbers), BATCH):
                opened.take(numbers[low : low + BATCH]).to_pylist()

        readers[f"lance {lance.__version__}, {BATCH} at a time"] = of_lance
        whole["lance"] = lambda group: _rows_of(
            opened.to_table(offset=group * shards.GROUP, limit=min(shards.GROUP, rows - group * shards.GROUP))
        )
    except ImportError as error:
        print(f"lance: left out: {error}")
    numbers = draw.choice(rows, min(SCATTERED, rows), replace=False).tolist()
    groups = draw.permutation(-(-rows // shards.GROUP))[:16].tolist()
    contestants = {
        f"scattered: {name}": _once(lambda r=read: r(numbers), len(numbers)) for name, read in readers.items()
    }
    contestants |= {
        f"whole chunks: {name}": _once(lambda r=read: [r(group) for group in groups], len(groups) * shards.GROUP)
        for name, read in whole.items()
    }
    costs = take_turns(contestants, max(rounds // 2, 2))
    lines = [[name, f"{rate(each):,.0f}", f"{rate(each, 'cpu'):,.0f}"] for name, each in costs.items()]
    print(table(["", "rows/s", "rows/s of processor time"], lines, right=(1, 2)))


def _once(work: Callable[[], object], rows: int) -> Callable[[], Cost]:
    def timed() -> Cost:
        with Timer() as timer:
            work()
        return timer.cost(rows)

    return timed


def _rows_of(part: pa.Table) -> None:
    part.to_pylist()
