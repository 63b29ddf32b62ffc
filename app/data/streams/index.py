"""The index of a data set: which chunks its shards have, made once and kept where the next run finds it.

A chunk takes 24 bytes, whatever its rows are. The index is one Arrow file, which all processes of a machine map into
memory. It lies beside the data, where `python -m app index` puts it, or else in the cache; there its name says what the
shards are: their names, sizes and tags.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app import storage
from app.config.file_kinds import HEAD
from app.data.cache import cache_folder
from app.data.reading import DAMAGE, unreadable
from app.data.streams.chunks import Chunk, Format, Part
from app.data.streams.line_chunks import LineChunks
from app.data.streams.parquet_chunks import ParquetChunks
from app.data.streams.shards import Shard, Shards, is_url
from app.data.streams.tar_chunks import TarChunks
from app.errors import UserError
from app.sampling.hashing import hash_of_bytes, key_of
from app.storage.drafts import write

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features

FORMAT = "2026-11"  # the month in which the file last changed its meaning
COLUMNS = {"shard": "int32", "start": "int64", "size": "int64", "rows": "int32"}
FORMATS: dict[str, Callable[[str, str, str], Format]] = {
    "parquet": ParquetChunks,
    "jsonl": LineChunks,
    "tar": TarChunks,
}
THREADS = 8  # that look at shards in a bucket; on a disk, one is as fast
MEASURED = 3  # chunks to decode at most before an index is made of damaged data
BESIDE = ".samestep-index-{}"


@dataclass(frozen=True)
class Index:
    """The chunks of a data set, in the order of its shards and of the bytes in each."""

    shards: Shards
    tails: tuple[int, ...]
    """How many bytes at the end of each shard are needed to decode any of its chunks."""
    digests: tuple[str, ...]
    """A hash of what of each shard was read to index it; see `Format.digest`."""
    shard: np.ndarray
    """Number of each chunk's shard, int32 [chunks]."""
    start: np.ndarray
    """Its first byte there, int64 [chunks]."""
    size: np.ndarray
    """In bytes, as stored, int64 [chunks]."""
    rows: np.ndarray
    """int32 [chunks]."""
    features: "Features"
    """What the columns of all shards hold."""
    growth: float = 1.0
    """Bytes of a decoded chunk for each one that is stored, as the largest chunk showed when the index was made."""

    @cached_property
    def fingerprint(self) -> str:
        """Hash what the rows depend on, wherever the shards lie: what was read of them, and how they are cut."""
        names = [(shard.name, shard.size) for shard in self.shards.files]
        cuts = hash_of_bytes([getattr(self, name) for name in COLUMNS])
        return key_of(FORMAT, names, self.digests, self.features, cuts)

    def part(self, chunk: int) -> Part:
        """Return where a chunk lies in its shard."""
        return Part(int(self.start[chunk]), int(self.size[chunk]), int(self.rows[chunk]))

    def fetch(self, chunk: int, files: storage.Storage, tail: bytes | None = None) -> Chunk:
        """Fetch a chunk as it is stored; it may be shorter than it should be.

        Args:
            files: the storage of the shards' folder, which keeps its connections from one chunk to the next.
            tail: that of its shard, if it has been fetched already.

        Raises:
            OSError: it cannot be fetched.
        """
        part, number = self.part(chunk), int(self.shard[chunk])
        shard = self.shards.files[number]
        data = files.read(shard.name, part.start, part.size, follow=True)
        return Chunk(shard, part, data, self.fetch_tail(number, files) if tail is None else tail)

    def fetch_tail(self, number: int, files: storage.Storage) -> bytes:
        """Fetch the end of a shard that is needed to decode its chunks.

        Raises:
            OSError: it cannot be fetched.
        """
        shard, tail = self.shards.files[number], self.tails[number]
        return files.read(shard.name, shard.size - tail, tail, follow=True) if tail else b""

    def take(self, chunks: np.ndarray) -> "Index":
        """Return an index of some of the chunks, integers [chosen], in their order there.

        Shards keep their numbers, so what lies in a cache is found through any such index.
        """
        return dataclasses.replace(self, **{name: getattr(self, name)[chunks] for name in COLUMNS})


def index_of(flag: str, path: str, shards: Shards, split: str = "train") -> Index:
    """Return the index of shards: from beside them, from the cache, or made now and kept in the cache.

    Raises:
        UserError: a shard cannot be read, or has other columns than others.
    """
    cached = cached_at(shards)
    index = _beside(shards, split) or _cached(cached, shards)
    if index is None:
        made = make_index(flag, path, shards)
        cached.parent.mkdir(parents=True, exist_ok=True)
        write(cached, to_bytes(made))
        index = _cached(cached, shards) or made
    return index


def cached_at(shards: Shards) -> Path:
    """Return where this machine keeps the index of shards."""
    return cache_folder() / "streams" / f"{key_of(FORMAT, *shards)}.arrow"


def put_beside(index: Index, split: str = "train") -> str:
    """Write an index beside its shards, where runs on other machines find it too; return its name.

    Raises:
        OSError: nothing can be written there.
    """
    name = BESIDE.format(split)
    storage.at(index.shards.folder).write(name, to_bytes(index), durable=True)
    return name


def make_index(flag: str, path: str, shards: Shards) -> Index:
    """Look at every shard once. Errors as in `index_of`."""
    reader = FORMATS[shards.format](flag, path, shards.folder)
    columns: list[np.ndarray] = []
    tails: list[int] = []
    digests: list[str] = []
    pool = ThreadPoolExecutor(THREADS if is_url(shards.folder) else 1, thread_name_prefix="index")
    try:
        scanned = pool.map(lambda number: _scanned(flag, path, shards, number), range(len(shards.files)))
        for number, (parts, tail, learnt) in enumerate(scanned):
            if not parts.size:
                raise UserError(f"{flag} {shards.place_of(number)}: it has no rows: leave it out")
            reader.add(learnt)
            columns.append(np.concatenate([np.full((1, parts.shape[1]), number), parts]))
            tails.append(tail)
            digests.append(learnt.digest())
    finally:
        pool.shutdown(cancel_futures=True)
    arrays = np.concatenate(columns, axis=1)
    typed: dict[str, Any] = {
        name: array.astype(kind) for (name, kind), array in zip(COLUMNS.items(), arrays, strict=True)
    }
    index = Index(shards, tuple(tails), tuple(digests), **typed, features=reader.features())
    return dataclasses.replace(index, growth=_growth(flag, index, reader))


def _growth(flag: str, index: Index, reader: Format) -> float:
    """Decode the largest chunk, or if it is damaged the next one; see `Index.growth`."""
    problem: UserError | None = None
    for chunk in np.argsort(-index.size, kind="stable")[:MEASURED].tolist():
        try:
            return reader.table(index.fetch(chunk, storage.at(index.shards.folder)), index.features).nbytes / int(
                index.size[chunk]
            )
        except DAMAGE as error:
            problem = problem or unreadable(flag, index.shards.place_of(int(index.shard[chunk])), error)
    assert problem is not None
    raise problem


def _scanned(flag: str, path: str, shards: Shards, number: int) -> tuple[np.ndarray, int, Format]:
    """Return the start, size and rows of each chunk of a shard, int64 [3, chunks], its tail, and who has read it."""
    shard, place = shards.files[number], shards.place_of(number)
    reader = FORMATS[shards.format](flag, path, shards.folder)
    try:
        with storage.at(shards.folder).open(shard.name, follow=True) as file:
            # As an array at once: a million chunks as objects would take ten times the memory.
            parts = np.array(list(reader.parts(shard, file)), np.int64).reshape(-1, 3).T
            return parts, reader.tail(shard, file), reader
    except DAMAGE as error:
        raise unreadable(flag, place, error, head=_head_of(shards.folder, shard)) from error


def _head_of(folder: str, shard: Shard) -> bytes:
    """Return the first bytes of a shard; nothing if it cannot be read."""
    with contextlib.suppress(OSError):
        return storage.at(folder).read(shard.name, 0, min(shard.size, HEAD), follow=True)
    return b""


def to_bytes(index: Index) -> bytes:
    """Return the contents of an index's file."""
    import pyarrow as pa

    listed = zip(index.shards.files, index.tails, index.digests, strict=True)
    about = {
        "format": FORMAT,
        "growth": index.growth,
        "shards": [[*shard, tail, digest] for shard, tail, digest in listed],
    }
    fields = [(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()]
    features = index.features.arrow_schema
    metadata = {"samestep": json.dumps(about), "features": features.serialize().to_pybytes()}
    table = pa.table([getattr(index, name) for name in COLUMNS], pa.schema(fields, metadata))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return sink.getvalue().to_pybytes()


def _from_table(table: "pa.Table", shards: Shards) -> Index | None:
    """Return the index that a table holds; None if it is of other shards, or of another version."""
    import datasets
    import pyarrow as pa

    metadata = table.schema.metadata or {}
    about = json.loads(metadata.get(b"samestep", b"{}"))
    if about.get("format") != FORMAT:
        return None
    listed = [Shard(*fields[:3]) for fields in about["shards"]]
    if listed != [*shards.files]:
        return None
    schema = pa.ipc.read_schema(pa.py_buffer(metadata[b"features"]))
    columns = {name: table.column(name).chunk(0).to_numpy() for name in COLUMNS}
    tails, digests = zip(*(fields[3:] for fields in about["shards"]), strict=True)
    features = datasets.Features.from_arrow_schema(schema)
    return Index(shards, tails, digests, **columns, features=features, growth=about["growth"])


def _cached(file: Path, shards: Shards) -> Index | None:
    import pyarrow as pa

    return _read(lambda: pa.memory_map(str(file)), shards)


def _beside(shards: Shards, split: str) -> Index | None:
    import pyarrow as pa

    files = storage.at(shards.folder)
    return _read(lambda: pa.py_buffer(files.read(BESIDE.format(split), follow=True)), shards)


def _read(opened: Callable[[], Any], shards: Shards) -> Index | None:
    """Return the index in a file that `opened` gives to Arrow; None where there is none of these shards."""
    import pyarrow as pa

    try:
        return _from_table(pa.ipc.open_file(opened()).read_all(), shards)
    except (OSError, ValueError, KeyError, TypeError):
        return None
