"""app.distributed.state.safe_reader: reading a list of tensors runs nothing that somebody put into it."""

import io
import json
import os
import pickle
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.tiny import train_and_score
from torch.distributed.checkpoint import metadata as stored

from app import UserError
from app.distributed.state.manifest import MANIFEST, checksum
from app.distributed.state.safe_reader import StateReader


class Payload:
    """Make a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def plant(state: Path, name: str, data: bytes) -> Path:
    """Replace a file of a checkpoint's state, in its manifest too."""
    path, manifest = state / name, json.loads((state.parent / MANIFEST).read_text())
    path.write_bytes(data)
    manifest["files"][f"state/{name}"] = {"size": len(data), "xxh3": checksum(path.parent, path.name)}
    (state.parent / MANIFEST).write_text(json.dumps(manifest))
    return path


def with_payload(path: Path, where: str, trap: Path) -> bytes:
    """Put code into a good list of tensors."""
    metadata = StateReader(path).read_metadata()
    if where == "instead":
        return pickle.dumps(Payload(trap))
    if where == "planner":
        metadata.planner_data = {"models.0.weight": Payload(trap)}
    if where == "entry":
        metadata.state_dict_metadata["models.0.weight"] = Payload(trap)
    return pickle.dumps(metadata)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train_and_score(folder, stop_at=4, keep=1, eval_every=100)
    return folder


@pytest.fixture
def state(trained):
    """Give the state folder of a run's checkpoint, and put it back in the end."""
    (checkpoint,) = (trained / "checkpoints").iterdir()
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    yield checkpoint / "state"
    for path, data in before.items():
        path.write_bytes(data)


@pytest.mark.parametrize("where", ["instead", "planner", "entry"])
def test_planted_code_is_refused_and_not_run(trained, state, tmp_path, where):
    trap = tmp_path / "trap"
    path = plant(state, ".metadata", with_payload(state, where, trap))
    with pytest.raises(UserError, match=r"mkdir") as refusal:
        train_and_score(trained)
    assert str(path) in str(refusal.value) and not trap.exists()
    pickle.loads(path.read_bytes())
    assert trap.exists()  # the trap works


def test_entries_that_are_no_tensors_are_refused(trained, state, tmp_path):
    """torch saves anything but tensors as pickles of their own, and loads them with code and all."""
    dcp.save({"models.0.weight": Payload(tmp_path / "trap")}, checkpoint_id=tmp_path / "other", no_dist=True)
    plant(state, "__0_0.distcp", (tmp_path / "other" / "__0_0.distcp").read_bytes())
    path = plant(state, ".metadata", (tmp_path / "other" / ".metadata").read_bytes())
    with pytest.raises(UserError, match=f"{path}.*BytesStorageMetadata"):
        train_and_score(trained)
    # torch 2.11 keeps the reason to itself.
    with pytest.raises(dcp.CheckpointException, match=r"BytesStorageMetadata|metadata is None"):
        dcp.load({"models.0.weight": None}, storage_reader=StateReader(state), no_dist=True)
    assert not (tmp_path / "trap").exists()


def test_classes_cannot_be_changed(state):
    """A pickle may set attributes on what it names."""
    was, stream = dict(vars(stored.StorageMeta)), io.BytesIO()
    # The class, and for it the state (None, {"__eq__": another class}).
    stream.write(b"\x80\x04ctorch.distributed.checkpoint.metadata\nStorageMeta\n")
    stream.write(b"N}\x8c\x06__eq__ctorch.distributed.checkpoint.metadata\nMetadata\ns\x86b.")
    (state / ".metadata").write_bytes(stream.getvalue())
    with pytest.raises(UserError, match="it changes StorageMeta"):
        StateReader(state).read_metadata()
    assert dict(vars(stored.StorageMeta)) == was


def test_other_contents_are_refused_with_the_file(state):
    good = StateReader(state).read_metadata()
    next(iter(good.storage_data.values())).relative_path = "../../../elsewhere"
    contents = [b"", b"\0" * 99, b"{}", pickle.dumps({}), pickle.dumps(stored.Metadata({})), pickle.dumps(good)]
    for content in contents:
        (state / ".metadata").write_bytes(content)
        with pytest.raises(UserError, match=r"state/\.metadata is not what this program writes"):
            StateReader(state).read_metadata()


class OldPython(pickle.Pickler):
    """Write members of an Enum as Python 3.11.0 to 3.11.3 does, which Debian 12 has."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_what_older_pythons_write_is_read(state):
    good, written = StateReader(state).read_metadata(), io.BytesIO()
    OldPython(written).dump(good)
    assert b"getattr" in written.getvalue()
    (state / ".metadata").write_bytes(written.getvalue())
    assert StateReader(state).read_entries() == good.state_dict_metadata != {}


@pytest.mark.parametrize(
    "read", [(stored.StorageMeta, "__init__"), (stored._MEM_FORMAT_ENCODING, "__class__"), (torch.Size, "__new__")]
)
def test_nothing_but_memory_formats_is_read_from_classes(state, read):
    """`getattr` would reach any code from any class."""

    class Reading:
        def __reduce__(self):
            return getattr, read

    (state / ".metadata").write_bytes(pickle.dumps(Reading()))
    with pytest.raises(UserError, match=rf"{read[1]}.*, and is not read"):
        StateReader(state).read_metadata()


def test_what_is_saved_is_read(state):
    """Every type of tensor that torch saves."""
    types = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]
    tensors = {str(kind): torch.ones(2, 3).to(kind) for kind in types}
    dcp.save(tensors, checkpoint_id=state.parent / "types", no_dist=True)
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(read, storage_reader=StateReader(state.parent / "types"), no_dist=True)
    assert all(read[name].equal(tensors[name]) and read[name].dtype == tensors[name].dtype for name in tensors)
