"""`Accelerator.save_state` and `load_state` on one process: what they refuse, and what is left when they fail."""

import builtins
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from support.launching import run
from torch import nn

from app import Accelerator, UserError
from app.distributed import environment
from app.distributed.state import manifest, sharded
from app.distributed.state.manifest import MANIFEST
from app.storage.local import LocalStorage


class Launch:
    """A model and an optimizer, prepared as by a new process."""

    def __init__(self, width: int = 2):
        self.accelerator = Accelerator()
        self.accelerator.free_memory()
        model = nn.Linear(width, 2)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self) -> "Launch":
        """Train a step."""
        self.accelerator.backward(self.model(torch.ones(1, self.model.in_features)).sum())
        self.optimizer.step()
        return self


@pytest.fixture
def saved(tmp_path):
    """Return a folder with a state."""
    Launch().step().accelerator.save_state(tmp_path / "state")
    return tmp_path / "state"


class Item:
    """An object with a tensor, to register."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def state_dict(self) -> dict:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict) -> None:
        self.tensor = state["tensor"]


NOT_DENSE = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse by rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "masked": lambda: torch.masked.as_masked_tensor(torch.ones(3), torch.ones(3) > 0),
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore")  # torch says of most of these that they are new
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_tensors_that_nobody_could_read_again_are_refused(kind, tmp_path):
    launch = Launch()
    launch.accelerator.register_for_checkpointing(Item(NOT_DENSE[kind]()))
    with pytest.raises(UserError, match=r"objects.0.tensor is a tensor that is .*: a checkpoint keeps dense ones"):
        launch.accelerator.save_state(tmp_path / "state")
    assert not [*tmp_path.iterdir()]


DENSE = {
    "expanded": lambda: torch.ones(1).expand(3),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "8 bits": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "empty": lambda: torch.ones(0, 3),
    "no sign": lambda: torch.ones(3).to(torch.uint16),
}


@pytest.mark.parametrize("kind", DENSE)
def test_dense_tensors_of_every_kind_are_read_again(kind, tmp_path):
    for tensor, act in ((DENSE[kind](), "save_state"), (torch.zeros_like(DENSE[kind]()), "load_state")):
        launch, item = Launch(), Item(tensor)
        launch.accelerator.register_for_checkpointing(item)
        getattr(launch.accelerator, act)(tmp_path / "state")
    assert item.tensor.resolve_conj().equal(DENSE[kind]().resolve_conj())


def test_a_state_is_replaced_by_a_later_one(saved):
    later = Launch().step().step()
    assert later.accelerator.save_state(str(saved)) == str(saved)
    again = Launch()
    again.accelerator.load_state(saved)
    assert again.model.weight.equal(later.model.weight)
    assert [path.name for path in saved.parent.iterdir()] == ["state"]


def test_the_earlier_state_stays_where_writing_fails(saved, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir() if path.is_file()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sharded.dcp, "save", full)
    with pytest.raises(UserError, match=r"state was not written: .*No space left"):
        Launch().step().accelerator.save_state(saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir() if path.is_file()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["state"]


def test_a_save_that_is_killed_leaves_the_earlier_state_and_its_name(saved, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStorage, "publish", killed)
    with pytest.raises(KeyboardInterrupt):
        Launch().step().accelerator.save_state(saved)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"no such folder; .*/(state\.\w+\.replaced) is the state before") as told:
        Launch().accelerator.load_state(saved)
    aside = re.search(r"state\.\w+\.replaced", str(told.value))[0]
    (saved.parent / aside).rename(saved)
    Launch().accelerator.load_state(saved)


def test_the_earlier_state_comes_back_where_the_new_one_cannot_take_its_place(saved, monkeypatch):
    publish, before = LocalStorage.publish, (saved / "state" / "objects.json").read_bytes()

    def fail_once(*args):
        monkeypatch.setattr(LocalStorage, "publish", publish)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(LocalStorage, "publish", fail_once)
    with pytest.raises(UserError, match=r"was not written: .*Input/output error"):
        Launch().step().step().accelerator.save_state(saved)
    assert (saved / "state" / "objects.json").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["state"]


def test_what_killed_saves_have_left_is_swept_and_nothing_else(saved):
    ours = ["state.0123456789abcdef.tmp", "state.0123456789abcdef.replaced"]
    users = ["state.tmp", "state.v2.0123456789abcdef.replaced", "state.old"]
    for name in (*ours, *users):
        (saved.parent / name).mkdir()
        (saved.parent / name / "notes.txt").write_text("mine")
    Launch().accelerator.save_state(saved)
    assert {path.name for path in saved.parent.iterdir()} == {"state", *users}


def test_generators_stay_where_ranks_share_samples_otherwise(saved):
    """As many processes, but other data ranks: those of tensor parallelism draw the same numbers."""
    states = json.loads((saved / "random.json").read_text())["ranks"]
    assert generators_stay(saved, {"data_ranks": 2, "ranks": states})


def generators_stay(saved: Path, random: dict) -> bool:
    """Tell whether loading leaves this process's generators alone, where `random` is what a state says of them."""
    (saved / "random.json").write_text(json.dumps(random))
    names = [path.relative_to(saved) for path in saved.rglob("*") if path.is_file() and path.name != MANIFEST]
    manifest.write(saved, manifest.entries(saved, map(str, names)))
    torch.manual_seed(7)
    drawn = torch.rand(3)
    launch = Launch()
    torch.manual_seed(7)
    launch.accelerator.load_state(saved)
    return torch.rand(3).equal(drawn)


@pytest.mark.parametrize("name", ["notes.txt", "state/notes.txt", "more/notes.txt"])
def test_a_folder_with_something_else_is_left_alone(saved, name):
    (saved / name).parent.mkdir(exist_ok=True)
    (saved / name).write_text("mine")
    with pytest.raises(UserError, match=r"something in .* that save_state did not write .*name another folder"):
        Launch().accelerator.save_state(saved)
    assert (saved / name).read_text() == "mine"


def test_a_file_or_a_link_in_the_way_is_left_alone(saved):
    (saved.parent / "file").write_text("mine")
    (saved.parent / "link").symlink_to(saved)
    for name in ("file", "link"):
        with pytest.raises(UserError, match="name another folder"):
            Launch().accelerator.save_state(saved.parent / name)
    assert (saved.parent / "file").read_text() == "mine" and (saved.parent / "link").is_symlink()


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "state").mkdir()
    Launch().accelerator.save_state(tmp_path / "state")
    Launch().accelerator.load_state(tmp_path / "state")


@pytest.mark.parametrize("name", ["random.json", "state/objects.json", "state/__0_0.distcp", "state/.metadata"])
@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_damage_is_refused(saved, name, damage):
    content = (saved / name).read_bytes()
    (saved / name).unlink()
    if damage == "changed":
        (saved / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    launch = Launch().step()
    before = launch.model.weight.detach().clone()
    with pytest.raises(UserError, match=rf"is damaged: .*{re.escape(name)}"):
        launch.accelerator.load_state(saved)
    assert launch.model.weight.equal(before)


def test_another_model_is_refused(saved):
    with pytest.raises(UserError, match=r"is of another model: models\.0\.weight.* build the model as it was then"):
        Launch(width=3).accelerator.load_state(saved)


def test_a_state_of_a_newer_version_is_not_called_damaged(saved):
    manifest_file = saved / MANIFEST
    manifest_file.write_text(manifest_file.read_text().replace(manifest.FORMAT, "2999-01"))
    with pytest.raises(UserError, match=r"manifest\.json: a newer version wrote it .*: update$"):
        Launch().accelerator.load_state(saved)


def test_a_model_alone_is_told_what_else_was_saved(saved):
    """As a script prepares it that only wants the weights."""
    accelerator = Accelerator()
    accelerator.free_memory()
    accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"has 1 optimizers, this program has 0: prepare and register the same ones"):
        accelerator.load_state(saved)


def test_a_folder_of_accelerates_own_format_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="accelerate's own format is not read"):
        Launch().accelerator.load_state(tmp_path)


SCRIPT = """
from app import Accelerator
accelerator = Accelerator()
{line}
"""


@pytest.mark.parametrize(
    "line, status, told",
    [
        ("accelerator.load_state('gone')", 2, "error: load_state: .*there is no such folder\n"),
        ("Accelerator(mixed_precision='bf16')", 2, "error: Accelerator\\(mixed_precision\\): .*\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise OSError('mine')", 1, "(?s:Traceback .*)OSError: mine\n"),
    ],
)
def test_a_script_ends_as_a_run_does(tmp_path, line, status, told):
    """A mistake that its author can fix is one line, without a traceback; any other error keeps its own."""
    result = run(
        [sys.executable, "-P", "-c", SCRIPT.format(line=line)], env={"ACCELERATE_USE_CPU": "true"}, cwd=tmp_path
    )
    assert result.status == status and re.fullmatch(told, result.output), result.output


@pytest.mark.parametrize("place, name", [(sys, "ps1"), (builtins, "__IPYTHON__")])
def test_what_goes_on_after_errors_keeps_its_own_way_to_show_them(monkeypatch, place, name):
    """A prompt of Python, and a notebook: they do not end."""
    monkeypatch.setattr(environment.end, "reports_user_errors", False)
    monkeypatch.setattr(place, name, ">>> ", raising=False)
    hook = sys.excepthook
    Launch()
    assert sys.excepthook is hook


def test_what_accelerates_methods_have_and_these_do_not_is_refused(tmp_path):
    accelerator = Launch().accelerator
    for call, told in {
        lambda: Accelerator(mixed_precision="bf16"): "mixed_precision.*profile",
        lambda: accelerator.save_state(): "needs a folder",
        lambda: accelerator.load_state(): "needs a folder",
        lambda: accelerator.save_state(tmp_path / "a", safe_serialization=False): "safe_serialization",
        lambda: accelerator.save_state(tmp_path / "a", exclude_frozen_parameters=True): "exclude_frozen_parameters",
        lambda: accelerator.load_state(tmp_path, load_kwargs={"weights_only": False}): "weights_only",
        lambda: accelerator.register_save_state_pre_hook(print): "register_for_checkpointing",
        lambda: accelerator.register_load_state_pre_hook(print): "register_for_checkpointing",
    }.items():
        with pytest.raises(UserError, match=told):
            call()
    assert not (tmp_path / "a").exists()


def test_an_object_that_would_need_a_pickle_is_refused_by_name(tmp_path):
    class Mine:
        def state_dict(self):
            return {"when": object()}

        def load_state_dict(self, content):
            raise AssertionError

    launch = Launch()
    launch.accelerator.register_for_checkpointing(Mine())
    with pytest.raises(UserError, match=r"Mine\.state_dict\(\)\.when is of type object"):
        launch.accelerator.save_state(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_generators_come_back_on_as_many_ranks_as_saved_them(saved, ranks):
    states = json.loads((saved / "random.json").read_text())["ranks"]
    assert generators_stay(saved, {"data_ranks": 1, "ranks": states * ranks}) == (ranks == 2)


def test_a_checkpoint_of_a_run_is_read(tmp_path, rows):
    """Its folder has its own record in the place of the generators' states."""
    from app.checkpoints.record import Record
    from app.checkpoints.store import CheckpointStore

    launch = Launch().step()
    store = CheckpointStore(tmp_path, rank=0, world_size=1)
    assert not store.save(Record(1), lambda folder: sharded.save(launch.accelerator, folder)).problems
    again = Launch()
    again.accelerator.load_state(store.path(1))
    assert again.model.weight.equal(launch.model.weight)
    with pytest.raises(UserError, match="name another folder"):
        launch.accelerator.save_state(store.path(1))
