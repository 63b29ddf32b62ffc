"""Chunks: the parts of shards that are fetched and decoded as a whole; one file for what each format makes of them.

A chunk of parquet is a row group, one of jsonl some lines, one of a tar file some samples. A compressed jsonl file is
cut where its compression begins anew (a member of gzip, a frame of zstd): it can be read from nowhere else.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol, Self

from app.sampling.hashing import key_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, Features

    from app.data.streams.shards import Shard

LEAST = 8 << 20
"""Bytes of a chunk of lines or samples, at least: less would make a request for little, more a large cache."""


class Part(NamedTuple):
    """A chunk, as it lies in its shard."""

    start: int
    """First byte."""
    size: int
    """In bytes, as stored."""
    rows: int


class Format(Protocol):
    """How the shards of one data set are cut into chunks, and how a chunk becomes rows.

    It is made for one data set, or for one shard of it, and learns what the columns hold while it cuts shards. What
    makes it takes the flag that names the data, their path as it was given, and the folder or URL of the shards.
    """

    def parts(self, shard: "Shard", file: BinaryIO) -> Iterator[Part]:
        """Cut a shard into chunks, in order, and learn what its columns hold.

        Raises:
            UserError: it has samples of another kind than those before.
            ValueError: it is damaged, or holds something else; the message says where.
        """
        ...

    def digest(self) -> str:
        """Return a hash of what was read of the shards so far: of lines all, of pictures in tar files their ends."""
        ...

    def add(self, later: Self) -> None:
        """Learn what another one, of shards that come after those of this one, has learnt.

        Raises:
            UserError: it has samples of another kind.
        """
        ...

    def features(self) -> "Features":
        """Return what the columns of all shards so far hold.

        Raises:
            UserError: a column holds one thing in a shard and another in the next.
        """
        ...

    def tail(self, shard: "Shard", file: BinaryIO) -> int:
        """Return how many bytes at the end of a shard are needed to decode any of its chunks."""
        ...

    def table(self, chunk: "Chunk", features: "Features") -> "pa.Table":
        """Return the rows of a chunk, with the columns of all shards.

        Raises:
            ValueError: it is damaged, or holds something else than when it was indexed.
        """
        ...


class Chunk(NamedTuple):
    """A chunk that has been fetched."""

    shard: "Shard"
    part: Part
    data: bytes
    tail: bytes
    """The end of the shard, as many bytes as `Format.tail` has said."""


def as_dataset(table: "pa.Table", features: "Features", name: str, *identity: object) -> "Dataset":
    """Return the rows of a chunk as datasets has those of a file.

    Args:
        name: the words by which errors name the chunk.
        identity: what tells it from all other ones.
    """
    import datasets

    info = datasets.DatasetInfo(features=features, description=name)
    return datasets.Dataset(datasets.table.InMemoryTable(table), info=info, fingerprint=key_of(*identity))
