"""Whether a bucket can hold runs: credentials, conditions that keep two runs apart, and speed."""

import os
import secrets
import time
from collections.abc import Iterator

from app import storage
from app.commands.doctor.findings import NOTE, TROUBLE, Finding
from app.commands.output import size
from app.errors import UserError, whole_urls

_MOVED = 16 * 10**6
_SLOW = 10 * 10**6  # bytes a second


def folder(url: str) -> Iterator[Finding]:
    """Try to write into a folder of a bucket, and clean up afterwards."""
    name = f"store of {whole_urls(url)}"
    try:
        files = storage.at(url)
        files.make()
        files.probe()
        yield Finding(name, "takes files, and keeps the conditions of writes")
        yield _speed(files)
    except UserError as error:
        yield Finding(name, str(error), TROUBLE, "give --run.dir another store, or a disk")
    except OSError as error:
        fix = "give --run.dir a bucket that can be written; credentials come from the environment"
        yield Finding(name, error.strerror or str(error), TROUBLE, fix)


def _speed(files: storage.Storage) -> Finding:
    data, name = os.urandom(_MOVED), f".samestep-speed-{secrets.token_hex(8)}"
    try:
        began = time.perf_counter()
        files.write(name, data)
        up = _MOVED / (time.perf_counter() - began)
        began = time.perf_counter()
        same = files.read(name) == data
        down = _MOVED / (time.perf_counter() - began)
    finally:
        files.delete(name)
    if not same:
        return Finding("write and read", "what comes back is not what was sent", TROUBLE, "take another store")
    slow = up < _SLOW
    fix = "save less often (--run.save-every): a checkpoint goes up while training goes on" if slow else ""
    return Finding("write and read", f"{size(up)}/s up, {size(down)}/s down", NOTE if slow else "ok", fix)
