"""A small object by which one process holds a folder of a bucket, written only over the version that was seen last."""

import errno
import json
import os
import threading
from pathlib import Path

from app.storage.interface import Changed, Lease, Mark
from app.storage.local import flock
from app.storage.objects import ABSENT, Objects

_LARGEST = 10_000  # bytes


class BucketLease(Lease):
    """An object with the holder's text and a number that grows with each renewal.

    The time of an object's change is in whole seconds, and its ETag follows its contents: without the number two
    renewals would look alike. Processes of one machine see each other by a lock on a local file as well, because the
    bucket cannot tell a holder that works on from one that was killed.
    """

    def __init__(self, objects: Objects, key: str, local: Path):
        """Look after an object. `local`: the file that processes of this machine lock."""
        self._objects, self._key, self._local = objects, key, local
        self._descriptor: int | None = None
        self._seen = ABSENT  # the version that was read last, whoever wrote it
        self._ours, self._text, self._renewals = "", "", 0  # what this process wrote last
        self._writing = threading.Lock()  # a thread renews it while another one clears it

    def take(self) -> bool | None:
        self._objects.check_writable()
        if any(True for _ in self._objects.below(self._key)):
            raise FileExistsError(errno.EEXIST, "is not a file", self._objects.url(self._key))
        self._local.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._local, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if flock(self._descriptor) is False:
                self.close()
                return False
            return self._create()
        except BaseException:
            self.close()
            raise

    def _create(self) -> bool | None:
        try:
            self._seen = self._objects.put(self._key, _content("", 0), over=ABSENT)
            return True
        except FileExistsError:
            try:
                self.mark()
            except FileNotFoundError:  # deleted since
                self._seen = ABSENT
            return None

    def mark(self) -> Mark:
        data, about = self._objects.get(self._key, 0, _LARGEST)
        self._seen = about.version
        text, renewals = _parsed(data)
        return Mark(int(about.changed) * 10**9 + renewals % 10**9, text)

    def write(self, text: str) -> None:
        """See `Lease.write`.

        Raises:
            OSError: another process has written it since it was taken, or marked, last; or it is not kept.
        """
        self._taken()
        with self._writing:
            self._put(text, self._seen)

    def renew(self) -> None:
        with self._writing:
            if not self._ours:
                raise RuntimeError(f"{self._objects.url(self._key)} was not written")
            self._put(self._text, self._ours)

    def clear(self) -> None:
        self._taken()
        with self._writing:
            self._put("", self._ours or self._seen)

    def _put(self, text: str, over: str) -> None:
        try:
            version = self._objects.put(self._key, _content(text, self._renewals + 1), over)
        except (Changed, FileExistsError):
            what = "another process has taken it, or deleted it"
            raise OSError(errno.EBUSY, what, self._objects.url(self._key)) from None
        self._seen = self._ours = version
        self._text, self._renewals = text, self._renewals + 1

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _taken(self) -> None:
        if self._descriptor is None:
            raise RuntimeError(f"{self._objects.url(self._key)} was not taken")


def _content(text: str, renewals: int) -> bytes:
    return json.dumps({"text": text, "renewals": renewals}).encode()


def _parsed(data: bytes) -> tuple[str, int]:
    """Return text and number; what is no lease has its text and no number."""
    try:
        fields = json.loads(data)
        return str(fields["text"]), int(fields["renewals"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return data.decode(errors="replace"), 0
