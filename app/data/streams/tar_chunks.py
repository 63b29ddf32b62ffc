"""Samples of tar files in the layout of WebDataset: files behind each other that share the name before a dot.

Left out is what WebDataset leaves out: folders, names such as __meta__, and what has no name before a dot, which
systems leave there (._0001.jpg, .DS_Store). Other files without a dot may be samples whose ending is missing, so they
are refused, but for those that are called README and the like.
"""

import io
import json
import re
import tarfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import xxhash

from app.config.file_kinds import HEAD
from app.data.folders import is_hidden
from app.data.images.formats import ENDINGS
from app.data.reading import refuse_other_encodings
from app.data.streams import chunks
from app.data.streams.chunks import Chunk, Format, Part
from app.data.streams.shards import Shard
from app.data.tables.json_files import TOO_DEEP, Learnt, check_letters, may_have_half_letters, table_of
from app.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features

KEY = "__key__"
AT_ONCE = 1 << 20  # bytes
ENDS = 4 << 10  # bytes at each end of a picture, by which it is told from others of its size
# Endings of files that are more than bytes, as WebDataset decodes them.
TEXTS, NUMBERS, JSON = ("txt", "text", "transcript"), ("cls", "cls2", "index", "inx", "id"), ("json", "jsn")
META = re.compile(r"__[^/]*__(/|$)")
ABOUT = ("readme", "license", "licence", "copying", "notice", "authors", "changelog", "version")
WRITTEN_SO = re.compile(rb"\s*[+-]?[0-9]+\s*")


class _First(NamedTuple):
    """What all samples must have, and the sample that has shown it."""

    columns: tuple[str, ...]
    shard: str
    key: str


class TarChunks(Format):
    """The samples of a data set's tar files: a column for each ending, and the common name."""

    def __init__(self, flag: str, path: str, folder: str):
        self._flag, self._path, self._folder = flag, path, folder
        self._first: _First | None = None
        self._learnt = Learnt()
        self._digest = xxhash.xxh3_64()

    def parts(self, shard: Shard, file: BinaryIO) -> Iterator[Part]:
        start = end = rows = 0
        file.seek(0)
        for sample, end in _samples(file, whole=False):
            self._check(_First(tuple(sorted(sample)), shard.name, sample[KEY]))
            self._learn({name: value for name, value in sample.items() if not isinstance(value, bytes)}, shard.name)
            self._digest.update(repr((sorted(sample.items()), end)).encode())
            rows += 1
            if end - start >= chunks.LEAST:
                yield Part(start, end - start, rows)
                start, rows = end, 0
        if rows:
            yield Part(start, end - start, rows)

    def digest(self) -> str:
        return self._digest.hexdigest()

    def add(self, later: "TarChunks") -> None:
        if later._first is not None:
            self._check(later._first)
        self._learnt.add(later._learnt)

    def _learn(self, values: dict[str, Any], shard: str) -> None:
        try:
            self._learnt.learn(values, shard, values[KEY])
        except ValueError as error:
            raise ValueError(f"{values[KEY]} has {error}") from None

    def _check(self, sample: "_First") -> None:
        first = self._first = self._first or sample
        if sample.columns != first.columns:
            raise UserError(
                f"{self._flag} {self._path}: the sample {sample.key} of {self._folder}/{sample.shard} has "
                f"{_told(sample.columns)}, and the first one ({self._folder}/{first.shard}, {first.key}) "
                f"{_told(first.columns)}: give every sample the same files"
            )

    def features(self) -> "Features":
        import datasets

        kinds = {
            name: datasets.Image() if f".{name.rpartition('.')[2]}" in ENDINGS else datasets.Value("binary")
            for name in (self._first.columns if self._first else ())
        }
        return datasets.Features({**kinds, **self._learnt.kinds(f"{self._flag} {self._folder}")})

    def tail(self, shard: Shard, file: BinaryIO) -> int:
        return 0

    def table(self, chunk: Chunk, features: "Features") -> "pa.Table":
        import datasets
        import pyarrow as pa
        from datasets.table import table_cast

        samples = [sample for sample, _ in _samples(io.BytesIO(chunk.data))]
        texts = {name: kind for name, kind in features.items() if not _is_bytes(kind)}
        try:
            table = table_of(samples, datasets.Features(texts))
            for name in features:
                if name not in texts:
                    table = table.append_column(name, _of_bytes(samples, name, features[name]))
            return table_cast(table.select(list(features)), features.arrow_schema)
        except (pa.ArrowException, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"it holds something else than when it was indexed: {error}") from error


def _of_bytes(samples: list[dict[str, Any]], name: str, kind: Any) -> "pa.Array":
    """Return a column of bytes; pictures have the names of their files too, for messages."""
    import datasets
    import pyarrow as pa

    data = pa.array([sample[name] for sample in samples], pa.binary())
    if not isinstance(kind, datasets.Image):
        return data
    names = pa.array([f"{sample[KEY]}.{name}" for sample in samples], pa.string())
    return pa.StructArray.from_arrays([data, names], ["bytes", "path"])


def _is_bytes(kind: Any) -> bool:
    import datasets

    return isinstance(kind, datasets.Image) or kind == datasets.Value("binary")


def _told(columns: tuple[str, ...]) -> str:
    return ", ".join(f".{name}" for name in columns if name != KEY)


def _samples(file: BinaryIO, whole: bool = True) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each sample, and the byte behind its last file.

    Args:
        whole: read all files; otherwise, of those that are bytes, such as pictures, there is a hash of their ends.
    """
    sample: dict[str, Any] = {}
    end = after = 0
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            after = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            if member.islnk() or member.issym():
                raise ValueError(f"{member.name} is a link: pack the files themselves (tar --hard-dereference -h)")
            if member.issparse():
                raise ValueError(f"{member.name} is stored without its zeros (tar -S): pack it again without -S")
            if not member.isfile():
                continue
            folder, _, name = member.name.rpartition("/")
            stem, dot, ending = name.partition(".")
            if META.match(member.name) or is_hidden(name) or (not dot and name.lower() in ABOUT):
                continue
            if not dot:
                raise ValueError(
                    f"{member.name} has no ending behind a dot, as a sample's file has: rename it, or leave it out"
                )
            if not member.name.isascii():
                _check_name(member.name)
            key = f"{folder}/{stem}" if folder else stem
            if sample and sample[KEY] != key:
                yield sample, end
                sample = {}
            if ending.lower() in sample:
                raise ValueError(f"{member.name} is there twice")
            sample[KEY] = key
            kind = ending.lower()
            is_read = whole or _is_read(kind)
            sample[kind] = _value(member.name, kind, _content(tar, member)) if is_read else _ends(tar, member)
            end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    if not whole:
        _check_end(file, after)
    if sample:
        yield sample, end


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name {name!a} holds bytes that are not UTF-8: rename the file") from None


def _check_end(file: BinaryIO, after: int) -> None:
    """Make sure that a tar file ends behind its last member: tarfile ends at any header that it cannot read."""
    file.seek(after)
    zeros = 0
    while data := file.read(AT_ONCE):
        if data.strip(b"\0"):
            raise ValueError(
                f"at byte {after} stands no further file, and yet it goes on: it is damaged, or two in one: write it "
                "again"
            )
        zeros += len(data)
    if zeros < tarfile.BLOCKSIZE:
        raise ValueError(
            f"it ends at byte {after + zeros} without the empty blocks that a tar file ends with: it is cut: fetch or "
            "write it again"
        )


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = tar.extractfile(member)
    data = opened.read() if opened else b""
    if len(data) < member.size:
        raise ValueError(
            f"{member.name} ends after {len(data)} of {member.size} bytes: fetch or write the tar file again"
        )
    return data


def _ends(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Return a hash of the first and the last bytes of a file, which are near what is read in any case."""
    opened = tar.extractfile(member)
    assert opened is not None, "it is a file"
    digest = xxhash.xxh3_64(opened.read(ENDS))
    opened.seek(max(0, member.size - ENDS))
    digest.update(opened.read(ENDS))
    return digest.digest()


def _is_read(ending: str) -> bool:
    """Tell whether a file of a sample is more than bytes, by its ending."""
    return ending.rpartition(".")[2] in (*TEXTS, *NUMBERS, *JSON)


def _value(name: str, ending: str, data: bytes) -> Any:
    """Return what a file of a sample holds: a text, a number, what json has, or bytes."""
    kind = ending.rpartition(".")[2]
    try:
        if kind in TEXTS:
            refuse_other_encodings(data[:HEAD])
            return data.decode("utf-8-sig")
        if kind in NUMBERS:
            if not WRITTEN_SO.fullmatch(data):
                raise ValueError(f"{data[:20]!r} is no whole number")
            return int(data)
        if kind in JSON:
            value = json.loads(data)
            if may_have_half_letters(data):
                check_letters(value, "it")
            return value
    except RecursionError:
        raise ValueError(f"{name} has {TOO_DEEP}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return data
