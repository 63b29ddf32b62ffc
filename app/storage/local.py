"""Files on a disk that this machine has mounted: drafts that are renamed, appending, and locks of the system."""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from app.storage import drafts
from app.storage.interface import Changed, Entry, Kind, Lease, Log, Mark, Storage, leads_out

NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
NO_FLOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP}  # errors for which pathlib takes a path for absent
_LONGEST = 1000  # characters of a lease


def open_plain(path: Path) -> int:
    """Open a file for reading and return its descriptor. A link is not followed, and a pipe does not make it wait.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe, a device or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is a folder, a pipe or a device, and no file", str(path))
    return descriptor


class LocalStorage(Storage):
    """A folder of a disk."""

    def _path(self, name: str) -> Path:
        lexical = os.path.normpath(name or ".")
        if os.path.isabs(lexical) or lexical.split(os.sep)[0] == "..":
            raise leads_out(self.place / name)
        return self.place / name

    def entry(self, name: str = "", follow: bool = True) -> Entry | None:
        path = self._path(name)
        try:
            about = os.stat(path, follow_symlinks=follow)
        except ValueError:  # no file can have such a name
            return None
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return None
        return entry_of(name, about)

    def entries(self, name: str = "") -> list[Entry]:
        with os.scandir(self._path(name)) as scan:
            inner = sorted(f"{name}/{each.name}" if name else each.name for each in scan)
        entries = (self.entry(each, follow=False) for each in inner)
        return [entry for entry in entries if entry]  # the others have been deleted since

    def walk(self, name: str = "", tolerant: bool = False) -> Iterator[Entry]:
        try:
            entries = self.entries(name)
        except (FileNotFoundError, NotADirectoryError):  # it may have been deleted since it was listed
            return
        except OSError:
            if not tolerant:
                raise
            return
        yield from sorted(entries, key=lambda entry: entry.kind is not Kind.FOLDER)
        for entry in entries:
            if entry.kind is Kind.FOLDER:
                yield from self.walk(entry.name, tolerant)

    def find(self, name: str, depth: int) -> Iterator[Path]:
        for level in range(depth + 1):
            for file in self.place.glob("*/" * level + name):
                yield file.parent

    def identity(self, name: str = "") -> Path:
        return self._path(name).resolve()

    def lies_inside(self, name: str) -> bool:
        return self._path(name).resolve().is_relative_to(self.place.parent.resolve() / self.place.name)

    def takes_output(self, name: str) -> bool:
        return any(_is_at(self._path(name), descriptor) for descriptor in (1, 2))

    def free(self) -> int | None:
        there = next((place for place in (self.place, *self.place.absolute().parents) if place.is_dir()), None)
        try:
            return None if there is None else shutil.disk_usage(there).free
        except OSError:
            return None

    def open(self, name: str, follow: bool = False) -> BinaryIO:
        return open(self._path(name) if follow else open_plain(self._path(name)), "rb")

    def read(self, name: str, start: int = 0, length: int = -1, follow: bool = False, tag: str = "") -> bytes:
        with self.open(name, follow) as file:
            file.seek(start)
            data = file.read(length)
            # Afterwards: whoever has written into the file before or meanwhile has changed its time.
            if tag and tag != entry_of(name, os.fstat(file.fileno())).tag:
                raise Changed(f"{self._path(name)} was changed")
            return data

    def version(self, name: str) -> tuple[bytes, str]:
        data = self.read(name)
        return data, _version_of(data)

    def open_log(self, name: str, start: int = 0) -> BinaryIO:
        file = self.open(name)
        file.seek(start)
        return file

    def down(self, name: str = "") -> Path:
        return self._path(name)

    def write(self, name: str, data: bytes | str, durable: bool = False) -> None:
        drafts.write(self._path(name), data, durable)

    def put_if_absent(self, name: str, data: bytes) -> str:
        path = self._path(name)
        draft = drafts.draft_of(path)
        try:
            draft.write_bytes(data)
            drafts.flush(draft)
            _link(draft, path)
            drafts.flush(path.parent)
        finally:
            drafts.delete(draft)
        return _version_of(data)

    def replace_if_unchanged(self, name: str, data: bytes, version: str) -> str:
        path = self._path(name)
        try:
            descriptor = open_plain(path)
        except FileNotFoundError:
            raise Changed(f"{path} is gone") from None
        with open(descriptor, "rb") as file:
            # Writers of one version meet at its lock. It ends with the file; so who had to wait finds another file.
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(path, file.fileno()) or _version_of(file.read()) != version:
                raise Changed(f"{path} was changed")
            drafts.write(path, data, durable=True)
        return _version_of(data)

    def log(self, name: str, content: bytes) -> Log:
        self.write(name, content)
        return _LocalLog(self._path(name))

    def lease(self, name: str) -> Lease:
        return _LocalLease(self._path(name))

    def make(self, name: str = "") -> None:
        self._path(name).mkdir(parents=True, exist_ok=True)
        if name and not self.lies_inside(name):
            raise leads_out(self._path(name))

    def delete(self, name: str) -> None:
        drafts.delete(self._path(name))

    def delete_if_empty(self) -> None:
        if not any(self.place.iterdir()):
            self.place.rmdir()

    def drafted(self, name: str) -> AbstractContextManager[Path]:
        return drafts.drafted(self._path(name))

    def draft(self, name: str) -> str:
        draft = drafts.draft_of(self._path(name))
        draft.mkdir()
        return str(draft.relative_to(self.place))

    def drafts(self, name: str) -> list[str]:
        return [str(draft.relative_to(self.place)) for draft in drafts.drafts_of(self._path(name))]

    def local(self, name: str = "") -> Path:
        return self._path(name)

    def fill(self, name: str, data: str) -> None:
        self._path(name).write_text(data, encoding="utf-8")

    def open_to_readers(self, draft: str) -> None:
        # safetensors 0.8 lets only the owner read its files.
        probe = self._path(draft) / ".rights"
        probe.touch()
        rights = stat.S_IMODE(probe.stat().st_mode)
        probe.unlink()
        for entry in self.files(draft):
            self._path(entry.name).chmod(rights)

    def up(self, name: str = "", on_block: Callable[[], None] = lambda: None) -> None:
        drafts.flush(self._path(name))

    def unstage(self, name: str = "") -> None:
        """Do nothing: files are written where they stay."""

    def staged(self) -> int:
        return 0

    def probe(self) -> None:
        """Do nothing: `doctor` tests disks."""

    def publish(self, draft: str, name: str, seal: str) -> None:
        drafts.publish(self._path(draft), self._path(name))

    def published(self, seal: str) -> list[str]:
        names = sorted(os.listdir(self.place)) if self.is_folder() else []  # one that cannot be read is published too
        return [name for name in names if not drafts.is_draft(name)]

    def retract(self, name: str, seal: str) -> None:
        drafts.delete_folder(self._path(name))

    def put_aside(self, name: str, seal: str, why: str) -> str:
        aside = drafts.draft_of(self._path(name)).with_suffix(f".{why}")
        self._path(name).rename(aside)
        return str(aside.relative_to(self.place))

    def asides(self, name: str, why: str) -> list[str]:
        of_name = re.compile(rf"{re.escape(self._path(name).name)}{drafts.DRAWN}\.{re.escape(why)}")
        aside = [each for each in self.beside(name) if of_name.fullmatch(PurePosixPath(each.name).name)]
        return [each.name for each in sorted(aside, key=lambda each: each.changed)]


class _LocalLog(Log):
    """A file that is opened for appending."""

    def __init__(self, path: Path):
        self._path = path
        # A link that has just taken its place is not followed.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._file = os.fdopen(self._descriptor, "ab", buffering=0)  # closes it when nobody uses this any more

    def append(self, data: bytes) -> None:
        os.stat(self._path, follow_symlinks=False)  # fails where it was taken away
        whole = os.fstat(self._descriptor).st_size
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._descriptor, whole)
            raise

    def close(self) -> None:
        self._file.close()


class _LocalLease(Lease):
    """A file with an flock on it, where the disk has flocks, and the time of its last change as its mark."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool | None:
        # flock, not lockf: a lock of the latter kind is lost when anything in this process reads the file.
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise FileExistsError(errno.EEXIST, "is not a file", str(self._path))
            sure = flock(self._descriptor)
            return False if sure is False or not self._is_there(self._descriptor) else sure
        except BaseException:
            self.close()
            raise

    def _is_there(self, descriptor: int) -> bool:
        """Tell whether the file that was opened still has the name: another run may have made a new one."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def mark(self) -> Mark:
        # Opened anew each time: otherwise a network disk may answer from its cache.
        with open(open_plain(self._path), encoding="utf-8", errors="replace") as file:
            return Mark(os.fstat(file.fileno()).st_mtime_ns, file.read(_LONGEST))

    def write(self, text: str) -> None:
        descriptor = self._taken()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        os.fsync(descriptor)

    def renew(self) -> None:
        os.utime(self._path, follow_symlinks=False)

    def clear(self) -> None:
        os.ftruncate(self._taken(), 0)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _taken(self) -> int:
        if self._descriptor is None:
            raise RuntimeError(f"{self._path} was not taken")
        return self._descriptor


def entry_of(name: str, about: os.stat_result) -> Entry:
    """Return what `stat` says of something that has a name."""
    tag = f"{about.st_size}-{about.st_mtime_ns}-{about.st_ino}"
    return Entry(name, _kind_of(about), about.st_size, about.st_mtime, tag)


def _kind_of(about: os.stat_result) -> Kind:
    kinds = {stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.FOLDER, stat.S_IFLNK: Kind.LINK}
    return kinds.get(stat.S_IFMT(about.st_mode), Kind.OTHER)


def _is_at(path: Path, descriptor: int) -> bool:
    """Tell whether an open file is the one that has a name now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _link(draft: Path, path: Path) -> None:
    """Give a draft another name that is free; a rename would replace what has the name."""
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with path.open("xb") as file:  # only one succeeds, but a reader may see it half written
            file.write(draft.read_bytes())
            file.flush()
            os.fsync(file.fileno())


def _version_of(data: bytes) -> str:
    """Return a version by the contents: times of changes are coarse, and numbers of files are used again."""
    return hashlib.sha256(data).hexdigest()


def flock(descriptor: int) -> bool | None:
    """Lock a file. True: it is locked; False: another process has it; None: the disk has no flock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return None
    return True
