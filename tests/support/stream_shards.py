"""Shards of every format, with known rows."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import zstandard
from pyarrow import parquet

ROWS = [{"number": i, "text": f"the text {i}" * (i % 4), "score": i / 2} for i in range(100)]


def lines(rows: Iterable[dict[str, Any]]) -> bytes:
    """Return rows as jsonl."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _pieces(rows: list[dict[str, Any]], size: int = 20) -> list[bytes]:
    return [lines(rows[i : i + size]) for i in range(0, len(rows), size)]


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write row groups of seven rows, with checksums."""
    parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=7, write_page_checksum=True)


def write_tar(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write a text and a class for each row."""
    content = [
        (f"part/{row['number']:04}.{ending}", data)
        for row in rows
        for ending, data in (("txt", row["text"].encode()), ("cls", str(row["number"]).encode()))
    ]
    write_members(file, content)


def write_members(file: Path, content: Iterable[tuple[str, bytes]]) -> None:
    """Write a tar file of names and contents."""
    with tarfile.open(file, "w") as tar:
        for name, data in content:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], Any]] = {
    "parquet": write_parquet,
    "jsonl": lambda file, rows: file.write_bytes(lines(rows)),
    "jsonl.gz": lambda file, rows: file.write_bytes(b"".join(map(gzip.compress, _pieces(rows)))),
    "jsonl.zst": lambda file, rows: file.write_bytes(b"".join(map(zstandard.compress, _pieces(rows)))),
    "ndjson": lambda file, rows: file.write_bytes(b"\xef\xbb\xbf\n" + lines(rows).replace(b"\n", b"\r\n\r\n")[:-4]),
    "tar": write_tar,
}


def written(folder: Path, kind: str, sizes: Iterable[int] = (40, 1, 59)) -> Path:
    """Write ROWS into shards of some sizes; return the folder."""
    start = 0
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        WRITERS[kind](folder / f"part-{number}.{kind}", ROWS[start : start + size])
        start += size
    return folder


def expected(kind: str) -> list[dict[str, Any]]:
    """Return ROWS as they are read from shards of a format."""
    if kind != "tar":
        return ROWS
    return [{"__key__": f"part/{row['number']:04}", "cls": row["number"], "txt": row["text"]} for row in ROWS]


def write_texts(folder: Path, shards: int, rows: int, in_chunk: int) -> None:
    """Write shards of labelled texts of some kilobytes, sorted by class, in row groups of so many rows."""
    folder.mkdir(parents=True)
    for shard in range(shards):
        numbers = range(shard * rows, (shard + 1) * rows)
        classes = ["abc"[3 * number // (shards * rows)] for number in numbers]
        texts = [f"{each} " * 4 + f"number {i} " * 300 for i, each in zip(numbers, classes, strict=True)]
        table = pa.table({"text": texts, "label": ["abc".index(each) for each in classes]})
        parquet.write_table(
            table, folder / f"part-{shard:03}.parquet", row_group_size=in_chunk, write_page_checksum=True
        )
