"""Files and folders that are whole whenever somebody sees them: written under another name, then renamed."""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_RANDOM = 8  # bytes in the name of a draft
DRAWN = rf"\.[0-9a-f]{{{2 * _RANDOM}}}"
"""What is drawn in the name of a draft, as a regular expression."""
DRAFT = rf"({DRAWN})?\.tmp"
"""How the name of a draft goes on after that of its file, as a regular expression. Earlier versions drew nothing."""


def draft_of(path: Path) -> Path:
    """Return a new name, next to `path`, under which a file or folder is written before it is called `path`.

    It is random. Nobody can put a link in its place, as nobody can foretell it; and several processes may write the
    same thing at once, also those of two containers that share a disk and have the same number and host name.
    """
    return path.with_name(f"{path.name}.{secrets.token_hex(_RANDOM)}.tmp")


def drafts_of(path: Path) -> list[Path]:
    """List the drafts of a file or folder that are there: of this process, of others, or of some that were killed."""
    name = re.compile(re.escape(path.name) + DRAFT)
    try:
        return [other for other in path.parent.iterdir() if name.fullmatch(other.name)]
    except OSError:
        return []


def is_draft(name: str) -> bool:
    """Tell whether a name is that of a draft of anything."""
    return re.fullmatch(f".+{DRAFT}", name) is not None


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
def drafted(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield the name of a draft, which takes the name `path` when the block succeeds and is deleted when it fails.

    A link that is called `path` is replaced, and not followed.

    Args:
        durable: of a file: after a power failure, `path` is the old file or the new one, never an empty one.
    """
    draft = draft_of(path)
    try:
        yield draft
        if durable:
            flush(draft)
            publish(draft, path)
        else:
            draft.rename(path)
    except BaseException:
        delete(draft)
        raise


def write(path: Path, data: bytes | str, durable: bool = False) -> None:
    """Write a file so that readers see all of the old one or all of the new one; `durable` as in `drafted`."""
    with drafted(path, durable) as draft:
        draft.write_bytes(data.encode() if isinstance(data, str) else data)


def delete_folder(path: Path) -> None:
    """Rename a folder, then delete it, so that no half-deleted folder is called `path`."""
    gone = draft_of(path)
    with contextlib.suppress(OSError):
        path.rename(gone)
    delete(gone)


def delete(path: Path) -> None:
    """Delete a file, a folder or a link, but never what a link leads to; where that fails, leave it."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
