"""Shards of tokens: parquet files with a row for each token, and a record next to them of what they are.

A shard has flat columns: `token`; `begins`, whether a document begins there; and `supervised`, where not all is learnt.
A row group is a chunk, as data are read by chunks: so an index counts the tokens of each chunk, and a chunk that is
decoded is arrays that numpy reads where they lie. Each shard has a record among its key-value metadata too.
"""

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from app import storage
from app.config.text_files import why
from app.data.reading import unreadable
from app.data.streams.shards import Shard, Shards
from app.data.tables.splits import SPLIT_WORDS
from app.errors import UserError
from app.sampling.hashing import hash_of_bytes, key_of
from app.storage.records import IF_ANY, JsonRecord

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "2026-11"  # the month in which a column or a field last changed its meaning
KEY = "samestep-tokens"
TOKEN, BEGINS, SUPERVISED = "token", "begins", "supervised"
SPLITS = tuple(SPLIT_WORDS)
TOKENIZER = "tokenizer"
"""The folder next to the shards in which the tokenizer is."""
NEAR = 8  # a chunk ends with a document if one ends within an eighth of a chunk from where it would end


@dataclass(frozen=True)
class Meaning(JsonRecord):
    """What the numbers in a shard mean."""

    kind: str
    """text, prompt or messages: what is learnt."""
    columns: list[str]
    """Of the source, that hold the texts."""
    tokenizer: str
    """Hash of what decides which ids a text has."""
    vocabulary: int
    start: int
    """The token before a document."""
    end: int
    """The token after a document."""

    @property
    def type(self) -> str:
        """Return the type of the tokens, as numpy and Arrow call it."""
        return "uint16" if self.vocabulary <= 2**16 else "uint32"

    @property
    def all_supervised(self) -> bool:
        """Tell whether every token is learnt."""
        return self.kind == "text"


@dataclass(frozen=True)
class Amount(JsonRecord):
    """What a shard holds."""

    tokens: int
    supervised: int
    """Tokens that are learnt."""
    documents: int
    unlearnt: int
    """Conversations of which nothing is learnt."""
    bytes: int
    """Of the text that is learnt."""
    digest: str
    """Hash of all columns."""


@dataclass(frozen=True)
class InShard(JsonRecord):
    """The record in a shard."""

    meaning: Meaning
    amount: Amount
    made: str
    """Hash of the settings that it was made with, and of its number."""
    format: str = FORMAT


@dataclass(frozen=True)
class Listed(JsonRecord):
    """A shard, in the record of all of them."""

    name: str
    size: int
    """In bytes."""
    amount: Amount


@dataclass(frozen=True)
class Settings(JsonRecord):
    """What `tokenize` was asked for; it decides about every byte of the shards."""

    source: str
    """As it was given."""
    rows: str
    """Hash of what the source holds."""
    tokenizer: str
    """As it was given."""
    template: str
    """Hash of the chat template; empty if none is used."""
    date: str
    """That the chat template has written; empty if it writes none."""
    shard: int
    """Tokens of a shard, about."""
    chunk: int
    """Tokens of a chunk, about."""
    meaning: Meaning


@dataclass(frozen=True)
class TokensRecord(JsonRecord):
    """The record of all shards of a split, written when `tokenize` begins, and again when it has finished."""

    settings: Settings
    shards: list[Listed] | None = field(default=None, metadata=IF_ANY)
    """None: it has not finished."""
    format: str = FORMAT

    @property
    def whole(self) -> list[Listed]:
        """Return the shards of a record that is known to be whole."""
        assert self.shards is not None
        return self.shards


def record_name(split: str) -> str:
    """Return the name of the record of a split."""
    return "tokens.json" if split == "train" else f"tokens-{split}.json"


def splits_at(path: str) -> list[str]:
    """List the splits of tokens in a folder or at a URL, finished or not; none if it holds something else.

    Raises:
        UserError: nobody knows, as for want of credentials.
    """
    files = storage.at(path)
    try:
        return [split for split in SPLITS if files.exists(record_name(split))]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {why(error)}") from None


def read_record(flag: str, path: str, split: str) -> TokensRecord:
    """Read the record of a split, which is there.

    Raises:
        UserError: it is damaged, or of a newer format.
    """
    name = record_name(split)
    try:
        return TokensRecord.from_json(json.loads(storage.at(path).read(name, follow=True)))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(flag, f"{path}/{name}", error, "copy it again, or tokenize into another folder") from error


def find_tokens(flag: str, path: str, split: str) -> tuple[TokensRecord, Shards]:
    """Return the record and the shards of a split of tokens.

    Raises:
        UserError: there is no such split, it is not finished, or a shard is not as the record says.
    """
    if split not in (there := splits_at(path)):
        has = f"it has {' and '.join(there)}" if there else "it has no record of tokens, as `tokenize` writes it"
        raise UserError(f"{flag} {path}: there are no tokens of the split {split}; {has}")
    record = read_record(flag, path, split)
    if record.shards is None:
        raise UserError(f"{flag} {path}: tokenize has not finished the split {split}: run the same command again")
    files = storage.at(path)
    shards = []
    try:
        # One request lists a bucket's files; a web server's must be asked for one by one.
        entries = {} if path.startswith("http") else {each.name: each for each in files.files()}
        for listed in record.shards:
            entry = files.entry(listed.name) if path.startswith("http") else entries.get(listed.name)
            if entry is None or entry.size != listed.size:
                what = "is gone" if entry is None else f"has {entry.size:,} bytes"
                raise UserError(
                    f"{flag} {path}: {listed.name} {what}, where {record_name(split)} says {listed.size:,} bytes: copy "
                    "the shard again, or tokenize again"
                )
            shards.append(Shard(entry.name, entry.size, entry.tag))
    except OSError as error:
        raise unreadable(flag, path, error) from error
    return record, Shards(path.rstrip("/"), tuple(shards))


def read_in_shard(file: BinaryIO) -> InShard:
    """Read the record in a shard.

    Raises:
        ValueError: it is damaged, or no shard of tokens.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(pa.PythonFile(file, "r")) as opened:
            return InShard.from_json(json.loads((opened.metadata.metadata or {}).get(KEY.encode(), b"null")))
    except (pa.ArrowException, RecursionError) as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class Tokens:
    """Some tokens that follow each other."""

    ids: np.ndarray
    begins: np.ndarray
    """Bool: at which of them a document begins."""
    supervised: np.ndarray
    """Bool."""

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, low: int, high: int | None = None) -> "Tokens":
        """Return those with numbers from `low` to before `high`."""
        return Tokens(self.ids[low:high], self.begins[low:high], self.supervised[low:high])

    @classmethod
    def joined(cls, parts: "Sequence[Tokens]") -> "Tokens":
        """Put several together."""
        columns = ([each.ids for each in parts], [each.begins for each in parts], [each.supervised for each in parts])
        return parts[0] if len(parts) == 1 else cls(*map(np.concatenate, columns))


class ShardWriter:
    """Write one shard, chunk by chunk; it is whole once it is closed."""

    def __init__(self, file: Path, meaning: Meaning, chunk: int):
        """Begin a file.

        Args:
            chunk: tokens of a chunk, about.
        """
        import pyarrow as pa
        from pyarrow import parquet

        self._meaning, self._chunk = meaning, chunk
        columns = [(TOKEN, pa.type_for_alias(meaning.type)), (BEGINS, pa.bool_())]
        columns += [] if meaning.all_supervised else [(SUPERVISED, pa.bool_())]
        self._schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])
        # Parquet has no numbers of two bytes. With their bytes apart, it packs better than in any other way, and is
        # decoded in 10 ms a chunk.
        self._writer = parquet.ParquetWriter(
            file,
            self._schema,
            compression="zstd",
            use_dictionary=False,
            column_encoding={TOKEN: "BYTE_STREAM_SPLIT"},
            write_page_checksum=True,
        )
        self._waiting: list[Tokens] = []
        self._tokens = self._learnt = 0
        self._digests: list[str] = []

    def add(self, tokens: Tokens) -> None:
        """Add tokens behind those before."""
        self._waiting.append(tokens)
        if sum(map(len, self._waiting)) < self._longest:
            return
        rest = Tokens.joined(self._waiting)
        while len(rest) >= self._longest:
            end = self._end(rest.begins)
            self._write(rest.part(0, end))
            rest = rest.part(end)
        self._waiting = [rest]

    @property
    def _longest(self) -> int:
        return self._chunk + math.ceil(self._chunk / NEAR)

    def _end(self, begins: np.ndarray) -> int:
        """Return where a chunk ends: where a document does, near its size; a long document goes on in the next one."""
        low = self._chunk - self._chunk // NEAR
        places = np.flatnonzero(begins[low : self._longest]) + low
        places = places[places > 0]
        return int(places[np.abs(places - self._chunk).argmin()]) if len(places) else self._chunk

    def _write(self, tokens: Tokens) -> None:
        import pyarrow as pa

        ids = tokens.ids.astype(self._meaning.type)
        columns = [ids, tokens.begins, tokens.supervised][: len(self._schema)]
        self._writer.write_table(pa.table([*map(pa.array, columns)], self._schema), row_group_size=len(ids))
        self._tokens += len(ids)
        self._learnt += int(np.count_nonzero(tokens.supervised))
        self._digests.append(hash_of_bytes([each.astype(each.dtype.newbyteorder("<")) for each in columns]))

    def close(self, made: str, documents: int, unlearnt: int, size: int) -> Amount:
        """Write what is left, and the record.

        Args:
            made: see `InShard`.
            size: in bytes, of the text that is learnt.
        """
        if any(map(len, self._waiting)):
            self._write(Tokens.joined(self._waiting))
        amount = Amount(self._tokens, self._learnt, documents, unlearnt, size, key_of(*self._digests))
        record = InShard(self._meaning, amount, made)
        self._writer.add_key_value_metadata({KEY: json.dumps(record.to_json())})
        self._writer.close()
        return amount

    def abandon(self) -> None:
        """Close the file, which is not whole."""
        with contextlib.suppress(OSError):
            self._writer.close()


def tokens_of(table: "pa.Table", low: int = 0, high: int | None = None) -> Tokens:
    """Return tokens of a chunk that was decoded, from a number to before another one; ids are not copied."""
    part = table.slice(low, None if high is None else high - low)

    def array(name: str) -> np.ndarray:
        column = part.column(name)
        whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        return whole.to_numpy(zero_copy_only=False)

    ids = array(TOKEN)
    supervised = array(SUPERVISED) if SUPERVISED in table.column_names else np.ones(len(ids), bool)
    return Tokens(ids, array(BEGINS), supervised)
