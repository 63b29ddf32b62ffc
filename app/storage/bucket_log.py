"""A file that grows, in a bucket, which has no appending: parts that are joined when they are read.

    metrics.jsonl                                what it began with, and all of it once it is closed
    metrics.jsonl.log-parts/00000003-00000000    the third log of this name: part 0, with what it began with
    metrics.jsonl.log-parts/00000003-00000001    part 1

The newest log that has its part 0 is the file's contents; where there is none, the file itself is. The last part
grows: it is written again, over the version that this process wrote, until it is large enough. So each `append` is seen
at once and whole, a log has few parts, and a process that has lost its log to another one is told.
"""

import errno
import io
import os
import re
from itertools import groupby
from typing import BinaryIO, NamedTuple

from app.storage.interface import Changed, Log
from app.storage.objects import ABSENT, About, Objects

PARTS = ".log-parts"
"""How the folder of a log's parts is called after its file."""
_FULL = 256 << 10  # bytes from which on a part grows no more
_PART = re.compile(r"(\d{8})-(\d{8})")
_TRIES = 5


class _Parts(NamedTuple):
    """The parts of one log, in order."""

    number: int
    """Which log of this name it is; 0 where there is none."""
    objects: list[About]


class _Doubt(NamedTuple):
    """A write that failed, but may have been done."""

    part: int
    before: bytes
    """What the part held without it."""
    content: bytes


def _newest(objects: Objects, key: str) -> _Parts:
    """List the parts of the newest log that has its part 0, as far as they go on without a gap."""
    stored = [(match, each) for each in objects.below(key + PARTS) if (match := _PART.fullmatch(_name(each.key)))]
    newest = _Parts(0, [])
    for number, group in groupby(stored, lambda pair: int(pair[0][1])):
        parts = [each for place, (match, each) in enumerate(group) if int(match[2]) == place]
        if parts:
            newest = _Parts(number, parts)
    return newest


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def parts_of(objects: Objects, key: str) -> list[str]:
    """List the keys of all parts that lie beside a file; part 0 of each log first, as nothing is read without it."""
    return sorted(
        (each.key for each in objects.below(key + PARTS)), key=lambda key: (not key.endswith("-00000000"), key)
    )


def read_log(objects: Objects, key: str, start: int = 0) -> BinaryIO:
    """Read a log, from a byte on; parts that lie before it are not fetched."""
    problem: Exception | None = None
    for _ in range(_TRIES):
        try:
            return io.BytesIO(_joined(objects, key, start))
        except (FileNotFoundError, Changed) as error:  # it was closed or begun anew since its parts were listed
            problem = error
            if objects.head(key) is None:
                break
    if isinstance(problem, Changed):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), objects.url(key))
    assert problem is not None
    raise problem


def _joined(objects: Objects, key: str, start: int) -> bytes:
    parts = _newest(objects, key).objects
    if not parts:
        about = objects.head(key)
        if about is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), objects.url(key))
        parts = [about]
    elif objects.head(key) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), objects.url(key))
    pieces, begin = [], 0
    for part in parts:
        if begin + part.size > start:
            # Not by its tag: meanwhile the last part may have grown, at its end.
            pieces.append(objects.get(part.key, max(start - begin, 0))[0])
        begin += part.size
    return b"".join(pieces)


class BucketLog(Log):
    """The newest log of a name, as its one writer has it."""

    def __init__(self, objects: Objects, key: str, content: bytes):
        """Begin it with `content`, in place of what is there."""
        self._objects, self._key = objects, key
        before = parts_of(objects, key)
        numbers = [int(match[1]) for each in before if (match := _PART.fullmatch(_name(each)))]
        self._log, self._part, self._last = max(numbers, default=0) + 1, 0, content
        self._doubt: _Doubt | None = None
        if objects.head(key) is None:
            objects.put(key, content)
        self._version = objects.put(self._part_key(0), content, over=ABSENT)
        objects.delete(before)  # from here on nobody reads them

    def _part_key(self, part: int) -> str:
        return f"{self._key}{PARTS}/{self._log:08d}-{part:08d}"

    def append(self, data: bytes) -> None:
        self._settle()
        part, before, over = self._part, self._last, self._version
        if len(before) >= _FULL:
            self._check_last()
            part, before, over = part + 1, b"", ABSENT
        try:
            version = self._objects.put(self._part_key(part), before + data, over)
        except (Changed, FileExistsError):
            raise self._taken_away() from None
        except OSError:
            self._doubt = _Doubt(part, before, before + data)
            raise
        self._part, self._last, self._version = part, before + data, version

    def _check_last(self) -> None:
        last = self._objects.head(self._part_key(self._part))
        if last is None or last.version != self._version:
            raise self._taken_away()

    def _settle(self) -> None:
        """Find out whether a write that failed was done after all; the next one then takes its bytes back."""
        if self._doubt is None:
            return
        part, before, content = self._doubt
        about = self._objects.head(self._part_key(part))
        if about is not None and self._objects.get(about.key, tag=about.tag)[0] == content:
            self._part, self._last, self._version = part, before, about.version
        self._doubt = None

    def _taken_away(self) -> OSError:
        url = self._objects.url(self._key)
        return FileNotFoundError(errno.ENOENT, "somebody has taken the file away, or begun it anew", url)

    def close(self) -> None:
        """Make one file of the parts, unless somebody has taken them away. It may be called twice."""
        newest = _newest(self._objects, self._key)
        if newest.number != self._log or newest.objects[-1].version != self._version:
            return
        content = b"".join(self._objects.get(each.key)[0] for each in newest.objects)
        self._objects.put(self._key, content)
        for part in parts_of(self._objects, self._key):  # part 0 first: without it the file itself is read
            self._objects.delete([part])
