"""What is computed from data once and kept on disk, in the cache of Hugging Face datasets."""

import contextlib
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.distributed.environment import is_main_process
from app.errors import UserError
from app.rundir.atomic import drafted

SECONDS_KEPT = 24 * 3600
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}


def cache_folder() -> Path:
    """Return the folder of the cache that is ours; HF_DATASETS_CACHE moves it."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "samestep"


def fingerprint(*parts: object) -> str:
    """Hash the text of the parts to 32 hexadecimal digits."""
    import xxhash

    hasher = xxhash.xxh3_128()
    for part in parts:
        data = str(part).encode("utf-8", "surrogatepass")
        hasher.update(f"{len(data)}:".encode() + data)
    return hasher.hexdigest()


def with_labels(rows: str, labels: "np.ndarray | None") -> str:  # noqa: F821
    """Add the hash of labels to that of the rows that have them."""
    import numpy as np
    import xxhash

    return f"{rows}-{xxhash.xxh3_64(b'' if labels is None else np.ascontiguousarray(labels)).hexdigest()}"


def cache_of(paths: Sequence[str]) -> Path:
    """Return the cache folder of files, or of a folder, as they are now: its name is a hash of what is there.

    The caches of datasets would be found by the files' times alone, or, for a folder with a card, by the folder's last
    name. What earlier versions of the same data left goes a day after its last use: until then a run may be reading it.
    """
    parent = cache_folder() / "tables" / fingerprint(*map(os.path.abspath, paths))
    folder = parent / fingerprint(*(part for path in paths for part in _listing(path)))
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    with contextlib.suppress(OSError):  # another process may remove the same
        for other in parent.iterdir():
            if time.time() - other.stat().st_mtime > SECONDS_KEPT:
                shutil.rmtree(other, ignore_errors=True)
    return folder


def remember(file: Path, compute: Callable[[], Any]) -> Any:
    """Return what compute() returned when it was first asked, as JSON keeps it; it is kept in the file."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(file.read_text())
    value = compute()
    with drafted(file, unique=True) as draft:
        draft.write_text(json.dumps(value))
    return value


def made_once(folder: Path, make: Callable[[Path], Any]) -> Path:
    """Return a folder that make(draft) fills where it is missing; it is renamed when it is whole.

    Drafts of processes that were killed go a day after they were last written to.
    """
    if not folder.exists():
        for left in folder.parent.glob(f"{folder.name}.*.tmp"):
            with contextlib.suppress(OSError):  # another process may remove the same
                newest = max(path.stat().st_mtime for path in (left, *left.iterdir()))
                if time.time() - newest > SECONDS_KEPT:
                    shutil.rmtree(left, ignore_errors=True)
        try:
            with drafted(folder, unique=True) as draft:
                draft.mkdir(parents=True)
                make(draft)
        except OSError:
            if not folder.exists():  # else another process was first, with the same
                raise
    return folder


def _listing(path: str) -> list[tuple]:
    """List the files at a path, links followed: name, size and time of change of each."""
    if not os.path.isdir(path):
        status = os.stat(path)
        return [(os.path.abspath(path), status.st_size, status.st_mtime_ns)]
    files, seen = [], set()
    for folder, folders, names in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        # A link may lead back up. Folders such as .git and .cache hold no data.
        folders[:] = sorted(name for name in folders if real not in seen and not name.startswith("."))
        seen.add(real)
        for name in sorted(names):
            file = os.path.join(folder, name)
            if os.path.exists(file):  # a link may lead nowhere
                files.append((os.path.abspath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns))
    return files


@contextlib.contextmanager
def using_cache():
    """Show progress bars on the main process's terminal alone, and explain a cache that cannot be written."""
    import datasets

    shown = is_main_process() and sys.stderr.isatty()
    silence = not shown and not datasets.utils.are_progress_bars_disabled()
    if silence:
        datasets.disable_progress_bars()
    try:
        yield
    except Exception as error:
        if cause := _cannot_write(error):
            raise UserError(
                f"cannot write to the data cache {datasets.config.HF_DATASETS_CACHE} ({cause.strerror}): make room, or "
                "set HF_DATASETS_CACHE to a folder that can be written"
            ) from error
        raise
    finally:
        if silence:
            datasets.enable_progress_bars()


def _cannot_write(error: BaseException | None) -> OSError | None:
    while error is not None:
        if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
            return error
        error = error.__cause__ or error.__context__
    return None
