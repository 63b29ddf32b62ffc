"""Lines of jsonl: some whole lines each, or of a compressed file, what can be unpacked by itself."""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

from app.config.file_kinds import HEAD
from app.config.text_files import converted_from
from app.data.reading import refuse_other_encodings
from app.data.streams import chunks
from app.data.streams.chunks import Chunk, Format, Part
from app.data.streams.shards import Shard
from app.data.tables.json_files import Learnt, check_letters, may_have_half_letters, record_of, table_of
from app.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features

AT_ONCE = 1 << 20  # bytes
WINDOW = 1 << 31  # bytes that a frame of zstd may refer back to, the most there are: zstd --long=31


class LineChunks(Format):
    """The lines of a data set's jsonl files."""

    def __init__(self, flag: str, path: str, folder: str):
        self._named, self._learnt = f"{flag} {folder}", Learnt()
        self._digest = xxhash.xxh3_64()

    def parts(self, shard: Shard, file: BinaryIO) -> Iterator[Part]:
        file.seek(0)
        pieces = {"": _whole_lines, ".gz": _members, ".zst": _frames}[shard.packed](file)
        line = 1
        for start, size, text in pieces:
            rows = 0
            self._digest.update(text)
            for number, record in _records(text, line):
                try:
                    self._learnt.learn(record, shard.name, number)
                except ValueError as error:
                    raise ValueError(f"line {number} has {error}") from None
                rows += 1
            line += text.count(b"\n")
            if rows:
                yield Part(start, size, rows)

    def digest(self) -> str:
        return self._digest.hexdigest()

    def add(self, later: "LineChunks") -> None:
        self._learnt.add(later._learnt)

    def features(self) -> "Features":
        import datasets

        return datasets.Features(self._learnt.kinds(self._named))

    def tail(self, shard: Shard, file: BinaryIO) -> int:
        return 0

    def table(self, chunk: Chunk, features: "Features") -> "pa.Table":
        import pyarrow as pa

        text = _unpacked(chunk.data, chunk.shard.packed)
        try:
            return table_of([record for _, record in _records(text, 1)], features)
        except (pa.ArrowException, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"it holds something else than when it was indexed: {error}") from error


def _records(text: bytes, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read lines, of which the first one has a number in its file; yield records with theirs. Empty lines have none."""
    if first == 1:
        refuse_other_encodings(text[:HEAD])
        text = text.removeprefix(codecs.BOM_UTF8)
    halves = may_have_half_letters(text)
    for number, line in enumerate(text.split(b"\n"), first):
        if not line.strip():
            continue
        try:
            record = record_of(line.decode("utf-8"), number)
        except UnicodeDecodeError:
            raise ValueError(f"line {number} holds bytes that are not UTF-8; {converted_from('latin1')}") from None
        if halves and may_have_half_letters(line):
            check_letters(record, f"line {number}")
        yield number, record


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
    yield from _packed(file, zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj)


def _packed(file: BinaryIO, begin: Any) -> Iterator[tuple[int, int, bytes]]:
    """Yield the place, the size and the text of what is packed by itself, and holds whole lines."""
    start, at, texts, rest = 0, 0, [], b""
    while rest or (rest := file.read(AT_ONCE)):
        unpacking = begin()
        while True:
            try:
                texts.append(unpacking.decompress(rest))
            except Exception as error:  # zlib's and zstandard's own
                advice = "" if at else ": it is not compressed as its name says, or damaged: correct the ending"
                raise ValueError(f"byte {at}: {error}{advice}") from None
            at += len(rest) - len(unpacking.unused_data)
            rest = unpacking.unused_data
            if unpacking.eof:
                break
            if not (rest := file.read(AT_ONCE)):
                raise ValueError(f"byte {at}: its compressed data end too early: fetch or write it again")
        if at - start >= chunks.LEAST and texts[-1].endswith(b"\n"):
            yield start, at - start, b"".join(texts)
            start, texts = at, []
    if at > start:
        yield start, at - start, b"".join(texts)
