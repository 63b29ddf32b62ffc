"""Where the texts come from: a table of this machine, or shards that are read by chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from app.data.config import CorpusData
from app.data.corpus.encode import check_table, columns_of, read_texts
from app.data.loading import open_source
from app.data.streams.chunk_reader import ChunkReader
from app.data.streams.chunks import as_dataset
from app.data.streams.index import Index, index_of
from app.data.streams.shards import Shards, find_shards, is_url
from app.data.tables.files import is_file_name
from app.data.tables.splits import SPLIT_WORDS
from app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

FLAG = "SOURCE"


class Source(Protocol):
    """Rows to tokenize, which other processes can read too."""

    @property
    def fingerprint(self) -> str:
        """Return a hash of what the rows are."""
        ...

    def parts(self, rows: int) -> list[range]:
        """Cut the source into parts of about so many rows, each of which `tables` reads."""
        ...

    def tables(self, part: range) -> "Iterator[tuple[Dataset, range]]":
        """Yield the tables of a part, and which of their rows are in it. Their columns have been checked."""
        ...

    def everything(self) -> range:
        """Return the part that is all of the source."""
        ...

    def texts(self) -> Iterator[str]:
        """Yield all texts, to train a tokenizer on."""
        ...


def open_texts(path: str, split: str, streamed: bool, config: CorpusData) -> Source:
    """Open what SOURCE names.

    Args:
        split: of the source; of a file, which has only one, that is taken.
        streamed: read it by chunks, as URLs always are.

    Raises:
        UserError: there is no such thing, it has no such split, or it lacks a column.
    """
    if streamed or is_url(path):
        if config.columns or config.name:
            raise UserError("--data.columns and --data.name are for tables; what is read by chunks has names itself")
        if split not in SPLIT_WORDS:
            raise UserError(f"--source-split {split}: what is read by chunks has the splits {', '.join(SPLIT_WORDS)}")
        return ChunkSource(path, find_shards(FLAG, path, split), split, config)
    columns = columns_of(config)
    source = open_source(FLAG, [path], config.name, config.columns, config.txt, used=columns)
    only_one = [*source.tables] == ["train"] and is_file_name(path)
    split = "train" if only_one and "[" not in split else split
    source.rows(split, "--source-split")  # for its error
    table = source[split]
    check_table(table, config)
    return TableSource(table, config)


@dataclass(frozen=True)
class TableSource(Source):
    """A table that is mapped into memory."""

    table: "Dataset"
    config: CorpusData

    @property
    def fingerprint(self) -> str:
        return self.table._fingerprint

    def parts(self, rows: int) -> list[range]:
        """See `Source.parts`; a text that lies in several rows is not cut if it ends soon after."""
        borders = [*range(0, len(self.table), rows), len(self.table)]
        if "begins" in self.table.column_names:
            near_ends = [self._begin(border, rows // 8) for border in borders[1:-1]]
            borders = sorted({0, *near_ends, len(self.table)})
        return [range(low, high) for low, high in pairwise(borders)]

    def _begin(self, row: int, most: int) -> int:
        """Return the first row from `row` on with which a text begins, if it is one of the next."""
        begins = self.table.select_columns(["begins"])[row : row + max(most, 1)]["begins"]
        return row + begins.index(True) if True in begins else row

    def tables(self, part: range) -> "Iterator[tuple[Dataset, range]]":
        yield self.table, part

    def everything(self) -> range:
        return range(len(self.table))

    def texts(self) -> Iterator[str]:
        return read_texts(self.table, self.config)


@dataclass(frozen=True)
class ChunkSource(Source):
    """Shards on a disk or in a bucket, of which a chunk at a time is here. Parts are stretches of chunks."""

    path: str
    shards: Shards
    split: str
    config: CorpusData

    def __getstate__(self) -> dict:
        """Leave out what other processes make again: the index is in the cache."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_index", "_reader")}

    @cached_property
    def _index(self) -> Index:
        return index_of(FLAG, self.path, self.shards, self.split)

    @property
    def fingerprint(self) -> str:
        return self._index.fingerprint

    def parts(self, rows: int) -> list[range]:
        starts = np.cumsum(self._index.rows, dtype=np.int64) - self._index.rows
        borders = np.flatnonzero(np.diff(starts // rows)) + 1
        return [range(*ends) for ends in zip([0, *borders.tolist()], [*borders.tolist(), len(starts)], strict=True)]

    def tables(self, part: range) -> "Iterator[tuple[Dataset, range]]":
        for chunk in part:
            table = self._table(chunk)
            check_table(table, self.config)
            yield table, range(len(table))

    def _table(self, chunk: int) -> "Dataset":
        table, name = self._reader.table(chunk), self._reader.name_of(chunk)
        return as_dataset(table, self._index.features, name, self._index.fingerprint, chunk)

    @cached_property
    def _reader(self) -> ChunkReader:
        return ChunkReader(FLAG, self._index)

    def everything(self) -> range:
        return range(len(self._index.rows))

    def texts(self) -> Iterator[str]:
        for chunk in self.everything():
            yield from read_texts(self._table(chunk), self.config)
