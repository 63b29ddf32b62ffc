"""Shards that recipes stream: pairs of texts, preferences, and pictures, the same ones every time."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from support.stream_shards import WRITERS, write_members

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
COLOURS = ("red", "green", "blue")
LONG = 5
"""Number of the preference that is too long for 64 bytes."""


def _words(draw: np.random.Generator, most: int) -> str:
    return " ".join(draw.choice(WORDS, draw.integers(1, most)))


def _write(folder: Path, kind: str, rows: list[dict]) -> Path:
    folder.mkdir(parents=True)
    for shard in range(5):
        WRITERS[kind](folder / f"part-{shard}.{kind}", rows[shard::5])
    return folder


def pairs(folder: Path, kind: str, count: int = 43) -> Path:
    """Write sources and targets; return the folder."""
    draw = np.random.default_rng(count)
    return _write(folder, kind, [{"source": _words(draw, 9), "target": _words(draw, 5)} for _ in range(count)])


def preferences(folder: Path, kind: str, count: int = 43) -> Path:
    """Write prompts with two answers, of which one is too long; return the folder."""
    draw = np.random.default_rng(count)
    rows = [
        {"prompt": _words(draw, 4), "chosen": f"good {_words(draw, 4)}", "rejected": f"bad {_words(draw, 4)}"}
        for _ in range(count)
    ]
    rows[LONG]["chosen"] = "good" * 40
    return _write(folder, kind, rows)


def picture(draw: np.random.Generator, colour: int) -> bytes:
    """Return a png file of noise that is brightest in one channel."""
    pixels = draw.integers(0, 80, (9, 12, 3), np.uint8)
    pixels[..., colour] += 100
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def pictures(folder: Path, kind: str, count: int = 43) -> Path:
    """Write pictures with their classes: by number and as png and cls in tar files, else by name; return the folder."""
    draw = np.random.default_rng(count)
    classes = draw.integers(0, 3, count).tolist()
    files = [picture(draw, each) for each in classes]
    folder.mkdir(parents=True)
    for shard in range(5):
        here = range(shard, count, 5)
        if kind == "tar":
            members = [(f"{i:03}.png", files[i]) for i in here], [(f"{i:03}.cls", b"%d" % classes[i]) for i in here]
            write_members(folder / f"part-{shard}.tar", [each for pair in zip(*members, strict=True) for each in pair])
        else:
            columns = {"image": [files[i] for i in here], "label": [COLOURS[classes[i]] for i in here]}
            parquet.write_table(pa.table(columns), folder / f"part-{shard}.parquet", row_group_size=4)
    return folder
