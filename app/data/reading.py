"""Files of data: how texts are opened, and what is wrong with a file that cannot be read, in words for the user."""

import codecs
import contextlib
import difflib
import gzip
import logging
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from app.errors import UserError

DAMAGE = (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)
"""What readers raise for files that are cut, damaged, of another format, folders, or may not be read.

Libraries with further errors of their own name them to `reading`.
"""


def open_text(file: str | Path, newline: str | None = None) -> TextIO:
    """Open a text file of data, also one that gzip compressed: UTF-8, and no byte order mark becomes part of a word."""
    opened = gzip.open if str(file).lower().endswith(".gz") else open
    return opened(file, "rt", encoding="utf-8-sig", newline=newline)


def read_text(flag: str, file: str | Path) -> str:
    """Return the whole of a text file.

    Raises:
        UserError: it cannot be read; the message has the flag that gave it, its name, and why.
    """
    with reading(flag, file), open_text(file) as stream:
        return stream.read()


@contextlib.contextmanager
def reading(flag: str, file: str | Path, *more: type[BaseException], advice: str = "") -> Iterator[None]:
    """Turn whatever a file's reader raises because of the file into a UserError with the file's name.

    Args:
        flag: the one that gave the file, or what the file is.
        more: further types of errors, a library's own.
        advice: what the user can do, to end the message with.
    """
    damage: tuple[type[BaseException], ...] = (*DAMAGE, *more)
    try:
        yield
    except damage as error:
        raise unreadable(flag, str(file), error, advice) from error


def near(path: str, only_close: bool = False) -> str:
    """List what the folder of a path that does not exist has, similar names first: a clause to end a message with."""
    folder = Path(path).absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith("."))
    close = difflib.get_close_matches(Path(path).name, names, n=3, cutoff=0.6)
    shown = close + [name for name in names if name not in close and not only_close]
    if only_close and not close:
        return ""
    if not shown:
        return f"; {folder} is empty"
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"; {folder} has {', '.join(shown[:8])}{more}"


def unreadable(flag: str, path: str, error: BaseException, advice: str = "") -> UserError:
    """Return the UserError for data that their reader refuses, with the reader's reason."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:  # its text has the name of the file once more
        reason = error.strerror
    if isinstance(error, UnicodeDecodeError):
        written = "utf16" if error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin1"
        reason += f"; it must be UTF-8: convert it, for example with iconv -f {written} -t utf8"
    return UserError(f"{flag} {path}: cannot be read: {reason}{advice and f'; {advice}'}")


@contextlib.contextmanager
def explained(flag: str, path: str) -> Iterator[None]:
    """Turn the errors of datasets about data that it cannot find or read into a UserError."""
    # Its own report of a broken file would come in addition to ours.
    readers = logging.getLogger("datasets.packaged_modules")
    level = readers.level
    readers.setLevel(logging.CRITICAL)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (told := _explanation(error, flag, path)) is None:
            raise
        raise told from error
    finally:
        readers.setLevel(level)


def _explanation(error: Exception, flag: str, path: str) -> UserError | None:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    not_here = f"{flag} {path}: not a file or folder here{near(path, only_close=True)}"
    line = " ".join(str(error).split())
    if _unreachable(error):
        return UserError(
            f"{not_here}; and the Hub cannot be reached. Offline, set HF_HUB_OFFLINE=1 to use the data in the cache; "
            f"or run `hf download {path} --repo-type dataset --local-dir FOLDER` where there is a network, and give "
            f"{flag} FOLDER"
        )
    if isinstance(error, datasets.exceptions.DatasetNotFoundError | HfHubHTTPError):
        return UserError(f"{not_here}; {line}")
    if isinstance(error, UnicodeDecodeError):
        return unreadable(flag, path, error)
    if isinstance(error, datasets.exceptions.DatasetGenerationError):
        return unreadable(flag, path, error.__cause__ or error)
    if "corresponds to no data" in line:
        return UserError(f"{flag} {path} is empty: it has no rows")
    if "same data file format for all splits" in line:
        return UserError(
            f"{flag} {path}: its files have several formats: name those to read, for example {flag} "
            f"{path}/train.tsv --data.eval-path {path}/dev.tsv"
        )
    if isinstance(error, ValueError | FileNotFoundError):
        fix = "; choose one with --data.name" if "config" in line.lower() else ""
        return UserError(f"{flag} {path}: {line}{fix}")
    return None


def _unreachable(error: BaseException | None) -> bool:
    """Tell whether the Hub cannot be reached, which datasets reports inside other errors."""
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # the library that it uses: httpx2 since 2.4, httpx before

    while error is not None:
        if isinstance(error, ConnectionError | httpx.TransportError | OfflineModeIsEnabled):
            return True
        error = error.__cause__ or error.__context__
    return False
