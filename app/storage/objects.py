"""The objects of one bucket through obstore: its errors as those of files, and what it does not try again by itself.

obstore repeats a request after a 5xx, a lost connection or, where only something is read, a timeout. Left to this
module are bodies that end too soon without an ETag by which obstore could go on, and writes on a condition of which
nobody knows whether they were done: each object says in its metadata which write made it.
"""

import contextlib
import errno
import io
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from app.errors import UserError
from app.storage.addresses import Address
from app.storage.interface import Changed

Result = TypeVar("Result")
EXTRA = "pip install 'samestep[buckets]'"
PIECE = 8 << 20
"""Bytes that one request moves at most, but for writes on a condition."""
_LARGEST_COPY = 5 << 30  # bytes that S3 copies by itself in one request
_BEYOND = errno.ERANGE  # for a range that begins at the end of an object or behind it
_SMALL = 1 << 20  # bytes up to which a copy goes through this process: fewer requests
_PARTS = 9000  # of a file at most; S3 allows 10,000
_WRITER = "samestepwriter"  # letters alone: Azure refuses hyphens in it, and proxies lose underscores
_WEAK = "W/"
"""How an ETag begins that is none for conditions: with it, If-Match is always refused."""
ABSENT = ""
"""The version of an object that is not there."""


class Patience(NamedTuple):
    """How long a store may be away."""

    retries: int = 1000
    """Of one request at most. Waits between them are drawn at random, so only `seconds` says how long that takes."""
    seconds: float = 180.0
    """From the first try of a request to the start of its last one."""
    silence: float = 30.0
    """Seconds after which a store that says nothing is asked again."""
    first_wait: float = 0.1
    """Seconds before the second try. The next waits grow by half from one to the next on average."""
    longest_wait: float = 5.0
    """Seconds between two tries at most: a store that is back is soon asked again."""
    quiet: float = 10.0
    """Seconds after which the user is told, once, that a store does not answer: its address may be wrong."""


PATIENCE = Patience()
"""Long enough for a store that restarts; a run waits for its next save in that time."""


class About(NamedTuple):
    """What a store says of an object."""

    key: str
    size: int
    changed: float
    """In seconds since the epoch."""
    tag: str
    """Its ETag; two objects with one ETag have the same contents."""
    version: str
    """By which a write can ask whether it is still there: the ETag, on Google's stores with the generation."""
    writer: str = ""
    """Which write made it, where that was asked for."""


class _Unrepeated(OSError):
    """Something went wrong on the way that obstore has not tried a second time."""


class _Runtime:
    """Which process started obstore's threads: one that was forked from it has none of them, and would wait forever."""

    def __init__(self) -> None:
        self._process: int | None = None
        self.stores: dict[Any, Any] = {}
        """What this process has connected to, by bucket, patience and what the environment says: connections last."""
        self._told: set[str] = set()

    def tell(self, place: str, seconds: float) -> None:
        """Tell the user, once for each place, that a store does not answer; `seconds`: how long it is asked still."""
        if place not in self._told:
            self._told.add(place)
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
            print(f"waiting for {place}, which does not answer; it is asked until {until}", file=sys.stderr, flush=True)

    def start(self) -> ModuleType:
        """Import obstore.

        Raises:
            UserError: it is not installed.
            OSError: the process was forked too late.
        """
        try:
            import obstore
            import obstore.store
        except ImportError:
            raise UserError(f"files in buckets and on web servers need obstore: {EXTRA}") from None
        if self._process is None:
            self._process = os.getpid()
        if self._process != os.getpid():
            raise OSError(
                errno.ENOTSUP,
                "this process was forked from one that had used a bucket, so it cannot use any: start it by spawn",
            )
        return obstore


_runtime = _Runtime()


class Objects:
    """What a bucket holds, by keys. Copies of it in other processes connect anew."""

    def __init__(self, root: Address, patience: Patience = PATIENCE):
        """Look after a bucket. Nothing is asked of it yet."""
        self._root, self._patience = root, patience
        self._store: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_store": None}

    def url(self, key: str) -> str:
        """Return the URL of an object, for people."""
        return str(self._root._replace(key=key))

    def check_writable(self) -> None:
        """Refuse to write to a web server.

        Raises:
            OSError: it is one.
        """
        if self._root.scheme.startswith("http"):
            raise OSError(errno.EROFS, "a web server is only read", str(self._root))

    def head(self, key: str, writer: bool = False) -> About | None:
        """Ask about one object; None where there is none.

        Args:
            writer: ask also which write made it.
        """
        try:
            with self._errors(key) as obstore:
                store = self._connected()
                with self._telling():
                    if not writer:
                        return self._about(obstore.head(store, key))
                    result = obstore.get(store, key, options={"head": True})
                return self._about(result.meta)._replace(writer=result.attributes.get(_WRITER, ""))
        except FileNotFoundError:
            return None

    def get(self, key: str, start: int = 0, end: int | None = None, tag: str = "") -> tuple[bytes, About]:
        """Read an object, or a range of it, which ends where the object does.

        Args:
            tag: the ETag that it must still have; empty: any.

        Raises:
            Changed: it has another one.
            OSError: it cannot be read.
        """
        options: dict[str, Any] = {"if_match": tag} if tag and not tag.startswith(_WEAK) else {}
        if start or end is not None:
            options["range"] = {"offset": start} if end is None else (start, end)
        for wait in self._waits():
            try:
                with self._errors(key) as obstore:
                    store = self._connected()
                    with self._telling():
                        result = obstore.get(store, key, options=options)
                    with contextlib.suppress(obstore.exceptions.BaseError):  # the body has broken off
                        data, (first, last) = bytes(result.bytes()), result.range
                        if len(data) == last - first:
                            return data, self._with_tag(tag, self._about(result.meta))
            except OSError as error:
                if error.errno != _BEYOND:
                    raise
                about = self.head(key)
                if about is not None and about.size <= start:
                    return b"", about
            time.sleep(wait)
        raise OSError(errno.EIO, "the store sends less than it says, again and again", self.url(key))

    def _with_tag(self, tag: str, about: About) -> About:
        """Check an ETag once more where it came with the contents: not all stores keep conditions.

        Raises:
            Changed: it is another one than was asked for.
        """
        if tag and about.tag and about.tag != tag:
            raise Changed(f"{self.url(about.key)} was changed")
        return about

    def put(self, key: str, data: bytes, over: str | None = None) -> str:
        """Write an object, and return its version.

        Args:
            over: the version that it must have before, which may be `ABSENT`; None: any.

        Raises:
            FileExistsError: it is there, and should not be.
            Changed: it has another version, or is gone.
            OSError: it is not written, or nobody knows.
        """
        self.check_writable()
        writer, problem = secrets.token_hex(16), None
        attributes = {_WRITER: writer}
        for wait in self._waits():
            try:
                with self._errors(key) as obstore:
                    mode = "overwrite" if over is None else _mode(over)
                    return self._version(
                        obstore.put(self._connected(), key, data, mode=mode, attributes=attributes, chunk_size=PIECE)
                    )
            except (OSError, Changed) as error:
                # An answer that was lost, or that came after the write was done and repeated.
                problem = error
                if over is None or isinstance(error, PermissionError):
                    raise
                about = self.head(key, writer=True)
                if about is not None and about.writer == writer:
                    return about.version
                if isinstance(error, Changed | FileExistsError):
                    raise
            time.sleep(wait)
        assert problem is not None
        raise problem

    def upload(self, key: str, file: Path, on_block: Callable[[], None] = lambda: None) -> None:
        """Write an object from a file, in parts if it is large; readers see all of it or nothing.

        Args:
            on_block: called for every block that is read of the file, in some thread.
        """
        self.check_writable()
        piece = max(PIECE, -(-file.stat().st_size // _PARTS))

        def upload() -> None:
            with self._errors(key) as obstore, _Noticed(file, on_block) as content:
                obstore.put(self._connected(), key, content, chunk_size=piece, max_concurrency=4)

        self._again(upload)

    def copy(self, source: About, target: str) -> None:
        """Copy an object, inside the store, to a key that is free.

        Raises:
            FileExistsError: it is not.
        """
        if source.size <= _SMALL:
            self.put(target, self.get(source.key, tag=source.tag)[0], over=ABSENT)
        elif source.size <= _LARGEST_COPY:
            with self._errors(target) as obstore:
                obstore.copy(self._connected(), source.key, target, overwrite=False)
        else:
            self._carry(source, target)

    def _carry(self, source: About, target: str) -> None:
        """Copy what the store does not: through this process, piece by piece."""
        piece = max(PIECE, -(-source.size // _PARTS))
        with self._errors(target) as obstore:
            # Not by `put` of a generator: obstore cannot be asked for the pieces while it asks for them.
            writer = obstore.open_writer(self._connected(), target, buffer_size=piece, max_concurrency=4)
            for start in range(0, source.size, PIECE):
                writer.write(self.get(source.key, start, min(start + PIECE, source.size), source.tag)[0])
            writer.close()  # only now is it there; `with` would close it after an error too

    def below(self, folder: str) -> Iterator[About]:
        """Yield all objects whose keys begin with a folder's, in the order of keys."""
        marker = None
        for each in self._listed(folder):
            # An object with a slash at its end, by which consoles show an empty folder, comes without the slash.
            if marker is not None and not each.key.startswith(f"{marker.key}/"):
                yield marker
            marker = each if each.size == 0 else None
            if marker is None:
                yield each
        if marker is not None:
            yield marker

    def _listed(self, folder: str) -> Iterator[About]:
        last: str | None = None
        stream: Any = None

        def next_page() -> list[About]:
            nonlocal stream
            with self._errors(folder) as obstore:
                try:
                    if stream is None:
                        listing = obstore.list(self._connected(), folder or None, offset=last, chunk_size=1000)
                        stream = iter(listing)
                    with self._telling():
                        return [self._about(each) for each in next(stream, [])]
                except obstore.exceptions.BaseError:
                    stream = None  # it goes on behind the last one
                    raise

        while page := self._again(next_page):
            last = page[-1].key
            yield from (each for each in page if each.key != folder)

    def inside(self, folder: str) -> tuple[list[str], list[About]]:
        """List the folders and the objects that lie directly in a folder, by their keys."""

        def look() -> Any:
            with self._errors(folder) as obstore:
                store = self._connected()
                with self._telling():
                    return obstore.list_with_delimiter(store, folder or None)

        result = self._again(look)
        folders, objects = list(result["common_prefixes"]), [self._about(each) for each in result["objects"]]
        return folders, [each for each in objects if each.key != folder]

    def delete(self, keys: list[str]) -> None:
        """Delete objects that are there."""
        self.check_writable()

        def delete() -> None:
            with self._errors(keys[0]) as obstore:
                obstore.delete(self._connected(), keys)

        if keys:
            self._again(delete)

    def _connected(self) -> Any:
        obstore = _runtime.start()
        if self._store is None:
            said = frozenset(each for each in os.environ.items() if each[0].startswith(_SAYING))
            key = self._root.root, self._patience, said
            if key not in _runtime.stores:
                _runtime.stores[key] = self._connect(obstore)
            self._store = _runtime.stores[key]
        return self._store

    def _connect(self, obstore: ModuleType) -> Any:
        patience, more = self._patience, {}
        endpoint = self._endpoint()
        if self._root.scheme == "s3":
            more["copy_if_not_exists"] = "multipart"  # a copy on a condition, which S3 has only in this form
        return obstore.store.from_url(
            self._root.root,
            client_options={
                "allow_http": self._root.scheme == "http" or endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=min(10.0, patience.silence)),
                "read_timeout": timedelta(seconds=patience.silence),
                "timeout": timedelta(seconds=20 * patience.silence),
            },
            retry_config={
                "max_retries": patience.retries,
                "retry_timeout": timedelta(seconds=patience.seconds),
                "backoff": {
                    "init_backoff": timedelta(seconds=patience.first_wait),
                    "max_backoff": timedelta(seconds=patience.longest_wait),
                    # A wait is drawn between the first one and this times the one before: by 2 they hardly grow.
                    "base": 3,
                },
            },
            **more,
        )

    def _endpoint(self) -> str:
        """Return the address of the store that the environment gives; empty for the provider's own."""
        return next((os.environ[name] for name in _ENDPOINTS.get(self._root.scheme, ()) if name in os.environ), "")

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell the user if what a request asks for does not begin to come: it is tried for minutes."""
        scheme, _, rest = self._endpoint().partition("://")
        at = f" at {scheme}://{rest.partition('/')[0].rpartition('@')[2]}" if rest else ""
        patience = self._patience
        told = [f"the store of {self._root.root}{at}", patience.seconds - patience.quiet]
        timer = threading.Timer(patience.quiet, _runtime.tell, told)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _again(self, act: Callable[[], Result]) -> Result:
        """Do what may be done twice, until nothing goes wrong on the way."""
        problem: _Unrepeated | None = None
        for wait in self._waits():
            try:
                return act()
            except _Unrepeated as error:
                problem = error
            time.sleep(wait)
        assert problem is not None
        raise problem

    def _waits(self) -> Iterator[float]:
        """Yield how long to wait after each try, in seconds."""
        for number in range(5):
            yield self._patience.first_wait * 2**number

    def _about(self, meta: Any) -> About:
        changed: datetime = meta["last_modified"]
        tag = meta["e_tag"] or ""
        if tag and not tag.startswith(('"', _WEAK)):
            tag = f'"{tag}"'  # Azure writes them without quotes in lists, and with them elsewhere
        return About(meta["path"], meta["size"], changed.timestamp(), tag, self._version(meta))

    def _version(self, result: Any) -> str:
        tag = result["e_tag"] or ""
        return f"{tag} {result['version']}" if self._root.scheme == "gs" else tag

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[Any]:
        """Yield obstore, and turn what it raises into what files raise, without its words: they may name a key."""
        obstore, url = _runtime.start(), self.url(key)
        errors = obstore.exceptions
        try:
            yield obstore
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url) from None
        except OSError as error:
            if error.errno is not None:  # it is one of this module
                raise
            raise _translated(str(error), url) from None
        except errors.AlreadyExistsError:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), url) from None
        except errors.PreconditionError:
            raise Changed(f"{url} was changed, or is gone") from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError):
            what = "the store refuses it: look at the credentials in the environment, and what they allow"
            raise PermissionError(errno.EACCES, what, url) from None
        except (errors.InvalidPathError, ValueError):
            what = "it has a name, or holds an object with one, in which is `..`, an empty part or a line break"
            raise OSError(errno.EINVAL, what, url) from None
        except errors.NotSupportedError:
            raise OSError(
                errno.ENOTSUP, "the store, or the web server, does not do this, such as sending parts of files", url
            ) from None
        except errors.BaseError as error:
            raise _translated(str(error), url) from None


class _Noticed(io.FileIO):
    """A file that tells when it is read."""

    def __init__(self, file: Path, on_block: Callable[[], None]):
        super().__init__(file, "rb")
        self._on_block = on_block

    def read(self, size: int | None = -1, /) -> bytes:
        self._on_block()
        return super().read(size) or b""


_SAYING = ("AWS_", "GOOGLE_", "AZURE_", "HTTP", "NO_PROXY", "http", "no_proxy")  # how names begin that obstore reads
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; profiles of ~/.aws are not read",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


def _mode(over: str) -> Any:
    tag, _, version = over.partition(" ")
    if not over:
        return "create"
    return {"e_tag": tag, "version": version} if version else {"e_tag": tag}


def _translated(text: str, url: str) -> OSError:
    """Return the error for a text of obstore, by the words in it that cannot be secret."""
    # Where there are no credentials, the address of a cloud's machines is asked for some, and that may answer anything.
    if "CredentialsProvider" in text or "metadata endpoint" in text or "169.254." in text:
        what = f"no credentials are in the environment (such as {_CREDENTIALS.get(url.partition(':')[0], 'AWS_...')})"
        return PermissionError(errno.EACCES, what, url)
    status, code = re.search(r"status code: (\d{3})", text), re.search(r"<Code>(\w{1,60})</Code>", text)
    if status:
        number = {"404": errno.ENOENT, "416": _BEYOND}.get(status[1], errno.EIO)
        return OSError(number, f"the store answers {status[1]}{f' ({code[1]})' if code else ''}", url)
    silent = re.search(r"\bTimedOut\b|kind: Timeout\b|timed out", text)
    what = "the store does not answer in time" if silent else "the store cannot be reached, or breaks off"
    tries = re.search(r"\bretries: (\d+)", text)
    kind = OSError if tries and tries[1] != "0" else _Unrepeated
    return kind(errno.ETIMEDOUT if silent else errno.EIO, what, url)
