"""Files in a bucket (s3://, gs://, az://), and on a web server (http://, https://) or the Hub (hf://): only read there.

How a folder is published without a rename: `up` puts the files of a draft under the draft's own name, which is random,
and `publish` has the store copy them, the seal last, each only where nothing has its new name. The other way, putting
them under their last name at once, costs no copies, but two writers, one of which has lost its lease and does not know
it yet, would write over each other's files, and what a killed one leaves would look like a folder. A pointer in the
place of the copies would make a folder that `aws s3 sync` and other readers cannot use.

What libraries write is staged on this machine, below the user's cache folder, until it is up. Staged files count as
there, before those in the bucket: for this machine a draft is both.
"""

import contextlib
import errno
import io
import os
import posixpath
import re
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from app.errors import UserError
from app.storage import drafts
from app.storage.addresses import Address
from app.storage.bucket_lease import BucketLease
from app.storage.bucket_log import PARTS, BucketLog, parts_of, read_log
from app.storage.hub_objects import HubObjects
from app.storage.interface import Changed, Entry, Kind, Lease, Log, Storage, leads_out
from app.storage.local import LocalStorage
from app.storage.objects import ABSENT, PATIENCE, PIECE, About, Objects, Patience

_THREADS = 4  # requests at once
_FIRST_READ = 256 << 10  # bytes that a stream asks for first; the double each time that it goes on from there
_OWN_SEAL = ".whole"


def scratch() -> Path:
    """Return the folder of this user for files on their way to or from a bucket."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep" / "buckets"


class BucketStorage(Storage):
    """A prefix of a bucket's keys, or of a web server's paths. Folders are there as long as something is in them."""

    is_remote = True

    def __init__(self, address: Address, local: Path | None = None, patience: Patience = PATIENCE):
        """Look after an address. `local`: the folder for files on their way; the user's if None."""
        super().__init__(Path(str(address)))
        self.address, self._local = address, local or scratch()
        self._objects = (HubObjects if address.scheme == "hf" else Objects)(address, patience)

    # Names

    def _key(self, name: str) -> str:
        lexical = posixpath.normpath(name or ".")
        if posixpath.isabs(lexical) or lexical.split("/")[0] == "..":
            raise leads_out(f"{self.address}/{name}")
        return posixpath.join(self.address.key, "" if lexical == "." else lexical).rstrip("/")

    def _named(self, key: str) -> str:
        """Return the name of an object of this folder."""
        return key[len(self.address.key) :].lstrip("/")

    def _below(self, folder: str, name: str = "") -> Path:
        return self._local / folder / self.address.scheme / self.address.bucket / self._key(name)

    @property
    def _staged(self) -> LocalStorage:
        return LocalStorage(self._below("staged"))

    def _url(self, name: str) -> str:
        return self._objects.url(self._key(name))

    def _missing(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._url(name))

    # Looking

    def entry(self, name: str = "", follow: bool = True) -> Entry | None:
        key, staged = self._key(name), self._staged_entry(name)
        # A folder above drafts is staged too, and may be empty.
        if staged and (staged.kind is Kind.FILE or any(True for _ in self._staged_files(name))):
            return staged
        if key and (about := self._objects.head(key)):
            return self._entry(about)
        if self.address.scheme.startswith("http"):
            return None
        return Entry(name, Kind.FOLDER, 0, 0.0) if any(True for _ in self._objects.below(key)) else None

    def _entry(self, about: About) -> Entry:
        return Entry(self._named(about.key), Kind.FILE, about.size, about.changed, about.tag)

    def _staged_entry(self, name: str) -> Entry | None:
        """Describe what is staged under a name: a file or a folder."""
        self._key(name)
        try:
            return self._staged.entry(name, follow=False)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # names in buckets may be longer
                raise
            return None

    def _staged_files(self, name: str) -> Iterator[Entry]:
        staged = self._staged_entry(name)
        return (each for each in (self._staged.walk(name) if staged else []) if each.kind is Kind.FILE)

    def _is_staged(self, name: str) -> bool:
        staged = self._staged_entry(name)
        return staged is not None and staged.kind is Kind.FILE

    def entries(self, name: str = "") -> list[Entry]:
        self._check_listable(name)
        folders, objects = self._objects.inside(self._key(name))
        names = [self._named(each) for each in folders if not each.endswith(PARTS)]
        inner = {each: Entry(each, Kind.FOLDER, 0, 0.0) for each in names}
        inner |= {entry.name: entry for entry in map(self._entry, objects)} | self._staged_inside(name)
        if not inner and name:
            raise self._no_folder(name)
        return [inner[each] for each in sorted(inner)]

    def _no_folder(self, name: str) -> OSError:
        number = errno.ENOENT if self.entry(name) is None else errno.ENOTDIR
        return OSError(number, os.strerror(number), self._url(name))

    def _staged_inside(self, name: str) -> dict[str, Entry]:
        """Return what is staged directly in a folder, by names; a folder without files is not there."""
        staged = self._staged_entry(name)
        entries = self._staged.entries(name) if staged and staged.kind is Kind.FOLDER else []
        return {each.name: each for each in entries if each.kind is Kind.FILE or any(self._staged_files(each.name))}

    def _check_listable(self, name: str) -> None:
        if self.address.scheme.startswith("http"):
            raise OSError(errno.ENOTSUP, "a web server does not list its files: name each of them", self._url(name))

    def walk(self, name: str = "", tolerant: bool = False) -> Iterator[Entry]:
        shown = {""} | {str(each) for each in PurePosixPath(name).parents} | {name}
        try:
            for entry in self._files(name):
                for folder in reversed(PurePosixPath(entry.name).parents):
                    if str(folder) != "." and str(folder) not in shown:
                        shown.add(str(folder))
                        yield Entry(str(folder), Kind.FOLDER, 0, 0.0)
                yield entry
        except OSError:
            if not tolerant:
                raise

    def _files(self, name: str) -> Iterator[Entry]:
        """Yield all files below a folder: staged ones, and then those of the bucket, in the order of keys."""
        self._check_listable(name)
        staged = {each.name: each for each in self._staged_files(name)}
        yield from staged.values()
        for about in self._objects.below(self._key(name)):
            entry = self._entry(about)
            if entry.name not in staged and not any(part.endswith(PARTS) for part in entry.name.split("/")):
                yield entry

    def files(self, name: str = "") -> list[Entry]:
        return sorted(self._files(name), key=lambda each: PurePosixPath(each.name).parts)

    def find(self, name: str, depth: int) -> Iterator[Path]:
        self._check_listable("")
        level = [""]
        for _ in range(depth + 1):
            inner: list[str] = []
            for folder in level:
                entries = self.entries(folder)
                if any(PurePosixPath(each.name).name == name for each in entries):
                    yield self.place / folder
                inner += [each.name for each in entries if each.kind is Kind.FOLDER]
            level = inner

    def identity(self, name: str = "") -> Path:
        return Path(self._url(name))

    def lies_inside(self, name: str) -> bool:
        return bool(self._key(name)) or not name

    def takes_output(self, name: str) -> bool:
        return False

    def free(self) -> int | None:
        return None

    # Reading

    def open(self, name: str, follow: bool = False) -> BinaryIO:
        if self._is_staged(name):
            return self._staged.open(name)
        about = self._objects.head(self._key(name))
        if about is None:
            raise self._missing(name)
        return io.BufferedReader(_Ranges(self._objects, about), buffer_size=128 << 10)

    def read(self, name: str, start: int = 0, length: int = -1, follow: bool = False, tag: str = "") -> bytes:
        if self._is_staged(name):
            return self._staged.read(name, start, length, tag=tag)
        if length == 0:
            return b""
        return self._objects.get(self._key(name), start, None if length < 0 else start + length, tag)[0]

    def version(self, name: str) -> tuple[bytes, str]:
        data, about = self._objects.get(self._key(name))
        return data, about.version

    def open_log(self, name: str, start: int = 0) -> BinaryIO:
        return read_log(self._objects, self._key(name), start)

    def down(self, name: str = "") -> Path:
        """See `Storage.down`. What is here already, with the tags that the bucket has, is not fetched again."""
        target, tags = self._below("down", name), self._below("tags", name)
        about = self._objects.head(self._key(name)) if self._key(name) else None
        if about is not None:
            self._fetch(about, target, tags)
            return target
        wanted = {each.name: each for each in self._files(name)}
        if not wanted:
            raise self._missing(name)
        for entry in wanted.values():
            about = About(self._key(entry.name), entry.size, entry.changed, entry.tag, entry.tag)
            self._fetch(about, self._below("down", entry.name), self._below("tags", entry.name))
        local = LocalStorage(self._below("down"))
        for each in [each for each in local.walk(name) if each.kind is not Kind.FOLDER]:
            if each.name not in wanted:
                local.delete(each.name)
        return target

    def _fetch(self, about: About, target: Path, tag: Path) -> None:
        """Fetch an object into a file, unless the file is there, and it is the one that was fetched for that tag."""
        with contextlib.suppress(OSError, ValueError):
            if tag.read_text() == about.tag and target.stat().st_size == about.size:
                return
        for path in (target, tag):
            path.parent.mkdir(parents=True, exist_ok=True)
        with drafts.drafted(target) as draft, draft.open("wb") as file, ThreadPoolExecutor(_THREADS) as pool:
            stripe = PIECE * _THREADS
            for start in range(0, about.size, stripe):
                pieces = range(start, min(start + stripe, about.size), PIECE)
                for piece in pool.map(lambda first: self._piece(about, first), pieces):
                    file.write(piece)
        drafts.write(tag, about.tag)

    def _piece(self, about: About, start: int) -> bytes:
        try:
            return self._objects.get(about.key, start, _end(about, start + PIECE), about.tag)[0]
        except Changed as changed:
            raise OSError(errno.ESTALE, f"it was written anew while it was read ({changed})") from None

    # Writing

    def write(self, name: str, data: bytes | str, durable: bool = False) -> None:
        self._objects.put(self._key(name), data.encode() if isinstance(data, str) else data)

    def put_if_absent(self, name: str, data: bytes) -> str:
        return self._objects.put(self._key(name), data, over=ABSENT)

    def replace_if_unchanged(self, name: str, data: bytes, version: str) -> str:
        return self._objects.put(self._key(name), data, over=version)

    def log(self, name: str, content: bytes) -> Log:
        return BucketLog(self._objects, self._key(name), content)

    def lease(self, name: str) -> Lease:
        return BucketLease(self._objects, self._key(name), self._below("locks", name))

    def make(self, name: str = "") -> None:
        self._key(name)
        self._objects.check_writable()

    def delete(self, name: str) -> None:
        key = self._key(name)
        self._objects.check_writable()
        drafts.delete(self._below("staged", name))
        with contextlib.suppress(OSError):
            itself = [key] if key and self._objects.head(key) else []
            self._objects.delete([*itself, *(each.key for each in self._objects.below(key))])
            if key:
                self._objects.delete(parts_of(self._objects, key))

    def delete_if_empty(self) -> None:
        """Do nothing: an empty folder is not there."""

    # Whole folders, and files that libraries write

    @contextlib.contextmanager
    def drafted(self, name: str) -> Iterator[Path]:
        """See `Storage.drafted`; the files of a folder take their names one after another."""
        self._objects.check_writable()
        draft = self.local(str(drafts.draft_of(Path(name))))
        try:
            yield draft
            if self.is_folder(name):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), self._url(name))
            if draft.is_dir():
                self._upload_folder(draft, name)
            else:
                self._objects.upload(self._key(name), draft)
        finally:
            drafts.delete(draft)

    def _upload_folder(self, draft: Path, name: str) -> None:
        names = [each.name for each in LocalStorage(draft).files()]
        if self.is_file(name):
            self.delete(name)
        try:
            for each in names:
                self._objects.upload(self._key(f"{name}/{each}"), draft / each)
                (draft / each).unlink()  # makes room, by which the watchdog sees that something moves
        except BaseException:
            self.delete(name)
            raise

    def draft(self, name: str) -> str:
        self._objects.check_writable()
        draft = str(drafts.draft_of(Path(name)))
        self.local(draft).mkdir()
        return draft

    def drafts(self, name: str) -> list[str]:
        is_draft = re.compile(re.escape(self._named(self._key(name))) + drafts.DRAFT)
        try:
            entries = self.beside(name)
        except OSError:
            return []
        return [each.name for each in entries if is_draft.fullmatch(each.name)]

    def local(self, name: str = "") -> Path:
        path = self._below("staged", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def fill(self, name: str, data: str) -> None:
        self.local(name).write_text(data, encoding="utf-8")

    def open_to_readers(self, draft: str) -> None:
        """Do nothing: who may read an object is said by its bucket."""

    def up(self, name: str = "", on_block: Callable[[], None] = lambda: None) -> None:
        """See `Storage.up`. The local file is deleted once it is up, and so makes room."""
        staged = self._staged_entry(name)
        if staged is not None and staged.kind is Kind.FILE:
            path = self._below("staged", name)
            self._objects.upload(self._key(name), path, on_block)
            path.unlink(missing_ok=True)
        elif staged is None and not self.exists(name):
            raise self._missing(name)

    def unstage(self, name: str = "") -> None:
        self._key(name)
        drafts.delete(self._below("staged", name))

    def staged(self) -> int:
        return sum(entry.size for entry in self._staged_files(""))

    def publish(self, draft: str, name: str, seal: str) -> None:
        """See `Storage.publish`.

        Raises:
            FileExistsError: something has the name. Whoever comes later of two that publish is told so at the latest
                when it puts its seal.
        """
        for each in list(self._staged_files(draft)):
            self.up(each.name)
        if self.exists(name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._url(name))
        if not seal:
            seal = _OWN_SEAL
            self.write(f"{draft}/{seal}", "")
        self._copy_folder(draft, name, seal)
        self.delete(draft)

    def _copy_folder(self, source: str, target: str, seal: str) -> None:
        """Copy a folder to a name that is free, the seal last. What was copied goes away where that fails."""
        old, new, copied = self._key(source), self._key(target), list[str]()
        objects = {each.key[len(old) + 1 :]: each for each in self._objects.below(old)}
        sealing = objects.pop(seal, None)
        if sealing is None and seal != _OWN_SEAL:
            raise self._missing(f"{source}/{seal}")

        def copy(inner: str) -> None:
            self._objects.copy(objects[inner], f"{new}/{inner}")
            copied.append(f"{new}/{inner}")

        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(copy, objects))
            if sealing is not None:
                self._objects.copy(sealing, f"{new}/{seal}")
        except BaseException:
            with contextlib.suppress(OSError):
                self._objects.delete(copied)
            raise

    def published(self, seal: str) -> list[str]:
        names = [each.name for each in self.entries() if each.kind is Kind.FOLDER and not drafts.is_draft(each.name)]
        with ThreadPoolExecutor(_THREADS) as pool:
            sealed = pool.map(lambda name: self._objects.head(self._key(f"{name}/{seal or _OWN_SEAL}")), names)
            return [name for name, about in zip(names, sealed, strict=True) if about is not None]

    def retract(self, name: str, seal: str) -> None:
        self._objects.check_writable()
        with contextlib.suppress(OSError):
            if about := self._objects.head(self._key(f"{name}/{seal or _OWN_SEAL}")):
                self._objects.delete([about.key])
            self.delete(name)

    def put_aside(self, name: str, seal: str, why: str) -> str:
        # What is drawn begins with the time, so that names tell which of two that were put aside was first.
        aside = f"{name}.{time.time_ns() // 2**20:011x}{secrets.token_hex(3)[:5]}.{why}"
        seal = seal or _OWN_SEAL
        self._copy_folder(name, aside, seal if self.exists(f"{name}/{seal}") else _OWN_SEAL)
        self.retract(name, seal)
        return aside

    def asides(self, name: str, why: str) -> list[str]:
        of_name = re.compile(rf"{re.escape(self._named(self._key(name)))}{drafts.DRAWN}\.{re.escape(why)}")
        return [each.name for each in self.beside(name) if of_name.fullmatch(each.name)]

    # Of buckets alone

    def probe(self) -> None:
        """See `Storage.probe`: leases and versions stand on the conditions of writes, which some stores ignore.

        Those answer that all is well.
        """
        key = self._key(f".samestep-probe-{secrets.token_hex(8)}")
        try:
            version = self._objects.put(key, b"first", over=ABSENT)
            self._probe_refusal(key, ABSENT, "that no object has the name (If-None-Match)")
            self._probe_refusal(key, _other(version), "that the object has not changed (If-Match)")
            try:
                self._objects.put(key, b"second", over=version)
            except Changed:
                raise self._unfit("refuses to write over the version that it has just given") from None
        finally:
            with contextlib.suppress(OSError):
                self._objects.delete([key])

    def _probe_refusal(self, key: str, over: str, condition: str) -> None:
        with contextlib.suppress(FileExistsError, Changed):
            self._objects.put(key, b"third", over)
            raise self._unfit(f"ignores the condition of a write {condition}")

    def _unfit(self, what: str) -> UserError:
        return UserError(
            f"the store of {self.address} {what}, so two runs could take one folder: give a store that keeps "
            "conditions, such as S3, Google Cloud Storage, Azure, R2, MinIO or SeaweedFS"
        )


def _other(version: str) -> str:
    """Return a version of the same form that no object has."""
    tag, space, generation = version.partition(" ")
    return re.sub("[0-9a-f]", "0", tag) + space + ("1" if generation else "")


def _end(about: About, end: int) -> int | None:
    """Return where a range ends; None at the end of an object, so that a short one is not asked for as a range.

    Some web servers send none.
    """
    return None if end >= about.size else end


class _Ranges(io.RawIOBase):
    """An object as a file: fetched in ranges, as they are read, and larger ones the longer it is read in order."""

    def __init__(self, objects: Objects, about: About):
        super().__init__()
        self._objects, self._about = objects, about
        self._position, self._begin, self._fetched, self._ahead = 0, 0, b"", _FIRST_READ

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._about.size}[whence]
        if begin + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = begin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer) -> int:
        with memoryview(buffer).cast("B") as view:
            data = self._next(len(view))
            view[: len(data)] = data
            return len(data)

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self._next(PIECE), b""))

    def _next(self, length: int) -> bytes:
        """Return at most so many bytes; none at the end alone."""
        skipped = self._position - self._begin
        if not 0 <= skipped < len(self._fetched):
            self._fetch(length)
            skipped = 0
        data = self._fetched[skipped : skipped + length]
        self._position += len(data)
        return data

    def _fetch(self, length: int) -> None:
        goes_on = self._position == self._begin + len(self._fetched)
        self._ahead = min(2 * self._ahead, PIECE) if goes_on else _FIRST_READ
        end = min(self._position + min(max(length, self._ahead), PIECE), self._about.size)
        self._begin, self._fetched = self._position, b""
        if self._position >= end:
            return
        try:
            end_asked = _end(self._about, end)
            self._fetched = self._objects.get(self._about.key, self._position, end_asked, self._about.tag)[0]
        except Changed:
            url = self._objects.url(self._about.key)
            raise OSError(errno.ESTALE, "it was written anew while it was read", url) from None
