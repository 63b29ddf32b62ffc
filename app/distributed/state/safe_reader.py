"""Reading checkpoints of torch.distributed.checkpoint without running code that they may hold.

Their list of tensors, `.metadata`, is a pickle, which torch 2.13 loads without checks: whoever can write into a run
folder could run code in the next run.
"""

import io
import os
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo

from app import storage
from app.errors import UserError

# All classes that `FileSystemWriter` names when it writes tensors.
_KINDS = [
    stored.Metadata,
    stored.MetadataIndex,
    stored.StorageMeta,
    stored.TensorStorageMetadata,
    stored.TensorProperties,
    stored.ChunkStorageMetadata,
    stored._MEM_FORMAT_ENCODING,
    _StorageInfo,
]
_KNOWN = {(kind.__module__, kind.__qualname__): kind for kind in _KINDS} | {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
}


class _Files(FileSystem):
    """The files of any storage, for torch's reader: of those in a bucket, only the ranges that it asks for are sent."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        file = Path(path)
        with storage.at(file.parent).open(file.name, follow=True) as stream:
            yield cast(io.IOBase, stream)


class StateReader(dcp.FileSystemReader):
    """Read tensors, and nothing else, from a checkpoint's state folder, wherever it is."""

    def __init__(self, folder: Path | str):
        super().__init__(Path(folder))
        self.fs = _Files()

    def read_metadata(self, *args: Any, **kwargs: Any) -> stored.Metadata:
        """Read which tensors there are.

        Raises:
            UserError: the file names code, holds anything but tensors, or is no such list.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        was = {kind: dict(vars(kind)) for kind in _KINDS}
        try:
            with storage.at(path.parent).open(path.name, follow=True) as file:
                metadata = _Unpickler(file).load()
        except OSError:
            raise
        except Exception as error:
            raise _foreign(path, str(error)) from None
        finally:
            changed = _put_back(was)
        if changed:
            raise _foreign(path, f"it changes {', '.join(changed)}")
        _check(path, metadata)
        metadata.storage_meta = stored.StorageMeta(load_id=self.load_id)
        return metadata

    def read_entries(self) -> dict[str, stored.TensorStorageMetadata]:
        """Read the size and type of each tensor, by its name; errors are those of `read_metadata`."""
        return cast(dict[str, stored.TensorStorageMetadata], self.read_metadata().state_dict_metadata)


class _Unpickler(pickle.Unpickler):
    """Load descriptions of tensors; refuse every other class and every function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        if module.partition(".")[0] == "pathlib":  # the path where it was written, which nothing here needs
            return lambda *parts: None
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 writes members of an Enum with it
            # A new function each time: a pickle may set attributes on what it is given.
            return lambda kind, member: _memory_format(kind, member)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _memory_format(kind: Any, member: str) -> stored._MEM_FORMAT_ENCODING:
    if kind is not stored._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it reads {member} of {kind}")
    return stored._MEM_FORMAT_ENCODING[member]


def _put_back(was: dict[type, dict]) -> list[str]:
    """Undo what a pickle has set on classes, which a pickle can do without code; return the names of those classes."""
    changed = []
    for kind, attributes in was.items():
        now = dict(vars(kind))
        wrong = [name for name in {**now, **attributes} if now.get(name) is not attributes.get(name)]
        for name in wrong:
            if name in attributes:
                setattr(kind, name, attributes[name])
            else:
                delattr(kind, name)
        changed += [kind.__name__] if wrong else []
    return changed


def _check(path: Path, loaded: Any) -> None:
    entries = getattr(loaded, "state_dict_metadata", None)
    places = getattr(loaded, "storage_data", None)
    if type(loaded) is not stored.Metadata or type(entries) is not dict or type(places) is not dict:
        raise _foreign(path, "it is no list of tensors")
    for name, entry in entries.items():
        # Entries of another kind are pickles again, and torch would load them.
        if type(entry) is not stored.TensorStorageMetadata:
            raise _foreign(path, f"{name} is no tensor")
    for index, place in places.items():
        if type(place) is not _StorageInfo or Path(str(place.relative_path)).name != place.relative_path:
            raise _foreign(path, f"{index} lies outside the checkpoint")


def _foreign(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is not what this program writes ({why}), and is not read. If the checkpoint comes from somebody else, "
        "trust none of it; otherwise it is damaged: remove its folder. A run then goes on from the checkpoint before it"
    )
