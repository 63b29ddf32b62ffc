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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

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

FORMAT = "2026-11b"  # the month in which the file last changed its meaning, and how often in it
COLUMNS = {"shard": "int32", "start": "int64", "size": "int64", "rows": "int32"}
FORMATS: dict[str, Callable[[str, str, str], Format]] = {
    "parquet": ParquetChunks,
    "jsonl": LineChunks,
    "tar": TarChunks,
}
THREADS = 8  # that read chunks to check them
LOOKING = 16  # threads that look at shards in a bucket; on a disk, one is as fast
SAMPLES, SAMPLED = 4, 16 << 10
"""Pieces of a parquet shard, and bytes in each, by which it is told from others of its sizes: all is too much to read.
"""
MEASURED = 3  # chunks to decode at most before an index is made of damaged data
TOLD = 256  # shards, or groups of them, of which a checkpoint has a hash
BESIDE = ".samestep-index-{}"
ADVICE = "leave out the rows of damaged chunks with --data.bad skip, or put a good copy of the shard in its place"


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

    def shard_hashes(self) -> dict[str, str]:
        """Hash what was read of each shard, wherever they lie, by its name; of several together if there are many."""
        listed = list(zip(self.shards.files, self.digests, strict=True))
        together = -(-len(listed) // TOLD)
        hashes = {}
        for start in range(0, len(listed), together):
            some = listed[start : start + together]
            first, last = (some[place][0].name for place in (0, -1))
            name = first if first == last else f"one of {first} to {last}"
            hashes[name] = key_of(*((shard.name, shard.size, digest) for shard, digest in some))[:16]
        return hashes

    def part(self, chunk: int) -> Part:
        """Return where a chunk lies in its shard."""
        return Part(int(self.start[chunk]), int(self.size[chunk]), int(self.rows[chunk]))

    def fetch(self, chunk: int, files: storage.Storage, tail: bytes | None = None) -> Chunk:
        """Fetch a chunk as it is stored; it may be shorter than it should be.

        Args:
            files: the storage of the shards' folder, which keeps its connections from one chunk to the next.
            tail: that of its shard, if it has been fetched already.

        Raises:
            storage.Changed: its shard is another one than was indexed.
            OSError: it cannot be fetched.
        """
        part, number = self.part(chunk), int(self.shard[chunk])
        shard = self.shards.files[number]
        data = files.read(shard.name, part.start, part.size, follow=True, tag=shard.tag)
        return Chunk(shard, part, data, self.fetch_tail(number, files) if tail is None else tail)

    def fetch_tail(self, number: int, files: storage.Storage) -> bytes:
        """Fetch the end of a shard that is needed to decode its chunks. Errors as in `fetch`."""
        shard, tail = self.shards.files[number], self.tails[number]
        return files.read(shard.name, shard.size - tail, tail, follow=True, tag=shard.tag) if tail else b""

    def take(self, chunks: np.ndarray) -> "Index":
        """Return an index of some of the chunks, integers [chosen], in their order there.

        Shards keep their numbers, so what lies in a cache is found through any such index.
        """
        return dataclasses.replace(self, **{name: getattr(self, name)[chunks] for name in COLUMNS})


def _meanwhile(flag: str, place: str) -> UserError:
    """Return the error for a shard that changes while it is indexed; `place` names it."""
    return UserError(f"{flag} {place} was changed while it was indexed: repeat the command when nobody writes it")


def changed(flag: str, place: str, what: str = "has changed") -> UserError:
    """Return the error for a shard that is not the one that was indexed; `place` names it."""
    return UserError(f"{flag} {place} {what} since the data were indexed: put the shard back, or start a new run")


def index_of(flag: str, path: str, shards: Shards, split: str = "train", skips: bool = False) -> Index:
    """Return the index of shards: from beside them, from the cache, or made now and kept in the cache.

    Args:
        skips: make it also where all chunks that are looked at are damaged.

    Raises:
        UserError: a shard cannot be read, or has other columns than others.
    """
    cached = cached_at(shards)
    index = _beside(shards, split) or _cached(cached, shards)
    if index is None:
        made = make_index(flag, path, shards, skips)
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


def make_index(flag: str, path: str, shards: Shards, skips: bool = False) -> Index:
    """Look at every shard once. Errors as in `index_of`."""
    reader = FORMATS[shards.format](flag, path, shards.folder)
    columns: list[np.ndarray] = []
    tails: list[int] = []
    digests: list[str] = []
    files = storage.at(shards.folder)
    pool = ThreadPoolExecutor(LOOKING if is_url(shards.folder) else 1, thread_name_prefix="index")
    try:
        scanned = pool.map(lambda number: _scanned(flag, path, shards, number, files), range(len(shards.files)))
        for number, (parts, tail, learnt, digest) in enumerate(scanned):
            if not parts.size:
                raise UserError(f"{flag} {shards.place_of(number)}: it has no rows: leave it out")
            reader.add(learnt)
            columns.append(np.concatenate([np.full((1, parts.shape[1]), number), parts]))
            tails.append(tail)
            digests.append(digest)
    finally:
        pool.shutdown(cancel_futures=True)
    arrays = np.concatenate(columns, axis=1)
    typed: dict[str, Any] = {
        name: array.astype(kind) for (name, kind), array in zip(COLUMNS.items(), arrays, strict=True)
    }
    index = Index(shards, tuple(tails), tuple(digests), **typed, features=reader.features())
    return dataclasses.replace(index, growth=_growth(flag, index, reader, None if skips else MEASURED))


def _growth(flag: str, index: Index, reader: Format, most: int | None) -> float:
    """Decode the largest chunk, or if it is damaged the next one, `most` at most; see `Index.growth`."""
    problem: UserError | None = None
    for chunk in np.argsort(-index.size, kind="stable")[:most].tolist():
        try:
            return reader.table(index.fetch(chunk, storage.at(index.shards.folder)), index.features).nbytes / int(
                index.size[chunk]
            )
        except storage.Changed:
            raise _meanwhile(flag, index.shards.place_of(int(index.shard[chunk]))) from None
        except DAMAGE as error:
            problem = problem or unreadable(flag, index.shards.place_of(int(index.shard[chunk])), error)
    assert problem is not None
    raise UserError(f"{problem}; {ADVICE}") from problem.__cause__


class _Scanned(NamedTuple):
    """What was read of a shard."""

    parts: np.ndarray
    """The start, size and rows of each chunk, int64 [3, chunks]."""
    tail: int
    reader: Format
    """Who has read it."""
    digest: str


def _scanned(flag: str, path: str, shards: Shards, number: int, files: storage.Storage) -> _Scanned:
    shard, place = shards.files[number], shards.place_of(number)
    reader = FORMATS[shards.format](flag, path, shards.folder)
    try:
        with files.open(shard.name, follow=True) as file:
            # As an array at once: a million chunks as objects would take ten times the memory.
            parts = np.array(list(reader.parts(shard, file)), np.int64).reshape(-1, 3).T
            tail = reader.tail(shard, file)
        digest = reader.digest()
        if shards.format == "parquet":
            digest = key_of(digest, _sample(shard, shard.size - tail, files))
        return _Scanned(parts, tail, reader, digest)
    except storage.Changed:
        raise _meanwhile(flag, place) from None
    except DAMAGE as error:
        raise unreadable(flag, place, error, head=_head_of(shards.folder, shard)) from error


def _head_of(folder: str, shard: Shard) -> bytes:
    """Return the first bytes of a shard; nothing if it cannot be read."""
    with contextlib.suppress(OSError):
        return storage.at(folder).read(shard.name, 0, min(shard.size, HEAD), follow=True)
    return b""


def _sample(shard: Shard, end: int, files: storage.Storage) -> str:
    """Hash some pieces of the first `end` bytes of a shard, from the first to the last; all of a small one."""
    if end <= SAMPLES * SAMPLED:
        pieces = [(0, end)]
    else:
        pieces = [(i * (end - SAMPLED) // (SAMPLES - 1), SAMPLED) for i in range(SAMPLES)]
    digest = xxhash.xxh3_64()
    for start, size in pieces:
        digest.update(files.read(shard.name, start, size, follow=True, tag=shard.tag))
    return digest.hexdigest()


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
