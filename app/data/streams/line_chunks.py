"""Lines of jsonl: some whole lines each, or of a compressed file, what can be unpacked by itself."""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

from app.config.text_files import HEAD, converted_from
from app.data.reading import refuse_other_encodings
from app.data.streams import chunks
from app.data.streams.chunks import Chunk, Format, Part
from app.data.streams.shards import Shard
from app.data.tables.json_files import Kind, add_kinds, learn_kinds, table_of
from app.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features

AT_ONCE = 1 << 20  # bytes


class LineChunks(Format):
    """The lines of a data set's jsonl files."""

    def __init__(self, flag: str, path: str):
        """Read shards of `path`, which `flag` has given."""
        self._kinds: dict[str, Kind] = {}
        self._digest = xxhash.xxh3_64()

    def parts(self, shard: Shard, file: BinaryIO) -> Iterator[Part]:
        file.seek(0)
        pieces = {"": _whole_lines, ".gz": _members, ".zst": _frames}[shard.packed](file)
        line = 1
        for start, size, text in pieces:
            records = _records(text, line)
            self._digest.update(text)
            for record in records:
                learn_kinds(self._kinds, record)
            line += text.count(b"\n")
            if records:
                yield Part(start, size, len(records))

    def digest(self) -> str:
        return self._digest.hexdigest()

    def add(self, later: "LineChunks") -> None:
        add_kinds(self._kinds, later._kinds)

    def features(self) -> "Features":
        import datasets

        return datasets.Features(self._kinds)

    def tail(self, shard: Shard, file: BinaryIO) -> int:
        return 0

    def table(self, chunk: Chunk, features: "Features") -> "pa.Table":
        import pyarrow as pa

        text = _unpacked(chunk.data, chunk.shard.packed)
        try:
            return table_of(_records(text, 1), features)
        except (pa.ArrowException, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"it holds something else than when it was indexed: {error}") from error


def _records(text: bytes, first: int) -> list[dict[str, Any]]:
    """Read lines, of which the first one has a number in its file; empty ones are none."""
    if first == 1:
        refuse_other_encodings(text[:HEAD])
        text = text.removeprefix(codecs.BOM_UTF8)
    records = []
    for number, line in enumerate(text.split(b"\n"), first):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise ValueError(f"line {number} holds bytes that are not UTF-8; {converted_from('latin1')}") from None
        except ValueError as error:
            raise ValueError(f"line {number}: {error}: write a whole record in each line") from None
        if not isinstance(record, dict):
            raise ValueError(f'line {number} is {record!r:.60}: give a record, such as {{"text": ..., "label": ...}}')
        records.append(record)
    return records


def _unpacked(data: bytes, packed: str) -> bytes:
    if packed == ".gz":
        return gzip.decompress(data)
    if packed == ".zst":
        return b"".join(text for _, _, text in _frames(io.BytesIO(data)))
    return data


def _whole_lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Cut a text behind the first end of a line that makes a chunk large enough."""
    start = 0
    while data := file.read(chunks.LEAST):
        data += file.readline()
        yield start, len(data), data
        start += len(data)


def _members(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Unpack a gzip file member by member; most have one. Small ones come together."""
    yield from _packed(file, lambda: zlib.decompressobj(wbits=31))


def _frames(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Unpack a zstd file frame by frame; most have one. Small ones come together."""
    try:
        import zstandard
    except ImportError:
        raise UserError("what is packed by zstd takes a further package: pip install 'samestep[streams]'") from None
    yield from _packed(file, zstandard.ZstdDecompressor().decompressobj)


def _packed(file: BinaryIO, begin: Any) -> Iterator[tuple[int, int, bytes]]:
    """Yield the place, the size and the text of what is packed by itself, and holds whole lines."""
    start, at, texts, rest = 0, 0, [], b""
    while rest or (rest := file.read(AT_ONCE)):
        unpacking = begin()
        while True:
            try:
                texts.append(unpacking.decompress(rest))
            except Exception as error:  # zlib's and zstandard's own
                raise ValueError(f"byte {at}: {error}") from None
            at += len(rest) - len(unpacking.unused_data)
            rest = unpacking.unused_data
            if unpacking.eof:
                break
            if not (rest := file.read(AT_ONCE)):
                raise ValueError(f"byte {at}: its compressed data end too early")
        if at - start >= chunks.LEAST and texts[-1].endswith(b"\n"):
            yield start, at - start, b"".join(texts)
            start, texts = at, []
    if at > start:
        yield start, at - start, b"".join(texts)
