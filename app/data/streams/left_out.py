"""Chunks that are read into a table of the cache, which may lack those that are damaged."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from app.data.streams.chunk_reader import BadChunk, ChunkReader
from app.distributed.environment import is_main_process
from app.errors import UserError
from app.storage.drafts import write

if TYPE_CHECKING:
    import pyarrow as pa


def readable(reader: ChunkReader, chunks: Iterable[int], most: int | None) -> "Iterator[pa.Table]":
    """Yield the rows of chunks, of each at most so many.

    Raises:
        BadChunk: one is damaged.
    """
    for chunk in chunks:
        try:
            yield reader.table(chunk).slice(0, most)
        except BadChunk as error:
            raise error.with_advice() from error.__cause__


class LeftOut:
    """The chunks that a table of the cache lacks: a list next to its file."""

    def __init__(self, table: Path, name: str):
        """Look after the list of a table's file; `name` names the table in messages."""
        self._file, self._name = table.with_name(f"{table.name}-left-out.json"), name

    def readable(self, reader: ChunkReader, chunks: Iterable[int], most: int | None) -> "Iterator[pa.Table]":
        """Yield the rows of chunks, of each at most so many, and then list those that are damaged.

        Raises:
            UserError: all are.
        """
        bad: dict[int, BadChunk] = {}
        good = 0
        for chunk in chunks:
            try:
                yield reader.table(chunk).slice(0, most)
                good += 1
            except BadChunk as error:
                bad[chunk] = error
        if not good:
            raise UserError(
                f"{next(iter(bad.values()))}; all that is read of {self._name} is damaged: put good copies of the "
                "shards in their place, or give other data to evaluate on with --data.eval-path"
            )
        write(self._file, json.dumps([*bad]))

    def others(self, reader: ChunkReader, chunks: Iterable[int]) -> list[int]:
        """Return those of some chunks that the table has; tell the user, on the main process, which ones it lacks."""
        bad = json.loads(self._file.read_text()) if self._file.exists() else []
        if bad and is_main_process():
            more = f" and {len(bad) - 1:,} more" if len(bad) > 1 else ""
            told = f"{self._name}: {len(bad):,} damaged chunks are left out (--data.bad skip)"
            print(f"warning: {told}: {reader.name_of(bad[0])}{more}", file=sys.stderr, flush=True)
        return [chunk for chunk in chunks if chunk not in bad]
