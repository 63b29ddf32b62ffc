"""folder: one run holds a folder at a time, a run goes on with its own settings only, and files are never half."""

import json
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from support.run_records import record

from app.config import RunConfig, to_dict
from app.errors import UserError
from app.rundir.folder import RunFolder

# A fork starts at once, and has claimed nothing: locks are not inherited.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
FORK = multiprocessing.get_context("fork")


@dataclass
class Config:
    run: RunConfig


def claim(path: Path, has_checkpoint: bool = False, optim=None, **fields) -> tuple[RunFolder, list[str]]:
    settings = replace(RunConfig(dir=str(path)), **fields)
    folder = RunFolder(path, "", Config(settings))
    notes = folder.claim({"optim": optim or {"lr": 0.1}, "run": to_dict(settings)}, settings, has_checkpoint)
    return folder, notes


def began(path: Path, *args, **fields) -> Path:
    """Leave a folder as a run leaves it that has begun."""
    folder, _ = claim(path, *args, **fields)
    try:
        folder.begin(record())
    except OSError as error:
        folder.release(discard=True)
        raise folder.cannot_write(error) from None
    folder.release()
    return path


@contextmanager
def held_elsewhere(path: Path):
    """Have another process hold a folder, and kill it with SIGKILL in the end."""
    ours, theirs = FORK.Pipe()

    def hold():
        _held = claim(path)
        theirs.send(os.getpid())
        signal.pause()

    process = FORK.Process(target=hold, daemon=True)
    process.start()
    try:
        assert ours.poll(30)
        yield ours.recv()
    finally:
        process.kill()
        process.join(30)


def refusal(path: Path, *args, **fields) -> str:
    with pytest.raises(UserError) as error:
        claim(path, *args, **fields)
    return str(error.value)


def test_a_folder_in_use_is_refused_with_its_holder(tmp_path):
    with held_elsewhere(tmp_path / "run") as pid:
        words = refusal(tmp_path / "run")
        assert f"process {pid} on {os.uname().nodename} since " in words and "--run.dir" in words
        assert str(tmp_path / "run") in words
        assert refusal(tmp_path / "run") == words  # asking takes nothing from the holder
    folder, _ = claim(tmp_path / "run")  # the holder was killed: its lock went with it
    folder.release()


def test_a_refused_folder_is_left_as_it_was(tmp_path):
    with held_elsewhere(tmp_path / "run"):
        before = contents(tmp_path)
        refusal(tmp_path / "run", optim={"lr": 0.5})
        assert contents(tmp_path) == before


def contents(folder: Path) -> dict:
    """All but the lock, which stays where a run was: a lock whose file goes away is none."""
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*") if p.name != "lock"}


def test_reading_the_lock_does_not_open_it(tmp_path):
    """A POSIX lock ends when its process closes the file once, whoever opened it: copying the folder would do."""
    folder, _ = claim(tmp_path / "run")
    (tmp_path / "run" / "lock").read_text()
    assert refused_elsewhere(tmp_path / "run")
    folder.release()
    assert not refused_elsewhere(tmp_path / "run")


def refused_elsewhere(path: Path) -> bool:
    def attempt():

        from app.rundir import lock

        lock._held.clear()  # what the fork remembers of its parent
        try:
            claim(path)[0].release()
        except UserError:
            os._exit(3)

    process = FORK.Process(target=attempt, daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode in (0, 3)
    return process.exitcode == 3


def test_a_lock_taken_while_its_file_goes_is_not_a_lock(tmp_path):
    """B opens the lock file, A gives the folder back, B gets its lock, C comes: B and C must not both be in."""
    path = tmp_path / "run"
    first, _ = claim(path)
    ours, theirs = FORK.Pipe()

    def late():
        import fcntl

        from app.rundir import lock

        lock._held.clear()
        take = fcntl.flock

        def wait_and_take(*args):
            theirs.send("opened")
            theirs.recv()
            fcntl.flock = take
            return take(*args)

        fcntl.flock = wait_and_take
        try:
            _held = claim(path)
            theirs.send("in")
        except UserError:
            theirs.send("out")
        signal.pause()

    process = FORK.Process(target=late, daemon=True)
    process.start()
    try:
        assert ours.poll(30) and ours.recv() == "opened"
        first.release()
        ours.send("go")
        assert ours.poll(30)
        second = ours.recv() == "in"
        assert not second or refused_elsewhere(path)
    finally:
        process.kill()
        process.join(30)


def test_two_runs_of_one_process_do_not_share_a_folder(tmp_path, monkeypatch):
    folder, _ = claim(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path / "run", Path("run"), tmp_path / "link"):
        assert "another run of this process" in refusal(name)
    folder.release()
    folder, _ = claim(tmp_path / "link")
    folder.release()
    folder.release()  # twice does no harm


def test_a_refusal_holds_nothing(tmp_path):
    """In a notebook, the corrected cell is run in the same process."""
    began(tmp_path / "run")
    assert "optim.lr" in refusal(tmp_path / "run", True, optim={"lr": 0.2})
    assert not refused_elsewhere(tmp_path / "run")
    folder, _ = claim(tmp_path / "run", True)
    folder.release()


def test_a_refusal_leaves_no_folder_behind(tmp_path):
    refusal(tmp_path / "run", resume="must")
    assert not (tmp_path / "run").exists()


def test_a_changed_config_is_refused_field_by_field(tmp_path):
    began(tmp_path / "run", seed=1)
    before = contents(tmp_path)
    words = refusal(tmp_path / "run", True, seed=2, optim={"lr": 0.2}, log_every=3)
    assert "optim.lr: 0.1 before, 0.2 now" in words and "run.seed: 1 before, 2 now" in words
    assert "log_every" not in words and str(tmp_path / "run") in words
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"eval_every": 5, "save_every": 5, "log_every": 1},
        {"keep": 7, "best": "eval/accuracy"},
        {"trackers": ()},
        {"stop_at": 9},
        {"workers": 3, "threads": 1},
        {"resume": "must"},
        {"dir": "elsewhere"},
    ],
)
def test_harmless_fields_may_change(tmp_path, fields):
    began(tmp_path / "run")
    folder, notes = claim(tmp_path / "run", True, **fields)
    folder.begin(record())
    folder.release()
    assert notes == []
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["run"]
    assert {name: saved[name] for name in fields} == {k: list(v) if v == () else v for k, v in fields.items()}


@pytest.mark.parametrize("fields", [{"steps": 90}, {"epochs": 4.0}])
def test_another_length_is_accepted_and_said(tmp_path, fields):
    began(tmp_path / "run", steps=0, epochs=2.0)
    folder, notes = claim(tmp_path / "run", True, **{"steps": 0, "epochs": 2.0, **fields})
    folder.release()
    ((name, value),) = fields.items()
    (note,) = notes
    assert f"run.{name}" in note and str(value) in note and "learning rate" in note


def test_a_length_that_decides_nothing_is_not_mentioned(tmp_path):
    """Epochs, where --run.steps is given."""
    began(tmp_path / "run", steps=9, epochs=2.0)
    folder, notes = claim(tmp_path / "run", True, steps=9, epochs=3.0)
    folder.release()
    assert notes == []


def test_a_refused_claim_leaves_the_settings_that_were(tmp_path):
    """Also when it is refused later, once the data is known: the run has not begun."""
    path = began(tmp_path / "run", steps=9)
    before = (path / "config.yaml").read_bytes()
    folder, _ = claim(path, True, steps=3)
    folder.release(discard=True)
    assert (path / "config.yaml").read_bytes() == before


def test_any_config_may_start_where_no_checkpoint_is(tmp_path):
    began(tmp_path / "run", seed=1)
    folder, notes = claim(tmp_path / "run", False, seed=2, optim={"lr": 0.2})
    folder.begin(record())
    folder.release()
    assert notes == [] and "seed: 2" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("resume", "has_checkpoint", "words"),
    [
        ("auto", False, None),
        ("auto", True, None),
        ("must", True, None),
        ("must", False, r"--run\.resume must.*no checkpoint"),
        ("never", False, None),
        ("never", True, r"--run\.resume never.*holds a run"),
    ],
)
def test_resume_modes(tmp_path, resume, has_checkpoint, words):
    began(tmp_path / "run")
    if words:
        assert re.search(words, refusal(tmp_path / "run", has_checkpoint, resume=resume))
    else:
        claim(tmp_path / "run", has_checkpoint, resume=resume)[0].release()


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/samestep/run"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("in the way")
    words = refusal(tmp_path / path)
    assert words.startswith(f"--run.dir {tmp_path / path}: ") and "give a folder" in words
    assert (tmp_path / "file").read_text() == "in the way"


def test_info_is_kept_over_launches(tmp_path):
    folder, _ = claim(tmp_path / "run")
    folder.begin(replace(record(), trackers={"wandb": "abc"}))
    folder.update(status="preempted", metrics={"score": math.nan})
    folder.release()
    folder, _ = claim(tmp_path / "run", True)
    metrics = {"score": None}  # JSON has no NaN
    assert folder.record == replace(record(), status="preempted", trackers={"wandb": "abc"}, metrics=metrics)
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == folder.record.to_json()
    folder.release()
    assert sorted(p.name for p in contents(tmp_path / "run")) == ["config.yaml", "run.json"]


def test_discarding_removes_what_was_made(tmp_path):
    folder, _ = claim(tmp_path / "run")
    folder.release(discard=True)
    assert not (tmp_path / "run").exists()


def test_discarding_leaves_a_folder_that_was_there(tmp_path):
    (tmp_path / "run").mkdir()
    folder, _ = claim(tmp_path / "run")
    folder.release(discard=True)
    assert contents(tmp_path) == {tmp_path / "run": None}


def test_discarding_leaves_files_of_others(tmp_path):
    folder, _ = claim(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    folder.release(discard=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_discarding_a_launch_leaves_the_run_of_earlier_ones(tmp_path):
    """A resumed run that ends before its first step (its data cannot be read, Ctrl-C) is still the run that it was."""
    began(tmp_path / "run")
    before = contents(tmp_path)
    folder, _ = claim(tmp_path / "run", True)
    folder.release(discard=True)
    assert contents(tmp_path) == before
    assert "optim.lr" in refusal(tmp_path / "run", True, optim={"lr": 0.2})


def test_info_is_whole_whenever_the_process_is_killed(tmp_path):
    """Killed at each file operation of an update in turn: run.json holds all of the old or all of the new."""
    path = began(tmp_path / "run")
    was, new = record().to_json(), record(4).to_json()
    found, killed = [], True
    while killed:
        (path / "run.json").write_text(json.dumps(was))
        killed = dies_at_operation(len(found), lambda: update(path, step=4))
        found.append(json.loads((path / "run.json").read_text()))
    assert found[0] == was and found[-1] == new and all(info in (was, new) for info in found)
    assert len(found) > 5


def test_a_program_that_reads_the_info_sees_all_of_it(tmp_path):
    """The file is replaced, never written in place."""
    path = began(tmp_path / "run")
    was = (path / "run.json").read_text()
    with (path / "run.json").open() as reader:
        update(path, step=4)
        assert reader.read() == was != (path / "run.json").read_text()


def update(path: Path, **fields) -> None:
    folder, _ = claim(path, True)
    folder.update(**fields)
    folder.release()


def dies_at_operation(number: int, call) -> bool:
    """Run `call` in another process that is killed at so-many-th operation on a file; tell whether it came to that."""
    left = number

    def hook(event, args):
        nonlocal left
        if event in ("open", "fcntl.lockf", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def child():
        sys.addaudithook(hook)
        call()
        os._exit(0)

    process = FORK.Process(target=child, daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def on_a_full_disk(call) -> int:
    """Run `call` where files cannot grow beyond 100 bytes; returns 0, 2 for a UserError, 3 for an OSError."""

    def child():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            call()
        except UserError:
            os._exit(2)
        except OSError:
            os._exit(3)

    process = FORK.Process(target=child, daemon=True)
    process.start()
    process.join(30)
    return process.exitcode


def test_a_full_disk_leaves_the_info_that_was(tmp_path):
    path = began(tmp_path / "run")
    folder, _ = claim(path, True)
    before = (path / "run.json").read_bytes()
    assert on_a_full_disk(lambda: folder.update(error="x" * 5000)) == 3
    assert (path / "run.json").read_bytes() == before
    folder.release()


def test_a_full_disk_is_said_before_anything_is_trained(tmp_path):
    assert on_a_full_disk(lambda: began(tmp_path / "run")) == 2
    assert not contents(tmp_path)


DAMAGED = pytest.mark.parametrize(
    "content", [b"", b"\0" * 64, b"{", b"{\xff", None], ids=["empty", "zeroed", "cut", "flipped", "missing"]
)


def damage(path: Path, content: bytes | None) -> None:
    """As a power failure may leave a file."""
    path.unlink() if content is None else path.write_bytes(content)


@DAMAGED
def test_a_damaged_run_json_is_written_anew(tmp_path, content):
    path = began(tmp_path / "run")
    damage(path / "run.json", content)
    folder, notes = claim(path, True)
    folder.begin(record(4))
    folder.release()
    assert len(notes) == (content is not None) and all("run.json is damaged" in note for note in notes)
    assert json.loads((path / "run.json").read_text()) == record(4).to_json()


@DAMAGED
def test_where_config_yaml_is_damaged_the_settings_of_the_checkpoint_decide(tmp_path, content):
    path = began(tmp_path / "run", seed=1)
    saved = yaml.safe_load((path / "config.yaml").read_text())
    damage(path / "config.yaml", content)
    folder, (note,) = claim(path, True, seed=2)
    assert "config.yaml" in note
    with pytest.raises(UserError, match=r"run\.seed: 1 before, 2 now"):
        folder.check_saved_settings(saved)
    folder.release(discard=True)
    folder, _ = claim(path, True, seed=1, log_every=3)
    assert folder.check_saved_settings(saved) == []
    folder.begin(record())
    folder.release()
    assert yaml.safe_load((path / "config.yaml").read_text())["run"]["log_every"] == 3


RECIPE = '''"""What it does."""
from dataclasses import dataclass

@dataclass
class Config:
    width: int = 4
    """Of the model."""

def loss(x):
    return x.square().mean()  # as always
'''
REWRITTEN = RECIPE.replace("as always", "which is right").replace("What it does.", "What it does now.")
REWRITTEN = REWRITTEN.replace("Of the model.", "Width.").replace("x.square().mean()", "(\n        x.square().mean())")


def with_recipe(path: Path, source: str, **fields) -> list[str]:
    """Begin, or go on, with the run of a recipe; returns what is said."""
    settings = replace(RunConfig(dir=str(path)), **fields)
    folder = RunFolder(path, source, Config(settings))
    try:
        notes = folder.claim({"run": to_dict(settings)}, settings, (path / "run.json").exists())
        folder.begin(record())
    finally:
        folder.release()
    return notes


def test_a_recipe_that_means_the_same_goes_on(tmp_path):
    """Comments, docstrings and formatting may change; so may where a recipe has no file, as in a notebook."""
    for source in (RECIPE, REWRITTEN, "", RECIPE):
        assert with_recipe(tmp_path / "run", source) == []
    assert (tmp_path / "run" / "recipe.py").read_text() == RECIPE


def test_a_recipe_that_means_something_else_is_refused_with_the_difference(tmp_path):
    with_recipe(tmp_path / "run", RECIPE)
    before = contents(tmp_path)
    other = REWRITTEN.replace("square", "abs")
    with pytest.raises(UserError) as refused:
        with_recipe(tmp_path / "run", other)
    words = str(refused.value)
    assert "\n  -    return x.square().mean()\n  +    return x.abs().mean()\n" in words
    assert "which is right" not in words and "--run.changed accept" in words and "recipe.py" in words
    assert contents(tmp_path) == before
    (note,) = with_recipe(tmp_path / "run", other, changed="accept")
    assert "+    return x.abs().mean()" in note
    assert with_recipe(tmp_path / "run", other) == []


def test_a_long_difference_is_cut(tmp_path):
    with_recipe(tmp_path / "run", RECIPE)
    with pytest.raises(UserError, match="more") as refused:
        with_recipe(tmp_path / "run", RECIPE + "".join(f"x{i} = {i}\n" for i in range(100)))
    assert len(str(refused.value).splitlines()) < 20


@pytest.mark.parametrize("content", ["def", "\0", ""])
def test_a_damaged_copy_of_the_recipe_blocks_nothing(tmp_path, content):
    with_recipe(tmp_path / "run", RECIPE)
    (tmp_path / "run" / "recipe.py").write_text(content)
    if content:
        (note,) = with_recipe(tmp_path / "run", RECIPE)
        assert "recipe.py is damaged" in note
    else:
        assert with_recipe(tmp_path / "run", RECIPE) == []
    assert (tmp_path / "run" / "recipe.py").read_text() == RECIPE
