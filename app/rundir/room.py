"""Room on a disk: how much there is, and what is said where it does not suffice."""

import re
from pathlib import Path

from app import storage

_CODED = re.compile(r"\(os error (\d+)\)")  # how libraries in Rust, such as safetensors, end the text of an OSError
_MIB = 2**20


def why(error: BaseException) -> str:
    """Say why a file could not be written, as the system says; empty for an error of another kind."""
    if isinstance(error, OSError) and error.errno is not None:  # transformers raises others without a number
        return error.strerror or str(error)
    text = str(error)
    return text.rpartition(": ")[2].partition(" (os error")[0] if _CODED.search(text) else ""


def free(folder: Path) -> int | None:
    """Return the free bytes of the disk that a folder is on, or will be; None if nobody knows."""
    return storage.at(folder).free()


def lacking(needed: int, folder: Path) -> str:
    """Say what is needed in a folder and what its disk has, in a clause; empty where that suffices."""
    there = free(folder)
    if there is None or there >= needed:
        return ""
    return f": it needs {_amount(needed)}, and {folder} has {_amount(there)} free"


def _amount(count: int) -> str:
    return f"{count:,} bytes ({count / _MIB:,.1f} MiB)"
