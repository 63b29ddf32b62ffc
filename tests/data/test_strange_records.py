"""What json can say and no column can hold: every reader refuses it, with the file and the place, or reads it right."""

import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zstandard
from support.stream_shards import write_members

from app.data.loading import open_source
from app.data.streams.chunk_reader import ChunkReader
from app.data.streams.index import Index, index_of
from app.data.streams.shards import FORMATS, PACKED, find_shards
from app.data.tables.files import READERS
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("own_data_cache")
HEALTHY = b'{"text": "a", "id": 1, "more": [1]}'


def _joined(records: Sequence[bytes]) -> bytes:
    return b"\n".join(records) + b"\n"


def _members(file: Path, records: Sequence[bytes]) -> None:
    write_members(file, [(f"{number}.json", record) for number, record in enumerate(records, 1)])


WRITERS: dict[str, Callable[[Path, Sequence[bytes]], object]] = {
    ".jsonl": lambda file, records: file.write_bytes(_joined(records)),
    ".jsonl.gz": lambda file, records: file.write_bytes(gzip.compress(_joined(records))),
    ".jsonl.zst": lambda file, records: file.write_bytes(zstandard.compress(_joined(records))),
    ".ndjson": lambda file, records: file.write_bytes(_joined(records)),
    ".tar": _members,
    ".json": lambda file, records: file.write_bytes(b"[" + b",".join(records) + b"]"),
}
STREAMED = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".tar")
MAPPED = (".jsonl", ".json", ".jsonl.gz")
READERS_OF = [*((kind, True) for kind in STREAMED), *((kind, False) for kind in MAPPED)]


def test_all_readers_of_json_are_here():
    lines = {ending for ending, kind in FORMATS.items() if kind == "jsonl"}
    wanted = {*lines, *(f".jsonl{packed}" for packed in PACKED), ".tar"}
    assert {kind for kind, streamed in READERS_OF if streamed} == wanted
    assert {e for e, kind in READERS.items() if kind == "json"} <= {
        kind for kind, streamed in READERS_OF if not streamed
    }


def opened(file: Path, streamed: bool) -> Index | list[dict]:
    """Read all that is read before training: of a stream its index."""
    if streamed:
        return index_of("--data.path", str(file), find_shards("--data.path", str(file)))
    return open_source("--data.path", [str(file)]).tables["train"].to_list()


def rows_of(file: Path, streamed: bool) -> list[dict]:
    found = opened(file, streamed)
    if not isinstance(found, Index):
        return found
    import datasets

    tables = [ChunkReader("--data.path", found).table(chunk) for chunk in range(len(found.rows))]
    rows = datasets.concatenate_datasets([datasets.Dataset(datasets.table.InMemoryTable(t)) for t in tables]).to_list()
    return [row["json"] for row in rows] if file.suffix == ".tar" else rows


STRANGE = {
    "many levels": (
        [b'{"text": "a", "id": 1, "more": ' + b"[" * 60 + b"]" * 60 + b"}"],
        "values in more than 50 levels",
    ),
    "levels of objects": (
        [b'{"text": "a", "id": 1, "more": ' + b'{"a": ' * 60 + b"1" + b"}" * 60 + b"}"],
        "values in more than 50 levels",
    ),
    "levels beyond Python's": ([b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"], "more than 50 levels"),
    "the first half of a letter": (
        [rb'{"text": "a\ud83d b", "id": 1, "more": [1]}'],
        r"has '\ud83d' without the other",
    ),
    "the second half": ([rb'{"text": "a\uDE00", "id": 1, "more": [1]}'], r"has '\ude00' without"),
    "halves in the wrong order": ([rb'{"text": "\ude00\ud83d", "id": 1, "more": [1]}'], r"has '\ude00' without"),
    "a half in a value of objects": ([rb'{"text": "a", "id": 1, "more": {"a": ["\ud800"]}}'], r"has '\ud800' without"),
    "a half in the name of a field": ([rb'{"text": "a", "id": 1, "m\ud800ore": [1]}'], r"has '\ud800' without"),
    "a whole number among fractions": (
        [b'{"text": "a", "id": 9007199254740993, "more": [1]}', b'{"text": "a", "id": 0.5, "more": [1]}'],
        "whole numbers beyond 9007199254740992, and fractions in other rows",
    ),
    "a whole number among fractions of a list": (
        [b'{"text": "a", "id": 1, "more": [-9007199254740993, 0.5]}'],
        "whole numbers beyond 9007199254740992, and fractions in other rows",
    ),
    "a record without a field": ([b"{}"], "is {}, a record without a field: leave it out"),
}


CASES = [
    (name, *reader)
    for name in STRANGE
    for reader in READERS_OF
    if (name, reader[0]) != ("a record without a field", ".tar")  # where it is the value of a column
]


@pytest.mark.parametrize(("name", "kind", "streamed"), CASES)
def test_what_no_column_can_hold_is_refused_with_its_place(name, kind, streamed, tmp_path):
    records, says = STRANGE[name]
    file = tmp_path / f"a{kind}"
    WRITERS[kind](file, [HEALTHY, HEALTHY, *records, HEALTHY])
    with pytest.raises(UserError) as told:
        opened(file, streamed)
    message = str(told.value)
    # The parser of a whole file gives no place for what it cannot hold itself.
    place = {".json": "" if "Python's" in name else "row 2", ".tar": r"\b3\b"}.get(kind, r"line 3\b")
    assert str(file) in message and says in message and re.search(place, message), message
    assert "\n" not in message and len(message) < 500


RIGHT = {
    "a letter in two parts": (rb'"\ud83d\uDE00"', "\U0001f600"),
    "a backslash before what looks like a half": (rb'"\\ud800"', "\\ud800"),
    "both": (rb'"\\\ud83d\ude00\\ud800"', "\\\U0001f600\\ud800"),
    "a long whole number": (b"9007199254740993", 9007199254740993),
    "the longest": (b"-9223372036854775808", -(2**63)),
    "one that is too long for a number": (b"9223372036854775808", "9223372036854775808"),
    "many levels": (b"[" * 40 + b"1" + b"]" * 40, None),
}


@pytest.mark.parametrize(("kind", "streamed"), READERS_OF)
@pytest.mark.parametrize("name", RIGHT)
def test_what_only_looks_strange_is_read(name, kind, streamed, tmp_path):
    written, value = RIGHT[name]
    WRITERS[kind](tmp_path / f"a{kind}", [b'{"value": ' + written + b"}"] * 3)
    value = json.loads(written) if value is None else value
    assert rows_of(tmp_path / f"a{kind}", streamed) == [{"value": value}] * 3


def test_a_whole_number_of_one_shard_among_fractions_of_another_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 0.5}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"id": 1}\n{"id": 9007199254740993}\n')
    with pytest.raises(UserError, match=rf"{tmp_path}/b.jsonl: line 2: the column id has whole numbers beyond"):
        opened(tmp_path, streamed=True)
