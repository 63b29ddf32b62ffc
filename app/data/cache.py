"""What is computed from data once and kept on disk, in the cache of Hugging Face datasets."""

import contextlib
import errno
import sys
from pathlib import Path

from app.errors import UserError
from app.launch import is_main_process

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
