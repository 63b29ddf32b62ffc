"""Row groups of parquet: ranges of bytes that the list at the end of the file names."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

from app.data.streams.chunks import Chunk, Format, Part
from app.data.streams.shards import Shard
from app.data.tables.parquet_files import features_of, with_features, without_end

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features

MAGIC = b"PAR1"
BEHIND = 8  # bytes behind the list of row groups: its length, and MAGIC


class ParquetChunks(Format):
    """The row groups of a data set's parquet files."""

    def __init__(self, flag: str, path: str, folder: str):
        self._flag, self._path, self._folder = flag, path, folder
        self._schemas: dict[str, pa.Schema] = {}
        self._digest = xxhash.xxh3_64()

    def parts(self, shard: Shard, file: BinaryIO) -> Iterator[Part]:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(pa.PythonFile(file, "r")) as opened:
                metadata = opened.metadata
                self._schemas[f"{self._folder}/{shard.name}"] = opened.schema_arrow
        except pa.ArrowException as error:
            raise ValueError(without_end(error)) from error
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            columns = [group.column(i) for i in range(group.num_columns)]
            start = min(_start_of(column) for column in columns)
            end = max(_start_of(column) + column.total_compressed_size for column in columns)
            if group.num_rows:
                yield Part(start, end - start, group.num_rows)

    def digest(self) -> str:
        return self._digest.hexdigest()

    def add(self, later: "ParquetChunks") -> None:
        self._schemas |= later._schemas

    def features(self) -> "Features":
        return features_of(self._flag, self._path, self._schemas.items())

    def tail(self, shard: Shard, file: BinaryIO) -> int:
        file.seek(shard.size - BEHIND)
        length = int.from_bytes(file.read(4), "little") + BEHIND
        file.seek(shard.size - length)
        self._digest.update(file.read(length))  # with the sizes and, as most programs write, the extremes of columns
        return length

    def table(self, chunk: Chunk, features: "Features") -> "pa.Table":
        import pyarrow as pa
        from pyarrow import parquet

        try:
            # The list names bytes of the shard, wherever it is read from itself.
            metadata = parquet.read_metadata(pa.BufferReader(MAGIC + chunk.tail))
            group = _group_of(metadata, chunk.part.start)
            file = pa.PythonFile(_Gapped(chunk), "r")
            with parquet.ParquetFile(file, metadata=metadata, page_checksum_verification=True) as opened:
                return with_features(opened.read_row_group(group), features)
        except pa.ArrowException as error:
            raise ValueError(str(error)) from error


def _start_of(column: Any) -> int:
    """Return the first byte of a column's part of a row group."""
    if column.has_dictionary_page and column.dictionary_page_offset:
        return min(column.dictionary_page_offset, column.data_page_offset)
    return column.data_page_offset


def _group_of(metadata: Any, start: int) -> int:
    """Return the number of the row group that begins at a byte; groups without rows are no chunks."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if group.num_rows and min(_start_of(group.column(i)) for i in range(group.num_columns)) == start:
            return number
    raise ValueError(f"it has no row group at byte {start}, where the index has one")


class _Gapped:
    """A shard as a file, of which one chunk is here, and nothing before and behind it."""

    closed = False

    def __init__(self, chunk: Chunk):
        self._chunk, self._at = chunk, 0

    def size(self) -> int:
        return self._chunk.shard.size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.size())[whence]
        return self._at

    def read(self, length: int = -1) -> bytes:
        start, end = self._at, self.size() if length < 0 else min(self._at + length, self.size())
        first, data = self._chunk.part.start, self._chunk.data
        if not first <= start <= first + len(data):
            raise ValueError(f"bytes {start} to {end} lie outside the chunk")
        self._at = end
        # Of files of some old programs, Arrow reads a little more than their pages.
        return data[start - first : end - first].ljust(end - start, b"\0")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        pass
