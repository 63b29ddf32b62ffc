"""Texts as shards of each format that is read: the functions of Python's standard library, as often as needed."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from app.data.tables.builtin import stdlib

GROUP = 512
"""Rows of a row group."""


def texts(rows: int) -> pa.Table:
    """Return rows with a text and its label; what comes again has a number before it, so that all rows differ."""
    known = stdlib().data.table.select(["text", "label"]).combine_chunks()
    parts = []
    for turn in range(-(-rows // len(known))):
        part = known.slice(0, rows - turn * len(known))
        numbered = [f"# {turn}\n{text}" if turn else text for text in part.column("text").to_pylist()]
        parts.append(part.set_column(0, "text", pa.array(numbered)))
    joined = pa.concat_tables(parts).combine_chunks()

    return joined.take(np.random.default_rng(0).permutation(rows))


def write_parquet(folder: Path, table: pa.Table, shards: int, group: int = GROUP) -> Path:
    """Write rows into some parquet files; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    each = -(-len(table) // shards)
    for number in range(shards):
        part = table.slice(number * each, each)
        parquet.write_table(part, folder / f"train-{number:05}.parquet", row_group_size=group, compression="zstd")
    return folder


def write_tar(folder: Path, table: pa.Table, shards: int) -> Path:
    """Write rows into some tar files in the layout of WebDataset; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    each = -(-len(table) // shards)
    for number in range(shards):
        with tarfile.open(folder / f"train-{number:05}.tar", "w") as tar:
            for place, row in enumerate(table.slice(number * each, each).to_pylist()):
                for ending, data in (("txt", row["text"]), ("json", json.dumps({"label": row["label"]}))):
                    member = tarfile.TarInfo(f"{number * each + place:08}.{ending}")
                    content = data.encode("utf-8", "surrogatepass")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder


def bytes_of(folder: Path) -> int:
    """Count the bytes of the shards in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
