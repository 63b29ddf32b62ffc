"""app.reader: nothing in a checkpoint is run, and no object in it is made but those of our own files."""

import contextlib
import os
import pickle
import pickletools
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from app import UserError
from app.reader import StateReader
from tiny import enter, saved, state_folder, train


class Harm:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def as_the_list(state: Path, harm: Harm) -> None:
    (state / ".metadata").write_bytes(pickle.dumps(harm))


def inside_the_list(state: Path, harm: Harm) -> None:
    """The list is right, and has something beside it."""
    metadata = StateReader(state).read_metadata()
    metadata.planner_data = harm
    (state / ".metadata").write_bytes(pickle.dumps(metadata))


def below_a_known_module(state: Path, harm: Harm) -> None:
    """torch.serialization has os, and a name may have dots."""
    folder = str(harm.marker).encode()
    code = b"\x80\x04\x8c\x05torch\x8c\x16serialization.os.mkdir\x93\x8c" + bytes([len(folder)]) + folder + b"\x85R."
    assert {"STACK_GLOBAL", "REDUCE"} <= {operation.name for operation, _, _ in pickletools.genops(code)}
    (state / ".metadata").write_bytes(code)


def as_bytes_beside_tensors(state: Path, harm: Harm) -> None:
    """torch saves what is no tensor as a pickle, and loads it so."""
    tensors = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in StateReader(state).read_metadata().state_dict_metadata.items()
    }
    name = next(iter(tensors))
    dcp.save({**tensors, name: harm}, checkpoint_id=state, no_dist=True)


def outside_the_folder(state: Path, harm: Harm) -> None:
    metadata = StateReader(state).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = f"../state/{place.relative_path}"
    (state / ".metadata").write_bytes(pickle.dumps(metadata))


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
PLANTED = [as_the_list, inside_the_list, below_a_known_module, as_bytes_beside_tensors, outside_the_folder]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(folder)
    return folder


@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_planted_in_a_checkpoint_is_named_and_not_run(finished, tmp_path, plant):
    """Its manifest fits, so that nothing but its contents speaks against it."""
    run, marker = tmp_path / "run", tmp_path / "harm"
    shutil.copytree(finished, run)
    state = state_folder(run, 8)
    plant(state, Harm(marker))
    for file in state.iterdir():
        enter(state.parent, f"state/{file.name}")
    with pytest.raises(UserError) as refusal:
        train(run)
    assert str(state / ".metadata") in str(refusal.value)
    assert not marker.exists() and saved(run) == [6, 8]


def test_the_plants_would_do_harm(finished, tmp_path):
    """torch's own reader runs them: a canary for the day when it no longer does."""
    for plant in PLANTED[:4]:
        state, marker = tmp_path / plant.__name__, tmp_path / f"{plant.__name__}-harm"
        shutil.copytree(state_folder(finished, 8), state)
        harm = Harm(marker)
        plant(state, harm)
        if plant is as_bytes_beside_tensors:
            names = dcp.FileSystemReader(state).read_metadata().state_dict_metadata
            held = next(name for name, entry in names.items() if not isinstance(entry, TensorStorageMetadata))
            dcp.load({held: harm}, checkpoint_id=state, no_dist=True)
        else:
            with contextlib.suppress(AttributeError):
                dcp.FileSystemReader(state).read_metadata()
        assert marker.exists(), plant.__name__
