"""Refuse changes of files for a block: a recipe's body runs there on tensors that have no contents to write."""

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_closed = False  # whether writing files is refused: an audit hook, which cannot be removed, looks here
_CHANGES = {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


@contextmanager
def writing_nothing() -> Iterator[None]:
    """Raise PermissionError when this block would change a file: its tensors have no contents to write."""
    import torch

    global _closed
    zipped = torch.serialization._open_zipfile_writer

    def zip_to(place, *args):
        if isinstance(place, str | os.PathLike):
            _refuse(place)
        return zipped(place, *args)

    # torch.save opens files in C++, where no audit hook sees it (a private name of torch 2.11 to 2.13). safetensors
    # refuses such tensors itself.
    torch.serialization._open_zipfile_writer = zip_to
    _watch_files()
    _closed = True
    try:
        yield
    finally:
        _closed = False
        torch.serialization._open_zipfile_writer = zipped


@functools.cache
def _watch_files() -> None:
    """Install an audit hook that sees every change of a file by Python; once, because it can never be removed."""

    def hear(event: str, args: tuple) -> None:
        if not _closed or event not in _CHANGES or isinstance(args[0], int):
            return
        if event != "open" or (args[2] & (os.O_WRONLY | os.O_RDWR) and not str(args[0]).startswith("/dev/")):
            _refuse(args[0])

    sys.addaudithook(hear)


def _refuse(place: Any) -> None:
    raise PermissionError(f"the loop would change {os.fsdecode(place)}, and a dry run changes no files")
