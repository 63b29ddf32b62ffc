"""What a run needs of the place where its files live, in terms that a local disk and a bucket both have.

A bucket has no rename, no links, no append, no locks and no folders: only whole objects that are put, perhaps on a
condition, read in ranges, listed by prefix and deleted. So no method promises more than can be built on those:

* A file is there whole or not at all. Two writers of one name meet in `put_if_absent` or `replace_if_unchanged`.
* A folder with many files is written as a draft that no reader looks for, and `publish` makes it visible at once: a
  disk renames it; a bucket puts its `seal` last, the file without which a reader takes the folder for absent.
* A file that grows is a `Log`: a disk appends to it, a bucket puts numbered parts.
* Who may write is settled by a `Lease`: a disk has locks for it, a bucket an object that its holder keeps renewing.

Names are relative, with slashes; the empty name is the folder itself. Libraries that know only local files write to
`local(name)`, after which `up(name)` keeps what they wrote; they read from `down(name)`.
"""

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple


class Changed(Exception):
    """Report that a file is no longer the one that was read, or is gone."""


class Kind(Enum):
    """What has a name. A bucket has files, and folders that are prefixes."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "pipe or device"


class Entry(NamedTuple):
    """Something that has a name in a storage."""

    name: str
    kind: Kind
    size: int
    """In bytes."""
    changed: float
    """In seconds since the epoch, by the storage's clock; of a folder in a bucket, 0."""
    tag: str = ""
    """What tells a file's contents from others: in a bucket its ETag, on a disk its size, time and number."""


class Mark(NamedTuple):
    """What a lease looks like; it changes each time that the holder renews the lease."""

    changed: int
    """In nanoseconds since the epoch, by the storage's clock."""
    text: str
    """Who holds it; empty when nobody does."""


class Log(ABC):
    """A file that grows, by one writer."""

    @abstractmethod
    def append(self, data: bytes) -> None:
        """Add bytes at the end, all or none; readers see them at once.

        Raises:
            OSError: none of them was added; also where somebody has taken the file away.
        """

    @abstractmethod
    def close(self) -> None:
        """Write no more."""


class Lease(ABC):
    """A small file by which one process holds a folder. Who may take it over, and when, is its user's to decide."""

    @abstractmethod
    def take(self) -> bool | None:
        """Try to get the file for this process.

        Returns:
            True: no other process of this machine holds it; False: another one does; None: the storage cannot tell.

        Raises:
            FileExistsError: what has its name is no file.
            OSError: it cannot be written.
        """

    @abstractmethod
    def mark(self) -> Mark:
        """Read who holds it, from the storage and from no cache.

        Raises:
            OSError: it cannot be read; FileNotFoundError, where there is none.
        """

    @abstractmethod
    def write(self, text: str) -> None:
        """Say who holds it, and wait until that is kept. It may have been taken since: look at `mark` again.

        Raises:
            OSError: it is not kept.
        """

    @abstractmethod
    def renew(self) -> None:
        """Give it another mark."""

    @abstractmethod
    def clear(self) -> None:
        """Say that nobody holds it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what this process has of it, such as a lock; its text stays. It may be called twice."""


class Storage(ABC):
    """A folder, and all that is in it."""

    is_remote = False
    """Whether a network is between this machine and the files: it may be away, and what goes up may arrive damaged."""

    def __init__(self, place: Path):
        """Look after `place`, which messages name."""
        self.place = place

    # Looking

    @abstractmethod
    def entry(self, name: str = "", follow: bool = True) -> Entry | None:
        """Describe what has a name; None where there is nothing. `follow`: of a link, what it leads to.

        Raises:
            OSError: nobody knows.
        """

    @abstractmethod
    def entries(self, name: str = "") -> list[Entry]:
        """List what lies in a folder, in the order of names, which are relative to this storage. Links stay links.

        Raises:
            OSError: it cannot be listed; FileNotFoundError, where it is not there.
        """

    @abstractmethod
    def walk(self, name: str = "", tolerant: bool = False) -> Iterator[Entry]:
        """Yield all that lies below a folder, without following links; nothing where there is no folder.

        Args:
            tolerant: leave out what cannot be listed.

        Raises:
            OSError: a folder cannot be listed.
        """

    @abstractmethod
    def find(self, name: str, depth: int) -> Iterator[Path]:
        """Yield the folders, at most `depth` levels below this one, that hold something with this name."""

    @abstractmethod
    def identity(self, name: str = "") -> Path:
        """Return one path for one file, whatever links lead to it."""

    @abstractmethod
    def lies_inside(self, name: str) -> bool:
        """Tell whether a name leads to something in this very folder, wherever links on the way lead."""

    @abstractmethod
    def takes_output(self, name: str) -> bool:
        """Tell whether what this process prints goes into a file."""

    @abstractmethod
    def free(self) -> int | None:
        """Return the free bytes of the disk that the folder is on, or will be; None if nobody knows, or no end is."""

    def exists(self, name: str = "") -> bool:
        """Tell whether anything has a name; a link that leads nowhere does not count."""
        return self.entry(name) is not None

    def is_file(self, name: str) -> bool:
        """Tell whether a name is that of a file, or leads to one."""
        return self._is(name, Kind.FILE)

    def is_folder(self, name: str = "") -> bool:
        """Tell whether a name is that of a folder, or leads to one."""
        return self._is(name, Kind.FOLDER)

    def is_link(self, name: str = "") -> bool:
        """Tell whether a name is that of a link."""
        entry = self.entry(name, follow=False)
        return entry is not None and entry.kind is Kind.LINK

    def _is(self, name: str, kind: Kind) -> bool:
        entry = self.entry(name)
        return entry is not None and entry.kind is kind

    def beside(self, name: str) -> list[Entry]:
        """List what lies in the folder of a name. Errors as in `entries`."""
        parent = str(PurePosixPath(name).parent)
        return self.entries("" if parent == "." else parent)

    def files(self, name: str = "") -> list[Entry]:
        """List the files below a folder, links to files too, in order."""
        entries = (self.entry(each.name) for each in self.walk(name) if each.kind is not Kind.FOLDER)
        return sorted((each for each in entries if each and each.kind is Kind.FILE), key=_parts)

    # Reading

    @abstractmethod
    def open(self, name: str, follow: bool = False) -> BinaryIO:
        """Stream a file down.

        Args:
            follow: open what a link leads to; otherwise a link, a pipe or a device is an error.

        Raises:
            OSError: it cannot be opened.
        """

    @abstractmethod
    def read(self, name: str, start: int = 0, length: int = -1, follow: bool = False, tag: str = "") -> bytes:
        """Read a range of a file, which ends where the file does. A length of -1: all the rest.

        Args:
            follow: as of `open`.
            tag: the one that the file has in its `entry`, and must still have; empty: any.

        Raises:
            Changed: it has another one.
            OSError: it cannot be read.
        """

    def read_text(self, name: str, follow: bool = False) -> str:
        """Read a file of text.

        Raises:
            UnicodeDecodeError, OSError: it is none, or cannot be read.
        """
        return self.read(name, follow=follow).decode("utf-8")

    @abstractmethod
    def version(self, name: str) -> tuple[bytes, str]:
        """Read a small file with its version, for `replace_if_unchanged`. Errors as in `open`."""

    @abstractmethod
    def open_log(self, name: str, start: int = 0) -> BinaryIO:
        """Read what has been written to a `Log`, from a byte on. Errors as in `open`."""

    @abstractmethod
    def down(self, name: str = "") -> Path:
        """Return where libraries that know only local files find a file or a folder."""

    # Writing

    @abstractmethod
    def write(self, name: str, data: bytes | str, durable: bool = False) -> None:
        """Write a file, so that readers see all of the old one or all of the new one; a link is replaced.

        Args:
            durable: wait until it is kept, so that a power failure leaves one of the two.
        """

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> str:
        """Write a file that is not there yet, and return its version. Of several processes that try, one succeeds.

        Raises:
            FileExistsError: it is there.
        """

    @abstractmethod
    def replace_if_unchanged(self, name: str, data: bytes, version: str) -> str:
        """Write a file anew if it still has a version, and return the new one. Of several that try, one succeeds.

        Only writers that call this method exclude each other.

        Raises:
            Changed: it has another one, or is gone.
        """

    @abstractmethod
    def log(self, name: str, content: bytes) -> Log:
        """Begin a growing file with `content`, in place of what is there, for this process to add to."""

    @abstractmethod
    def lease(self, name: str) -> Lease:
        """Return the lease of a name, without taking it."""

    @abstractmethod
    def make(self, name: str = "") -> None:
        """Make sure that a folder can be written into; in a bucket there is nothing to do.

        Raises:
            OSError: it cannot, or a link on the way leads out of this storage.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, a folder or a link, but never what a link leads to; where that fails, leave it."""

    @abstractmethod
    def delete_if_empty(self) -> None:
        """Delete the folder itself if nothing is in it."""

    # Whole folders, and files that libraries write

    @abstractmethod
    def drafted(self, name: str) -> AbstractContextManager[Path]:
        """Yield a local path for a library to write a file or a folder to.

        It takes the name when the block succeeds, in place of a file or a link with the name; where the block fails,
        nothing of it is left.
        """

    @abstractmethod
    def draft(self, name: str) -> str:
        """Make an empty folder in which `name` is written before it is published; return its new name."""

    @abstractmethod
    def drafts(self, name: str) -> list[str]:
        """List the names of drafts of a file or folder: of this process, of others, or of some that were killed."""

    @abstractmethod
    def local(self, name: str = "") -> Path:
        """Return where libraries that know only local files write a file or a folder of a draft."""

    @abstractmethod
    def fill(self, name: str, data: str) -> None:
        """Write a file of text into a draft, where nobody reads it yet; `up` keeps it."""

    @abstractmethod
    def open_to_readers(self, draft: str) -> None:
        """Give the files of a draft the permissions of any new file, whatever a library gave them."""

    @abstractmethod
    def up(self, name: str = "", on_block: Callable[[], None] = lambda: None) -> None:
        """Stream a file of a draft up: wait until it is kept; of a folder, its list of names.

        Args:
            on_block: called as it goes on.
        """

    @abstractmethod
    def unstage(self, name: str = "") -> None:
        """Delete what this machine has of files on their way to the storage; a disk has none."""

    @abstractmethod
    def staged(self) -> int:
        """Return the bytes of files that are on their way to the storage, on this machine."""

    @abstractmethod
    def probe(self) -> None:
        """Make sure that the storage keeps its promises about conditions; a disk is tested by `doctor`.

        Raises:
            UserError: it does not keep them.
            OSError: it cannot be asked.
        """

    @abstractmethod
    def publish(self, draft: str, name: str, seal: str) -> None:
        """Make a draft visible at once under its name, which is free, and wait until that is kept.

        Args:
            seal: the file of it without which no reader takes it for whole; where no rename exists, it is put last.
                Empty: the storage has one of its own.
        """

    @abstractmethod
    def published(self, seal: str) -> list[str]:
        """List the names of published folders; a disk, which shows none too early, lists damaged ones too."""

    @abstractmethod
    def retract(self, name: str, seal: str) -> None:
        """Delete a published folder so that no reader takes what is left for whole; where that fails, leave it."""

    @abstractmethod
    def put_aside(self, name: str, seal: str, why: str) -> str:
        """Give a published folder a new name, which ends in `why`, and return it. No reader looks for it there."""

    @abstractmethod
    def asides(self, name: str, why: str) -> list[str]:
        """List the names that `put_aside` has given to folders of a name for a reason, the oldest folder first."""


def _parts(entry: Entry) -> tuple[str, ...]:
    return PurePosixPath(entry.name).parts


def leads_out(path: Path | str) -> OSError:
    """Return the error for a name that leads out of a storage."""
    return OSError(errno.ELOOP, f"{path} leads out of the run's folder")
