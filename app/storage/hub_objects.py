"""The files of a data set on the Hugging Face Hub (hf://datasets/ORG/NAME, perhaps @REVISION), which are only read."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from typing import Any

from app.storage.addresses import Address
from app.storage.interface import Changed
from app.storage.objects import PATIENCE, About, Objects, Patience


class HubObjects(Objects):
    """What a data set's repository holds, by paths that begin with its name."""

    def __init__(self, root: Address, patience: Patience = PATIENCE):
        super().__init__(root, patience)
        self._committed: dict[tuple[str, str], str] = {}

    def check_writable(self) -> None:
        raise OSError(errno.EROFS, "the Hub is only read", str(self._root))

    def head(self, key: str, writer: bool = False) -> About | None:
        with contextlib.suppress(_Absent), self._errors(key):
            return self._about_file(self._asked("info", key, refresh=True, expand_info=True))
        return None

    def get(self, key: str, start: int = 0, end: int | None = None, tag: str = "") -> tuple[bytes, About]:
        """See `Objects.get`. With a tag, what is read is the file as the commit that has made it left it."""
        with self._errors(key):
            place = self._of_commit(key, tag) if tag else key
            data = self._asked("cat_file", place, start=start, end=end, cache_type="none")  # it would read ahead
            return data, About(key, start + len(data), 0.0, tag, tag)

    def _of_commit(self, key: str, tag: str) -> str:
        """Return the key of a file in the commit that has made it, which nobody can change: asked for once.

        Raises:
            Changed: the file has another tag by now.
        """
        if (key, tag) not in self._committed:
            info = self._asked("info", key, refresh=True, expand_info=True)
            if info["blob_id"] != tag:
                raise Changed(f"{self.url(key)} was changed")
            organization, name, inner = key.split("/", 2)
            commit = info.get("last_commit")
            self._committed[key, tag] = (
                f"{organization}/{name.partition('@')[0]}@{commit.oid}/{inner}" if commit else key
            )
        return self._committed[key, tag]

    def below(self, folder: str) -> Iterator[About]:
        with self._errors(folder):
            found = self._asked("find", folder, detail=True, refresh=True)
            listed = [self._about_file(each) for each in found.values()]
        yield from (each for each in listed if each is not None and each.key != folder)

    def inside(self, folder: str) -> tuple[list[str], list[About]]:
        with self._errors(folder):
            found = self._asked("ls", folder, detail=True, refresh=True)
            listed = [self._about_file(each) for each in found]
            folders = [self._key(each["name"]) for each in found if each["type"] == "directory"]
        return folders, [each for each in listed if each is not None and each.key != folder]

    def _asked(self, method: str, key: str, **arguments: Any) -> Any:
        """Call a method of huggingface_hub's file system, again where something goes wrong on the way."""
        from huggingface_hub import HfFileSystem
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
        from huggingface_hub.utils import httpx  # the library that it uses: httpx2 since 2.4, httpx before

        act = getattr(HfFileSystem(), method)  # fsspec keeps one for each thread, with what it has listed
        *waits, _ = self._waits()
        for wait in waits:
            try:
                return act(f"{self._root.bucket}/{key}", **arguments)
            except OfflineModeIsEnabled:
                raise
            except HfHubHTTPError as error:
                if error.response is None or error.response.status_code < 500:
                    raise
            except httpx.TransportError:
                pass
            time.sleep(wait)
        return act(f"{self._root.bucket}/{key}", **arguments)

    def _key(self, name: str) -> str:
        return name.removeprefix(f"{self._root.bucket}/")

    def _about_file(self, info: dict[str, Any]) -> About | None:
        """Return what the Hub says of a file; None for a folder."""
        if info["type"] != "file":
            return None
        commit, tag = info.get("last_commit"), info["blob_id"]
        return About(self._key(info["name"]), info["size"], commit.date.timestamp() if commit else 0.0, tag, tag)

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Turn what huggingface_hub raises into what files raise, with what to do."""
        try:
            yield
        except Exception as error:
            if (translated := self._translated(error, self.url(key))) is None:
                raise
            raise translated from None

    def _translated(self, error: BaseException, url: str) -> OSError | None:
        from huggingface_hub import errors
        from huggingface_hub.utils import httpx

        causes = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)

        def has(*kinds: type[BaseException]) -> bool:
            return any(isinstance(each, kinds) for each in causes)

        if has(errors.OfflineModeIsEnabled):
            return OSError(errno.ENETDOWN, "HF_HUB_OFFLINE is set, so the Hub is not asked: unset it", url)
        if has(errors.GatedRepoError):
            what = "the data set is gated: accept its terms on its page, and log in with `hf auth login`"
            return PermissionError(errno.EACCES, what, url)
        if has(errors.RepositoryNotFoundError):
            what = "the Hub has no such data set, or it is private: log in with `hf auth login`"
            return PermissionError(errno.EACCES, what, url)
        if has(errors.RevisionNotFoundError):
            return OSError(errno.ENXIO, "the data set has no such revision", url)
        if has(errors.HFValidationError, errors.HfUriError):
            return OSError(errno.EINVAL, "this is no name on the Hub: give hf://datasets/ORG/NAME", url)
        if has(errors.EntryNotFoundError) or isinstance(error, FileNotFoundError):
            return _Absent(errno.ENOENT, os.strerror(errno.ENOENT), url)
        if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
            return OSError(errno.EIO, f"the Hub answers {error.response.status_code}", url)
        if has(httpx.TimeoutException):
            return OSError(errno.ETIMEDOUT, "the Hub does not answer in time", url)
        if has(httpx.TransportError):
            return OSError(errno.EIO, "the Hub cannot be reached, or breaks off", url)
        return None


class _Absent(FileNotFoundError):
    """A repository has no file of a name."""
