"""What a file is by its first bytes: users meet files that are something else than their names say."""

from pathlib import Path
from typing import NamedTuple

HEAD = 1024
"""Bytes that show what a file is."""


class Kind(NamedTuple):
    """A kind of file that is mistaken for data."""

    begins: bytes
    """In lower case, where it is a text."""
    what: str
    """In words, to follow `it is`."""
    fix: str
    """What the user can do."""
    endings: tuple[str, ...] = ()
    """That its name rightly has."""
    is_text: bool = False
    """Its readers may take it for a text that says something."""


_PARQUET = Kind(b"PAR1", "a parquet file", "give its name the ending .parquet", (".parquet",))
_TAR = Kind(b"", "a tar file", "give its name the ending .tar, or unpack it", (".tar",))
_ERROR = Kind(b"<?xml", "the answer of a store that has refused it", "fetch the file again", (".xml",), is_text=True)
_PAGE = "a page of the web"
_AGAIN = "fetch the file itself, as by the link to its raw contents"
_KINDS = (
    Kind(b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS to a file", "fetch the file: git lfs pull"),
    # Excel's are such, and renamed to .csv.
    Kind(
        b"PK\x03\x04",
        "a zip file, as Excel's are too",
        "unpack it, or export the table as CSV UTF-8",
        (".zip", ".npz", ".xlsx", ".pt", ".bin", ".ckpt"),
    ),
    Kind(b"\x1f\x8b", "compressed by gzip", "unpack it, or let its name end with .gz", (".gz", ".tgz")),
    Kind(b"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it, or let its name end with .zst", (".zst",)),
    Kind(b"\xfd7zXZ\x00", "compressed by xz", "unpack it", (".xz",)),
    Kind(b"ARROW1\x00\x00", "an Arrow file", "write it as parquet", (".arrow", ".feather")),
    Kind(b"%PDF-", "a PDF document", "write what it holds as text", (".pdf",)),
    Kind(b"<!doctype html", _PAGE, _AGAIN, (".html", ".htm"), is_text=True),
    Kind(b"<html", _PAGE, _AGAIN, (".html", ".htm"), is_text=True),
)


def kind_of(head: bytes) -> Kind | None:
    """Return the kind of a file by its first bytes; None for data that are no kind of their own, such as text."""
    if b"\0" in head:  # otherwise they are letters of a text
        if head.startswith(_PARQUET.begins):
            return _PARQUET
        if head[257:262] == b"ustar":
            return _TAR
    begins = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if begins.startswith(_ERROR.begins):
        return _ERROR if b"<error>" in begins else None
    return next((kind for kind in _KINDS if (begins if kind.is_text else head).startswith(kind.begins)), None)


def mistaken(name: str, head: bytes) -> str:
    """Say what a file is by its first bytes, and what to do, if its name says something else; otherwise nothing."""
    kind = kind_of(head)
    if kind is None or Path(name).suffix.lower() in kind.endings:
        return ""
    return f"it is {kind.what}: {kind.fix}"


def head_of(file: str) -> bytes:
    """Return the first bytes of a file on a disk; nothing if it cannot be read."""
    try:
        with open(file, "rb") as stream:
            return stream.read(HEAD)
    except (OSError, ValueError):  # the latter for a name that no file can have
        return b""
