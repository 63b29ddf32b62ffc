"""Samples of tar files in the layout of WebDataset: files behind each other that share the name before a dot."""

import io
import json
import tarfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import xxhash

from app.data.images.formats import ENDINGS
from app.data.streams import chunks
from app.data.streams.chunks import Chunk, Format, Part
from app.data.streams.shards import Shard
from app.data.tables.json_files import Kind, add_kinds, learn_kinds, table_of
from app.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features

KEY = "__key__"
AT_ONCE = 1 << 20  # bytes
ENDS = 4 << 10  # bytes at each end of a picture, by which it is told from others of its size
# Endings of files that are more than bytes, as WebDataset decodes them.
TEXTS, NUMBERS, JSON = ("txt", "text", "transcript"), ("cls", "cls2", "index", "inx", "id"), ("json", "jsn")


class _First(NamedTuple):
    """What all samples must have, and the sample that has shown it."""

    columns: tuple[str, ...]
    shard: str
    key: str


class TarChunks(Format):
    """The samples of a data set's tar files: a column for each ending, and the common name."""

    def __init__(self, flag: str, path: str):
        """Read shards of `path`, which `flag` has given."""
        self._flag, self._path = flag, path
        self._first: _First | None = None
        self._kinds: dict[str, Kind] = {}
        self._digest = xxhash.xxh3_64()

    def parts(self, shard: Shard, file: BinaryIO) -> Iterator[Part]:
        start = end = rows = 0
        file.seek(0)
        for sample, end in _samples(file, whole=False):
            self._check(_First(tuple(sorted(sample)), shard.name, sample[KEY]))
            learn_kinds(self._kinds, {name: value for name, value in sample.items() if not isinstance(value, bytes)})
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
        add_kinds(self._kinds, later._kinds)

    def _check(self, sample: "_First") -> None:
        first = self._first = self._first or sample
        if sample.columns != first.columns:
            raise UserError(
                f"{self._flag} {self._path}: the sample {sample.key} of {sample.shard} has {_told(sample.columns)}, "
                f"and the first one ({first.shard}, {first.key}) {_told(first.columns)}: give every sample the same "
                "files"
            )

    def features(self) -> "Features":
        import datasets

        kinds = {
            name: datasets.Image() if f".{name.rpartition('.')[2]}" in ENDINGS else datasets.Value("binary")
            for name in (self._first.columns if self._first else ())
        }
        return datasets.Features({**kinds, **self._kinds})

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
            if not stem or not dot:
                raise ValueError(
                    f"{member.name} has no name before a dot and no ending behind it, as a sample's file has"
                )
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


def _check_end(file: BinaryIO, after: int) -> None:
    """Make sure that a tar file ends behind its last member: tarfile ends at any header that it cannot read."""
    file.seek(after)
    zeros = 0
    while data := file.read(AT_ONCE):
        if data.strip(b"\0"):
            raise ValueError(
                f"at byte {after} stands no further file, and yet it goes on: it is damaged, or two in one"
            )
        zeros += len(data)
    if zeros < tarfile.BLOCKSIZE:
        raise ValueError(
            f"it ends at byte {after + zeros} without the empty blocks that a tar file ends with: it is cut"
        )


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = tar.extractfile(member)
    data = opened.read() if opened else b""
    if len(data) < member.size:
        raise ValueError(f"{member.name} ends after {len(data)} of {member.size} bytes")
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
            return data.decode("utf-8")
        if kind in NUMBERS:
            return int(data)
        if kind in JSON:
            return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return data
