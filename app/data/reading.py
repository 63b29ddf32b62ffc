"""Files of data: how texts are opened, and what is wrong with a file that cannot be read, in words for the user."""

import contextlib
import difflib
import json
import logging
import lzma
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.config.file_kinds import head_of, mistaken
from app.config.text_files import UNREADABLE, why
from app.config.text_files import open_text as open_text  # for the readers of data
from app.config.text_files import refuse_other_encodings as refuse_other_encodings
from app.data.cache import cannot_write
from app.data.folders import is_hidden
from app.errors import UserError
from app.storage.addresses import address

DAMAGE = (*UNREADABLE, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)
"""What readers raise for files that are cut, damaged, of another format, folders, or may not be read.

Libraries with further errors of their own name them to `reading`.
"""


class UnreadableError(ValueError):
    """A file cannot be read, in the words of those who do not know the flag that gave it; see `explained`."""

    def __init__(self, file: str, reason: str):
        """Name the file, and say why."""
        super().__init__(f"{file}: cannot be read: {reason}")
        self.file, self.reason = file, reason

    def told(self, flag: str, path: str) -> UserError:
        """Return the error for the user, who has given the file, or the folder or list that it is in."""
        return UserError(f"{flag} {self}" if self.file == path else f"{flag} {path}: {self}")


def read_text(flag: str, file: str | Path) -> str:
    """Return the whole of a text file.

    Raises:
        UserError: it cannot be read; the message has the flag that gave it, its name, and why.
    """
    with reading(flag, file), open_text(file) as stream:
        return stream.read()


def read_json(flag: str, file: str | Path) -> Any:
    """Return what a json file holds; raises as `read_text`."""
    with reading(flag, file, RecursionError):
        return json.loads(read_text(flag, file))


def read_fields(flag: str, file: str | Path) -> dict[str, Any]:
    """Return the fields of a json file that is one object; raises as `read_text`."""
    content = read_json(flag, file)
    if not isinstance(content, dict):
        raise unreadable(flag, str(file), ValueError(f"it holds {content!r:.60}, and no object with fields"))
    return content


def read_whole(file: str | Path) -> str:
    """Return the whole of a text file that no flag names by itself, such as one of a folder's.

    Raises:
        UnreadableError: it cannot be read.
    """
    with naming(file), open_text(file) as stream:
        return stream.read()


def read_lines(file: str | Path) -> list[str]:
    """Return the lines of a text file without their ends, as `read_whole`."""
    return read_whole(file).split("\n")


def refuse_url(flag: str, path: str) -> None:
    """Raise a UserError for a URL, where data are read from disks alone."""
    if address(path) is not None:
        raise UserError(f"{flag} {path}: URLs are not read here: copy the data to a disk")


@contextlib.contextmanager
def naming(file: str | Path, *more: type[BaseException]) -> Iterator[None]:
    """Turn whatever a file's reader raises because of the file into an UnreadableError.

    This is for readers that do not know the flag; whoever knows it calls them inside of `explained`.

    Args:
        more: further types of errors, a library's own.
    """
    damage: tuple[type[BaseException], ...] = (*DAMAGE, *more)
    try:
        yield
    except UnreadableError:
        raise
    except damage as error:
        raise UnreadableError(str(file), _reason(str(file), error)) from error


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
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir() if not is_hidden(entry.name))
    close = difflib.get_close_matches(Path(path).name, names, n=3, cutoff=0.6)
    shown = close + [name for name in names if name not in close and not only_close]
    if only_close and not close:
        return ""
    if not shown:
        return f"; {folder} is empty"
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"; {folder} has {', '.join(shown[:8])}{more}"


def unreadable(flag: str, path: str, error: BaseException, advice: str = "", head: bytes | None = None) -> UserError:
    """Return the UserError for data that their reader refuses, with the reader's reason, or with what they really are.

    Args:
        advice: what the user can do, to end the message with.
        head: the first bytes of a file that is not on a disk.
    """
    return UserError(f"{flag} {path}: cannot be read: {_reason(path, error, head)}{advice and f'; {advice}'}")


def _reason(file: str, error: BaseException, head: bytes | None = None) -> str:
    """Say why a file cannot be read: it is something else than its name says, or else what its reader says."""
    return mistaken(file, head_of(file) if head is None else head) or why(error)


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
        if cannot_write(error) or (told := _explanation(error, flag, path)) is None:
            raise
        raise told from error
    finally:
        readers.setLevel(level)


def _explanation(error: Exception, flag: str, path: str) -> UserError | None:
    import datasets
    import pyarrow
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, datasets.exceptions.DatasetGenerationError):
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if not isinstance(error, UserError | UnreadableError):
            return unreadable(flag, path, error)
    if isinstance(error, UserError):
        return error
    if isinstance(error, UnreadableError):
        return error.told(flag, path)
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
    if "corresponds to no data" in line:
        return UserError(f"{flag} {path} is empty: it has no rows")
    if "same data file format for all splits" in line:
        return UserError(
            f"{flag} {path}: its files have several formats: name those to read, of one format"
            f"{near(str(Path(path, '*')))}"
        )
    if isinstance(error, ValueError | FileNotFoundError) and not isinstance(error, pyarrow.ArrowException):
        fix = "; choose one with --data.name" if "config" in line.lower() else ""
        return UserError(f"{flag} {path}: {line}{fix}")
    if isinstance(error, (*DAMAGE, pyarrow.ArrowException)):
        return unreadable(flag, path, error)
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


def is_number(text: str) -> bool:
    """Tell whether a field of a text file is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
