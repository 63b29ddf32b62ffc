"""Opening the text files that a user gives: data, points of a schedule, settings."""

import codecs
import gzip
import io
import zlib
from pathlib import Path
from typing import TextIO, cast

from app.config.file_kinds import HEAD, kind_of, mistaken

LONGEST = 100
"""Letters of a name or text in an error."""
NO_MARKUP = (".csv", ".tsv", ".json", ".jsonl", ".yaml", ".yml", ".names", "classes.txt")
"""How names of texts end that are no page, however they begin."""
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""The bytes that such files begin with."""
UNREADABLE = (OSError, ValueError, EOFError, zlib.error)
"""What opening and reading a text file raise where it cannot be read."""


def open_text(file: str | Path, newline: str | None = None) -> TextIO:
    """Open a text file, also one that gzip compressed: UTF-8, and no byte order mark becomes part of a word.

    Raises:
        OSError, EOFError, zlib.error: it cannot be opened, or is damaged, which may also show while it is read.
        ValueError: it is UTF-16, or no text, or a page of the web in place of a table.
    """
    stream = cast(io.BufferedReader, (gzip.open if str(file).lower().endswith(".gz") else open)(file, "rb"))
    try:
        head = stream.peek(HEAD)[:HEAD]
        refuse_other_encodings(head)
        if str(file).lower().removesuffix(".gz").endswith(NO_MARKUP) and (told := mistaken("", head)):
            raise ValueError(told)
    except BaseException:
        stream.close()
        raise
    return io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)


def refuse_other_encodings(head: bytes) -> None:
    """Refuse the first bytes of UTF-16 and UTF-32, which without a mark could pass for text with zeros between.

    Raises:
        ValueError: they are such, or those of a file that is no text.
    """
    if (kind := kind_of(head)) is not None and not kind.is_text:
        raise ValueError(f"it is {kind.what}, and no text: {kind.fix}")
    if head.startswith(UTF16) or b"\0" in head:
        written = "utf16" if head.startswith(UTF16) else "utf-16le"
        raise ValueError(f"it holds bytes as UTF-16 does, or is no text; {converted_from(written)}")


def converted_from(encoding: str) -> str:
    """Say what to do with a file in another encoding."""
    return f"it must be UTF-8: convert it, for example with iconv -f {encoding} -t utf8"


def why(error: BaseException) -> str:
    """Say in one line why a file cannot be read."""
    if isinstance(error, OSError) and error.strerror:  # its text has the name of the file once more
        return error.strerror
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if isinstance(error, UnicodeEncodeError):  # half a letter, as a name of bytes that are not UTF-8 has too
        return (
            f"{error.object[-LONGEST:]!r} has letters that are not UTF-8: rename the file or folder (zip files of "
            "other systems unpack to such names), or mend the text"
        )
    if isinstance(error, UnicodeDecodeError):
        reason += f"; {converted_from('utf16' if error.object[:2] in UTF16 else 'latin1')}"
    return reason
