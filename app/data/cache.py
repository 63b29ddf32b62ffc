"""Results that are computed from data once, and kept on disk in the cache of Hugging Face datasets."""

import contextlib
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.distributed.environment import is_main_process
from app.errors import UserError
from app.sampling.hashing import hash_of_bytes, key_of
from app.storage.drafts import drafted

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset, Features

SECONDS_KEPT = 24 * 3600
FULL = {errno.ENOSPC, errno.EDQUOT}
"""Numbers of errors that only writing can have."""


def cache_folder() -> Path:
    """Return this project's folder in the cache, which HF_DATASETS_CACHE moves."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "samestep"


def with_labels(rows: str, labels: "np.ndarray | None") -> str:
    """Add the hash of labels to the hash of the rows that have them."""
    return f"{rows}-{hash_of_bytes([] if labels is None else [labels], bits=64)}"


def cache_of(paths: Sequence[str]) -> Path:
    """Return the cache folder of files, or of a folder, in their present state.

    Its name is a hash of the files' names, sizes and times of change. datasets finds its own caches by the files' times
    alone, or, for a folder with a card, by the folder's last name. The cache of an earlier state is removed a day after
    its last use: until then a run may read it.
    """
    parent = cache_folder() / "tables" / key_of(*map(os.path.abspath, paths))
    folder = parent / key_of(*(part for path in paths for part in _listing(path)))
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    with contextlib.suppress(OSError):  # another process may remove the same
        for other in parent.iterdir():
            if time.time() - other.stat().st_mtime > SECONDS_KEPT:
                shutil.rmtree(other, ignore_errors=True)
    return folder


def remember(file: Path, compute: Callable[[], Any]) -> Any:
    """Return the result of compute() that a file keeps as JSON; compute and keep it if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(file.read_text())
    value = compute()
    with drafted(file) as draft:
        draft.write_text(json.dumps(value))
    return value


def made_once(folder: Path, make: Callable[[Path], Any]) -> Path:
    """Return a folder; if it is missing, let make(draft) fill a draft of it, which is renamed when it is complete.

    Drafts of processes that were killed are removed a day after they were last written to.
    """
    if not folder.exists():
        for left in folder.parent.glob(f"{folder.name}.*.tmp"):
            with contextlib.suppress(OSError):  # another process may remove the same
                newest = max(path.stat().st_mtime for path in (left, *left.iterdir()))
                if time.time() - newest > SECONDS_KEPT:
                    shutil.rmtree(left, ignore_errors=True)
        try:
            with drafted(folder) as draft:
                draft.mkdir(parents=True)
                make(draft)
        except OSError:
            if not folder.exists():  # else another process was first, with the same
                raise
    return folder


def written_once(
    place: Path, features: "Features", parts: "Iterable[pa.Table]", reader: str, split: str
) -> "Dataset | None":
    """Write parts of a table into a file as Arrow, unless it is there, and map it; none if the table has no rows.

    Args:
        place: the file, whose name and folder say what it holds.
        reader: the format that the table was read from, such as json.
        split: the name of the table among others of its data.
    """
    import datasets
    import pyarrow as pa

    if not place.exists():
        with drafted(place) as draft, pa.ipc.new_stream(str(draft), features.arrow_schema) as sink:
            for part in parts:
                sink.write_table(part)
    info = datasets.DatasetInfo(features=features, builder_name=reader)
    table = datasets.Dataset.from_file(str(place), info=info, split=datasets.Split(split))
    table._fingerprint = key_of(place.parent.name, place.name)
    return table if len(table) else None


def _listing(path: str) -> list[tuple]:
    """List the files at a path, following links: name, size and time of change of each."""
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
def using_cache() -> Iterator[None]:
    """Show progress bars only on the main process's terminal, and explain why a cache cannot be written."""
    import datasets

    shown = is_main_process() and sys.stderr.isatty()
    silence = not shown and not datasets.utils.are_progress_bars_disabled()
    if silence:
        datasets.disable_progress_bars()
    try:
        yield
    except UserError:  # of a file that cannot be read, for example, for want of a permission too
        raise
    except Exception as error:
        if cause := cannot_write(error):
            raise UserError(
                f"cannot write to the data cache {datasets.config.HF_DATASETS_CACHE} ({cause.strerror}): make room, or "
                "set HF_DATASETS_CACHE to a folder that can be written"
            ) from error
        raise
    finally:
        if silence:
            datasets.enable_progress_bars()


def cannot_write(error: BaseException | None) -> OSError | None:
    """Return the error that the cache cannot be written, if it is what led to another one."""
    import datasets

    cache = os.path.abspath(datasets.config.HF_DATASETS_CACHE)
    while error is not None:
        if isinstance(error, OSError):
            # Files of data, too, may be denied: only the name tells the two apart. It is one in the cache, or that of a
            # folder that would hold the cache and cannot be made.
            name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
            file = name and os.path.abspath(name)
            if error.errno in FULL or (file and os.path.commonpath([file, cache]) in (file, cache)):
                return error
        error = error.__cause__ or error.__context__
    return None
