"""Reading a checkpoint's state without trusting it: nothing in its files names a class or function that is then run."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from app.errors import UserError

# What torch 2.13 writes into a checkpoint's list of tensors, when there is nothing but tensors to list.
_KNOWN = {
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
} | {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    )
}


class StateReader(FileSystemReader):
    """Read what `Accelerator.save_state` wrote. The files' list is a pickle, which torch's own reader would trust."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the list of the tensors that there are.

        Raises:
            UserError: it is damaged, or lists anything but tensors in files beside it.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            _check(metadata)
        except FileNotFoundError:
            raise
        except Exception as error:  # a pickle can be wrong in any way
            raise UserError(
                f"{path} is not a list of tensors that was written here ({error}), and was not loaded: move the "
                "checkpoint's folder away to go on from an older one"
            ) from None
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Knows the few types of a list of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise ValueError(f"it names {module}.{name}")


def _check(metadata: Any) -> None:
    if not isinstance(metadata, Metadata):
        raise ValueError(f"it holds a {type(metadata).__name__}")
    for name, entry in metadata.state_dict_metadata.items():
        # Bytes would be unpickled by torch when they are loaded.
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is no tensor")
    for place in metadata.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"it leads to {place.relative_path}")
