"""Files and folders that are whole whenever somebody sees them: written under another name, then renamed."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


def draft_of(path: Path, unique: bool = False) -> Path:
    """Return the name, next to `path`, under which a file or folder is written before it is called `path`.

    Args:
        unique: make a name that nobody else uses, where several processes may write the same thing at once. It is
            random: the processes of two containers that share a disk may have the same number and host name.
    """
    middle = f".{secrets.token_hex(8)}" if unique else ""
    return path.with_name(f"{path.name}{middle}.tmp")


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(draft: Path, path: Path) -> None:
    """Rename a finished draft, and wait until its new name is on disk. The caller has flushed its contents."""
    draft.rename(path)
    flush(path.parent)


@contextlib.contextmanager
def drafted(path: Path, unique: bool = False, durable: bool = False) -> Iterator[Path]:
    """Yield the name of a draft, which takes the name `path` when the block succeeds and is deleted when it fails.

    Args:
        unique: see `draft_of`.
        durable: of a file: after a power failure, `path` is the old file or the new one, never an empty one.
    """
    draft = draft_of(path, unique)
    try:
        if draft.is_dir():  # left by a process that was killed
            shutil.rmtree(draft)
        yield draft
        if durable:
            flush(draft)
            publish(draft, path)
        else:
            draft.rename(path)
    except BaseException:
        _delete(draft)
        raise


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Write a file so that readers see all of the old text or all of the new one; `durable` as in `drafted`."""
    with drafted(path, durable=durable) as draft:
        draft.write_text(text)


def delete_folder(path: Path) -> None:
    """Rename a folder, then delete it, so that no half-deleted folder is called `path`."""
    gone = draft_of(path, unique=True)
    with contextlib.suppress(OSError):
        path.rename(gone)
    _delete(gone)


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
