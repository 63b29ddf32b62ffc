"""Index data that are streamed: list the chunks of their shards once, so that runs begin at once.

    python -m app index data/shards
    python -m app index s3://bucket/shards --split validation
    python -m app index data/shards --check

Shards are parquet, jsonl (also .gz and .zst), or tar in the layout of WebDataset: in a folder, behind a pattern such as
'data/*.parquet', or at a URL. The index is written next to them, where runs on other machines find it too; where
nothing can be written, it is kept in the cache of this machine. It is made anew when a shard has changed.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from app.commands.output import size
from app.errors import printable

if TYPE_CHECKING:
    from app.data.streams.index import Index
    from app.data.streams.shards import Survey

FLAG = "index"  # names the data in errors
AT_ONCE = 1000  # chunks to check before the next ones are begun


@dataclass
class Options:
    """Which data to index."""

    path: Annotated[str, tyro.conf.Positional]
    """A folder of shards, a shard, or a pattern in quotes; also a URL of s3, gs, az, hf or https."""
    split: Literal["train", "validation", "test"] = "train"
    """Which shards, by the words in their names. Those without such a word are of train."""
    check: bool = False
    """Read every chunk once, and name each one that is damaged."""


def main(options: Options) -> int:
    """Make an index, print what it says, and return the exit status: 1 if a chunk is damaged.

    Raises:
        UserError: there are no shards, or one cannot be read.
    """
    from app.data.streams.index import index_of
    from app.data.streams.shards import survey

    begun = time.monotonic()
    surveyed = survey(FLAG, options.path)
    index = index_of(FLAG, options.path, surveyed.of(options.split), options.split)
    seconds = time.monotonic() - begun
    for name, text in [
        *_described(index, surveyed),
        ("took", f"{seconds:.1f} s"),
        ("index", _kept(index, options.split)),
    ]:
        print(printable(f"{name:<9}{text}"))
    if not options.check:
        return 0
    damaged = 0
    for message in _damaged(index):
        damaged += 1
        print(printable(message), flush=True)
    print(f"{'check':<9}{damaged} of {len(index.rows):,} chunks are damaged")
    return 1 if damaged else 0


def _described(index: "Index", surveyed: "Survey") -> Iterator[tuple[str, str]]:
    chunks, rows, stored = len(index.rows), int(index.rows.sum(dtype="int64")), int(index.size.sum())
    decoded = stored * index.growth
    yield "shards", f"{len(index.shards.files):,} of {index.shards.format}"
    yield "files" if surveyed.files else "splits", surveyed.described()
    if surveyed.unread:
        yield "unread", surveyed.described_unread()
    yield "chunks", f"{chunks:,} of {index.rows.min():,} to {index.rows.max():,} rows"
    yield "rows", f"{rows:,}"
    yield "bytes", f"{size(stored)}; decoded about {size(decoded)}, the largest chunk {size(_largest(index))}"
    yield "a row", f"{size(stored / rows)}; decoded about {size(decoded / rows)}"
    yield "columns", ", ".join(f"{name} ({_kind_of(feature)})" for name, feature in index.features.items())


def _largest(index: "Index") -> float:
    return int(index.size.max()) * index.growth


def _kind_of(feature: Any) -> str:
    """Return what a column holds, in a word where there is one."""
    return getattr(feature, "dtype", None) or str(feature)


def _kept(index: "Index", split: str) -> str:
    """Write the index next to its shards, and say where it lies."""
    from app.config.text_files import why
    from app.data.streams.index import cached_at, put_beside

    try:
        return f"{index.shards.folder}/{put_beside(index, split)}"
    except OSError as error:
        return f"{cached_at(index.shards)}, for this machine: next to the data nothing can be written ({why(error)})"


def _damaged(index: "Index") -> Iterator[str]:
    """Read all chunks; yield a message for each one that is damaged."""
    from app.data.streams.chunk_reader import BadChunk, ChunkReader
    from app.data.streams.index import THREADS

    reader = ChunkReader(FLAG, index)

    def look(chunk: int) -> str:
        try:
            reader.table(chunk)
        except BadChunk as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(THREADS) as pool:
        for first in range(0, len(index.rows), AT_ONCE):
            yield from filter(None, pool.map(look, range(first, min(first + AT_ONCE, len(index.rows)))))
