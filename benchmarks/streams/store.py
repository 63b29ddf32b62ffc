"""A store over http for the benchmarks: moto, as the tests run it, with what counts requests in front of it."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from app import storage

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.buckets import BUCKET, SIGNED, environment, moto

__all__ = ["BUCKET", "SIGNED", "running", "upload"]


@contextlib.contextmanager
def running(log: Path) -> Iterator[str]:
    """Run a store that this process finds; yield the URL of its bucket."""
    with moto(log) as endpoint:
        os.environ.update(environment(endpoint))
        yield f"{endpoint}/{BUCKET}"


def upload(folder: Path, name: str) -> None:
    """Put the files of a folder into the bucket, below a name."""
    target = storage.at(f"s3://{BUCKET}/{name}")
    for file in sorted(folder.iterdir()):
        target.write(file.name, file.read_bytes(), durable=True)
