"""app.checkpoints.store: what is there is whole, the last good one is never given up, and damage is found and named."""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.damage import DAMAGE, flip

from app.checkpoints.record import RECORD, SCORES, Record
from app.checkpoints.store import CheckpointStore
from app.distributed.state.attempt import STATE, SaveOutcome
from app.distributed.state.manifest import MANIFEST, checksum, vouch
from app.errors import UserError
from app.storage.local import LocalStorage

# Children start as forks: at once, with torch imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
FILES = [MANIFEST, RECORD, f"{STATE}/__0_0.distcp", f"{STATE}/more/deep.bin", f"{STATE}/none.bin"]


def writer(step: int) -> Callable[[str], None]:
    """Give what writes the state of a step: a few files, one of them empty, one deeper."""

    def write(folder: str) -> None:
        state = Path(folder)
        (state / "more").mkdir(parents=True)
        (state / "__0_0.distcp").write_bytes(f"weights of step {step} ".encode() * 50)
        (state / "more" / "deep.bin").write_bytes(bytes([step % 256]) * 999)
        (state / "none.bin").touch()

    return write


def checkpoints(folder: Path, **options) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", rank=0, world_size=1, **options)


def save(to: CheckpointStore, *steps: int, **metrics: float) -> None:
    for step in steps:
        assert to.save(Record(step, metrics, unknown={"note": step}), writer(step)) == SaveOutcome()


def fails(to: CheckpointStore, step: int) -> bool:
    return bool(to.save(Record(step, unknown={"note": step}), writer(step)).problems)


def newest(of: CheckpointStore) -> tuple[int | None, list[str]]:
    """Return the step of the newest good checkpoint, after a look at all its files, and the warnings on the way."""
    warnings: list[str] = []
    found = of.newest(warnings.append)
    if found is None:
        return None, warnings
    state, record = found
    step = record.step
    assert state == of.path(step) / STATE and record.unknown == {"note": step}
    assert (state / "__0_0.distcp").read_bytes() == f"weights of step {step} ".encode() * 50
    assert (state / "more" / "deep.bin").read_bytes() == bytes([step % 256]) * 999
    assert (state / "none.bin").read_bytes() == b""
    return step, warnings


def names(of: CheckpointStore) -> list[str]:
    return sorted(path.name for path in of.folder.iterdir())


def test_nothing_is_found_where_nothing_was_saved(tmp_path):
    assert checkpoints(tmp_path).steps() == [] and newest(checkpoints(tmp_path)) == (None, [])


def test_a_saved_step_is_found_with_its_record(tmp_path):
    to = checkpoints(tmp_path)
    save(to, 7, loss=0.5)
    assert to.steps() == [7] and names(to) == ["step-00000007"]
    _, record = to.newest(print)
    assert record == Record(7, {"loss": 0.5}, unknown={"note": 7})
    assert newest(to) == (7, [])


def test_the_manifest_has_size_and_hash_of_every_other_file(tmp_path):
    to = checkpoints(tmp_path)
    save(to, 1)
    manifest = json.loads((to.path(1) / MANIFEST).read_text())
    assert manifest["hash"] == "xxh3_128"
    found = [path for path in to.path(1).rglob("*") if path.is_file() and path.name != MANIFEST]
    assert set(manifest["files"]) == {str(path.relative_to(to.path(1))) for path in found} == set(FILES) - {MANIFEST}
    for path in found:
        entry = manifest["files"][str(path.relative_to(to.path(1)))]
        assert entry == {"size": path.stat().st_size, "xxh3": checksum(path.parent, path.name)}


def test_nothing_has_the_name_of_a_checkpoint_before_it_is_whole(tmp_path):
    to = checkpoints(tmp_path)
    save(to, 1)

    def write(folder: str) -> None:
        writer(2)(folder)
        assert to.steps() == [1] and newest(to) == (1, [])

    assert to.save(Record(2, unknown={"note": 2}), write) == SaveOutcome()
    assert newest(to) == (2, [])


def test_everything_is_on_disk_before_the_name_is_given(tmp_path, flushes_and_renames):
    """Files first, then folders, the rename, and last the list of names that holds it."""
    to, events = checkpoints(tmp_path), flushes_and_renames
    save(to, 1)
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    draft = next(name for name in before if name.startswith("step-00000001.") and name.endswith(".tmp"))
    assert {*(Path(name).name for name in FILES), STATE, "more", draft} <= set(before)
    assert after == ["checkpoints"]


@pytest.mark.parametrize("leftover", ["step-00000002.tmp", "step-00000009.tmp"])
def test_leftovers_are_not_seen_and_go_with_the_next_save(tmp_path, leftover):
    to = checkpoints(tmp_path)
    save(to, 1)
    (to.folder / leftover / STATE).mkdir(parents=True)
    (to.folder / leftover / STATE / "half").write_text("half")
    assert to.steps() == [1] and newest(to) == (1, [])
    save(to, 2)
    assert names(to) == ["step-00000001", "step-00000002"] and newest(to) == (2, [])


def test_other_names_are_left_alone(tmp_path):
    to = checkpoints(tmp_path, keep=1)
    save(to, 1)
    for name in ("step-1", "step-00000002-backup", "best", "step-.tmp.old"):
        (to.folder / name).mkdir()
    save(to, 123456789)
    assert to.steps() == [123456789]
    assert names(to) == ["best", "step-.tmp.old", "step-00000002-backup", "step-1", "step-123456789"]


# An empty file can not lose what it has.
LOSSES = [(f, d) for f in FILES for d in DAMAGE if not ("none" in f and d in ("truncated", "emptied", "zeroed"))]
LOSSES.remove((MANIFEST, "flipped inside"))  # which file is blamed depends on the place


@pytest.mark.parametrize(("file", "damage"), LOSSES)
def test_the_newest_good_one_is_taken_and_damage_is_named(tmp_path, file, damage):
    to = checkpoints(tmp_path, keep=3)
    save(to, 1, 2, 3)
    DAMAGE[damage](to.path(3) / file)
    step, (warning,) = newest(to)
    assert step == 2
    assert "step-00000003" in warning and Path(file).name in warning
    assert to.steps() == [1, 2, 3]


def test_several_damaged_ones_are_passed_over(tmp_path):
    to = checkpoints(tmp_path, keep=4)
    save(to, 1, 2, 3, 4)
    DAMAGE["missing"](to.path(4) / MANIFEST)
    DAMAGE["flipped"](to.path(3) / RECORD)
    step, warnings = newest(to)
    assert step == 2 and ["step-00000004" in w or "step-00000003" in w for w in warnings] == [True, True]


def test_no_flipped_bit_of_the_manifest_does_harm(tmp_path):
    """Each of its bits in turn: an older one is taken, or it is as good as before; never a fault.

    A format of which a bit is flipped may be that of a newer version, which is refused.
    """
    to = checkpoints(tmp_path)
    save(to, 1, 2)
    path = to.path(2) / MANIFEST
    whole = path.read_bytes()
    passed = 0
    for place in range(len(whole)):
        path.write_bytes(flip(whole, place, place % 8))
        try:
            passed += newest(to)[0] == 2
        except UserError as newer:
            assert "a newer version wrote it" in str(newer) and whole.find(b'"format"') <= place
    assert passed < len(whole) / 4  # names, sizes and hashes are most of it; the rest is layout and the word "hash"


def test_where_none_is_good_the_user_decides(tmp_path):
    to = checkpoints(tmp_path)
    save(to, 1, 2)
    for step in (1, 2):
        DAMAGE["flipped"](to.path(step) / STATE / "more" / "deep.bin")
    before = sorted(to.folder.rglob("*"))
    warnings = []
    with pytest.raises(UserError) as error:
        to.newest(warnings.append)
    assert str(to.folder) in str(error.value) and "deep.bin" in str(error.value) and len(warnings) == 2
    assert sorted(to.folder.rglob("*")) == before


def test_the_newest_are_kept(tmp_path):
    for keep in (1, 2, 3):
        to = checkpoints(tmp_path / str(keep), keep=keep)
        save(to, 10, 20, 30, 40)
        assert to.steps() == [10, 20, 30, 40][-keep:] and len(names(to)) == keep


@pytest.mark.parametrize(
    ("best", "kept"),
    [("eval/accuracy", [20, 40]), ("-eval/loss", [30, 40]), ("-eval/accuracy", [10, 40]), ("eval/other", [40])],
)
def test_the_best_is_kept_beside_the_newest(tmp_path, best, kept):
    to = checkpoints(tmp_path, keep=1, best=best)
    scores = {10: (0.1, 2.0), 20: (0.9, 3.0), 30: (0.5, 1.0), 40: (0.3, 4.0)}
    for step, (accuracy, loss) in scores.items():
        save(to, step, **{"eval/accuracy": accuracy, "eval/loss": loss})
    assert to.steps() == kept


@pytest.mark.parametrize(("best", "better"), [("score", [1, 2, 5]), ("-score", [1, 3, 4])])
def test_improvements_are_seen_over_launches(tmp_path, best, better):
    """Against all that was saved, also before this launch, and what is being written."""
    seen = []
    for step, score in enumerate([2.0, 3.0, 1.0, 0.5, 4.0], start=1):
        to = checkpoints(tmp_path, keep=1, best=best)
        to.newest(print)
        if to.improves(step, {"score": score, "other": -9.0}, {}):
            seen.append(step)
        assert not to.improves(step, {"other": 9.0}, {}) and not to.improves(step, {"score": float("nan")}, {})
        assert not to.improves(step, {"score": score}, {"score": score})
        save(to, step, score=score)
    assert seen == better


def test_of_equally_good_ones_the_later_is_best(tmp_path):
    to = checkpoints(tmp_path, keep=1, best="score")
    for step, score in ((1, 0.5), (2, 0.5), (3, 0.4)):
        save(to, step, score=score)
    assert to.steps() == [2, 3]


def test_one_without_a_score_is_not_the_best(tmp_path):
    to = checkpoints(tmp_path, keep=1, best="-loss")
    save(to, 1)
    save(to, 2, loss=0.5)
    save(to, 3, loss=0.6)
    assert to.steps() == [2, 3]


@pytest.mark.parametrize("best", ["score", "-score"])
@pytest.mark.parametrize("where", [1, 2, 3])
def test_a_score_that_is_no_number_is_not_the_best(tmp_path, best, where):
    to = checkpoints(tmp_path, keep=1, best=best)
    for step in (1, 2, 3):
        save(to, step, score=float("nan") if step == where else 0.5)
    save(to, 4, score=float("nan"))
    (kept,) = set(to.steps()) - {4}
    assert kept == max({1, 2, 3} - {where})


def test_damaged_ones_are_not_kept_in_place_of_good_ones(tmp_path):
    """A run that fell back past a damaged checkpoint and saves an earlier step keeps what it just saved."""
    to = checkpoints(tmp_path, keep=1)
    save(checkpoints(tmp_path, keep=9), 20, 40)
    DAMAGE["zeroed"](to.path(40) / STATE / "__0_0.distcp")
    assert newest(to)[0] == 20
    save(to, 30)
    assert newest(to)[0] == 30


def test_a_damaged_one_is_replaced_by_its_step_saved_again(tmp_path):
    to = checkpoints(tmp_path)
    save(to, 1, 2)
    DAMAGE["missing"](to.path(2) / RECORD)
    assert newest(to)[0] == 1
    save(to, 2)
    assert newest(to) == (2, []) and to.steps() == [1, 2]


@pytest.mark.parametrize("word", ["size", "xxh3"])
def test_no_damage_of_the_manifest_keeps_its_step_from_being_saved_again(tmp_path, word):
    to = checkpoints(tmp_path)
    save(to, 1, 2)
    manifest = to.path(2) / MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"{word}"', '"other"', 1))
    save(to, 2)
    assert newest(to)[0] == 2


def full(folder: str) -> None:
    writer(2)(folder)
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failure_while_writing_is_returned_and_leaves_what_was(tmp_path):
    to = checkpoints(tmp_path, keep=1)
    save(to, 1)
    outcome = to.save(Record(2, unknown={"note": 2}), full)
    (problem,) = outcome.problems
    assert not outcome.lasting and "No space left on device" in problem
    assert names(to) == ["step-00000001"] and newest(to) == (1, [])
    save(to, 2)
    assert names(to) == ["step-00000002"] and newest(to) == (2, [])


def test_an_error_of_the_users_is_lasting(tmp_path):
    to = checkpoints(tmp_path)
    save(to, 1)

    def write(folder: str) -> None:
        raise UserError("objects.0 holds a set")

    assert to.save(Record(2), write) == SaveOutcome(["objects.0 holds a set"], lasting=True)
    assert names(to) == ["step-00000001"]


def test_a_folder_in_the_way_of_a_folder_is_returned(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    (problem,) = checkpoints(tmp_path).save(Record(1), writer(1)).problems
    assert "checkpoints" in problem


@pytest.fixture
def no_flush(monkeypatch):
    """Leave out waiting for the disk: it tells nothing about a process that is killed."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


def at_operation(number: int, act: Callable[[str, tuple], None], call: Callable[[], bool]) -> int:
    """Run `call` in another process where `act` meets the so-many-th operation on files; return how it ended."""
    left = number

    def hook(event: str, args: tuple) -> None:
        nonlocal left
        if event in OPERATIONS:
            left -= 1
            if left < 0:
                act(event, args)

    def child() -> None:
        sys.addaudithook(hook)
        # The exit status tells whether the hook was reached, and what `call` returned.
        os._exit((2 if call() else 0) + (left < 0))

    process = FORK.Process(target=child, daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode is not None
    return process.exitcode


def die(event: str, args: tuple) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("before", ["good", "damaged"])
@pytest.mark.usefixtures("no_flush")
def test_killed_at_any_moment_a_save_leaves_a_whole_checkpoint(tmp_path, before):
    """At each operation on files in turn, from the draft to the last deletion; at worst the one before is newest."""
    start = checkpoints(tmp_path / "start", keep=9)
    save(start, 1, 2, 3, score=0)
    (start.folder / "step-00000008.tmp").mkdir()
    if before == "damaged":  # step 4 is there, and is written again
        save(start, 4)
        DAMAGE["flipped"](start.path(4) / RECORD)
    steps, number, killed = [], 0, True
    while killed:
        shutil.copytree(tmp_path / "start", tmp_path / str(number))
        to = checkpoints(tmp_path / str(number), keep=1, best="score")
        status = at_operation(number, die, lambda to=to: fails(to, 4))
        assert status in (0, -signal.SIGKILL)
        killed = status != 0
        steps.append(newest(to)[0])
        whole = [step for step in to.steps() if step != 4 or before == "good"]
        assert all((to.path(step) / file).is_file() for step in whole for file in FILES)
        save(to, 5)
        assert newest(to) == (5, []) and names(to) == ["step-00000003", "step-00000005"]
        number += 1
    assert len(steps) > 20 and set(steps) == {3, 4} and steps == sorted(steps)


@pytest.mark.usefixtures("no_flush")
def test_killed_at_any_moment_a_step_saved_twice_is_still_there(tmp_path):
    """The only checkpoint, good, is written again: it is not given up before the new one has its name."""
    number, killed = 0, True
    while killed:
        to = checkpoints(tmp_path / str(number), keep=1)
        save(to, 1)
        killed = at_operation(number, die, lambda to=to: fails(to, 1)) != 0
        assert newest(to)[0] == 1
        number += 1
    assert number > 3


def refuse(event: str, args: tuple) -> None:
    """Be a full disk: no new folder and no file to write to."""
    if event == "os.mkdir" or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("no_flush")
def test_a_disk_that_is_full_at_any_moment_leaves_what_was(tmp_path):
    """From each operation on files on, nothing more can be written: the failure is returned, and no draft is left."""
    outcomes, number, reached = [], 0, True
    while reached:
        to = checkpoints(tmp_path / str(number), keep=1)
        save(to, 1)
        status = at_operation(number, refuse, lambda to=to: fails(to, 2))
        assert status in (0, 1, 3)
        failed, reached = divmod(status, 2)
        assert names(to) == ["step-00000001" if failed else "step-00000002"]
        assert newest(to) == (1 if failed else 2, [])
        outcomes.append(failed)
        number += 1
    assert outcomes == sorted(outcomes, reverse=True) and outcomes.count(1) > 5


def test_a_file_that_cannot_grow_is_a_failed_save(tmp_path):
    """The kernel's own refusal in the middle of a file."""
    to = checkpoints(tmp_path)
    save(to, 1)

    def call() -> bool:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
        return fails(to, 2)

    assert at_operation(10**9, die, call) == 2
    assert names(to) == ["step-00000001"] and newest(to) == (1, [])


def test_a_run_that_lost_its_folder_writes_and_deletes_nothing(tmp_path):
    """Another run has gone on to step 60 while this one stood still before, in and after writing step 15."""
    taken = []

    def check_owner():
        if taken:
            raise UserError("was taken over")

    ours, theirs = checkpoints(tmp_path, keep=1, check_owner=check_owner), checkpoints(tmp_path, keep=2)
    save(ours, 5, 10)

    def write(folder: str) -> None:
        writer(15)(folder)
        save(theirs, 15, 60)  # it deletes the draft of the run that it takes for dead
        taken.append(True)

    assert ours.save(Record(15, unknown={"note": 15}), write) == SaveOutcome(["was taken over"], lasting=True)
    assert ours.save(Record(20, unknown={"note": 20}), writer(20)) == SaveOutcome(["was taken over"], lasting=True)
    assert names(theirs) == ["step-00000015", "step-00000060"] and newest(theirs) == (60, [])


def test_two_runs_that_write_one_step_at_once_do_not_mix_their_files(tmp_path):
    """A run that was taken for dead goes on with its draft: the other's has another name."""
    ours, theirs = checkpoints(tmp_path), checkpoints(tmp_path)

    def write(folder: str) -> None:
        assert theirs.save(Record(15, unknown={"note": 15}), writer(15)) == SaveOutcome()
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "__0_0.distcp").write_bytes(b"of the one that was taken for dead")

    ours.save(Record(15, unknown={"note": -1}), write)
    theirs.at(15)  # every file is as its manifest says


def test_steps_of_a_newer_run_are_never_pruned(tmp_path):
    """Only what this run itself found damaged when it went on from before it."""
    to = checkpoints(tmp_path, keep=1)
    save(checkpoints(tmp_path, keep=9), 10, 40, 60)
    DAMAGE["truncated"](to.path(60) / FILES[2])
    assert newest(to)[0] == 40
    save(checkpoints(tmp_path, keep=9), 50)
    save(to, 45)
    assert names(to) == ["step-00000045", "step-00000050"]


def test_what_cannot_be_read_for_a_moment_is_not_deleted(tmp_path, monkeypatch):
    """The best checkpoint's record, on a network disk that says ESTALE."""
    to = checkpoints(tmp_path, keep=1, best="score")
    save(to, 1, score=0.99)
    open_file = LocalStorage.open

    def stale(files, *args, **options):
        if "step-00000001" in str(files.place):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return open_file(files, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "open", stale)
        save(to, 2, score=0.5)
    save(to, 3, score=0.5)
    assert names(to) == ["step-00000001", "step-00000003"]


def test_what_is_measured_after_a_step_was_saved_decides_too(tmp_path):
    """And is read with the checkpoint, whose files stay as they were committed."""
    to = checkpoints(tmp_path, keep=1, best="score")
    save(to, 1)
    before = (to.path(1) / RECORD).read_bytes()
    assert to.save(Record(1, {"score": 0.99}, {"score": 0.99}), writer(9)) == SaveOutcome()
    save(to, 2, 3, score=0.5)
    assert names(to) == ["step-00000001", "step-00000003"]
    assert to.at(1)[1].scores == {"score": 0.99} and (to.path(1) / RECORD).read_bytes() == before


def test_each_rank_vouches_for_the_files_that_it_wrote(tmp_path):
    """Those of DeepSpeed's ranks too."""
    for name in ("__1_0.distcp", "random_states_1.pkl", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        (tmp_path / name).write_bytes(b"1")
    for name in ("__0_0.distcp", "random_states_0.pkl", "zero_pp_rank_10_mp_rank_00_optim_states.pt", "latest"):
        (tmp_path / name).write_bytes(b"0")
    parts = [set(vouch(tmp_path, rank)) for rank in (0, 1)]
    assert all("1_" in name or "_1" in name for name in parts[1]) and len(parts[1]) == 3
    assert parts[0] == {"__0_0.distcp", "random_states_0.pkl", "latest"}


@pytest.mark.parametrize("damage", ["truncated", "emptied", "zeroed"])
def test_later_scores_that_are_damaged_are_left_out(tmp_path, damage):
    to = checkpoints(tmp_path)
    save(to, 1, score=0.5)
    to.save(Record(1, {"score": 0.99}), writer(1))
    assert to.newest(print)[1].metrics == {"score": 0.99}
    DAMAGE[damage](to.path(1) / SCORES)
    assert to.newest(print)[1].metrics == {"score": 0.5}


def test_what_the_disk_did_not_give_at_the_resume_is_put_aside(tmp_path, monkeypatch):
    """It may be good: nothing deletes it, and no later resume takes it for the newest."""
    to = checkpoints(tmp_path, keep=9)
    save(to, 4, 8)
    open_file = LocalStorage.open

    def broken(files, name, *args, **options):
        if "step-00000008" in str(files.place):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_file(files, name, *args, **options)

    to, warnings = checkpoints(tmp_path, keep=9), []
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "open", broken)
        patch.setattr("app.distributed.state.manifest.time.sleep", lambda seconds: None)
        assert to.newest(warnings.append)[1].step == 4
    assert "step-00000008 cannot be read and left out" in warnings[0]
    save(to, 6)
    *good, aside = names(to)
    assert good == ["step-00000004", "step-00000006"] and newest(to) == (6, [])
    assert aside.startswith("step-00000008.") and aside.endswith(".unread")
    assert (to.folder / aside / FILES[2]).read_bytes().startswith(b"weights of step 8")


@pytest.mark.parametrize("failing", ["write_bytes", "read_text"])
def test_a_disk_that_fails_while_scores_are_added_costs_a_warning(tmp_path, monkeypatch, failing):
    """The checkpoint stays as it is, and training goes on."""
    to = checkpoints(tmp_path)
    save(to, 1, score=0.5)
    owner = LocalStorage if failing == "read_text" else Path
    original = getattr(owner, failing)

    def fail(place, *args, **options):
        name = args[0] if failing == "read_text" else place.name
        if name == RECORD or (name.startswith(SCORES) and name.endswith(".tmp")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(place, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, failing, fail)
        (problem,) = to.save(Record(1, {"score": 0.9}), writer(1)).problems
    assert "keeps its earlier scores" in problem and newest(checkpoints(tmp_path)) == (1, [])
    assert sorted(path.name for path in to.path(1).iterdir()) == [MANIFEST, RECORD, STATE]


@pytest.fixture
def flaky(monkeypatch):
    """Give a function that makes looking at one name fail, as network disks do now and then."""
    entry = LocalStorage.entry

    def flaky(ending: str) -> None:
        def fail(storage, name="", follow=True):
            if str(storage.place / name).endswith(ending):
                raise OSError(errno.ESTALE, "Stale file handle")
            return entry(storage, name, follow)

        monkeypatch.setattr(LocalStorage, "entry", fail)

    return flaky


def test_a_file_that_cannot_be_looked_at_is_not_left_out_of_a_checkpoint(tmp_path, flaky):
    to = checkpoints(tmp_path)
    save(to, 1)
    flaky(f"{STATE}/__0_0.distcp")
    outcome = to.save(Record(2, unknown={"note": 2}), writer(2))
    assert "Stale file handle" in outcome.problems[0] and to.steps() == [1]


def test_what_cannot_be_looked_at_is_not_deleted_with_a_checkpoint(tmp_path, flaky):
    to = checkpoints(tmp_path, keep=1)
    save(to, 1)
    (to.path(1) / "notes.txt").write_text("mine")
    flaky("notes.txt")
    to.save(Record(2, unknown={"note": 2}), writer(2))
    assert 2 in to.steps() and (to.path(1) / "notes.txt").read_text() == "mine"


def test_a_checkpoint_that_cannot_be_looked_at_is_listed(tmp_path, flaky):
    to = checkpoints(tmp_path)
    save(to, 1)
    flaky("step-00000001")
    assert to.steps() == [1]


@pytest.mark.parametrize("name", [RECORD, MANIFEST])
def test_a_checkpoint_of_a_newer_version_is_refused_and_stays(tmp_path, name):
    to = checkpoints(tmp_path)
    save(to, 1)
    save(to, 2)
    write_newer(to.path(2), name)
    before = {path: path.read_bytes() for path in to.path(2).rglob("*") if path.is_file()}
    again = checkpoints(tmp_path)
    for refused in (lambda: again.newest(print), lambda: again.at(2)):
        with pytest.raises(UserError, match=rf"{name}: a newer version wrote it .*update"):
            refused()
    outcome = again.save(Record(2, {"loss": 1.0}, unknown={"note": 2}), writer(2))
    assert outcome.lasting and "a newer version wrote it" in outcome.problems[0]
    save(again, 3)
    assert {path: path.read_bytes() for path in before} == before


def write_newer(folder: Path, name: str) -> None:
    """Make a file of a checkpoint one of a later format, in a folder that is whole."""
    fields = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**fields, "format": "2999-01"}))
    if name != MANIFEST:
        listed = json.loads((folder / MANIFEST).read_text())
        listed["files"][name] = {"size": (folder / name).stat().st_size, "xxh3": checksum(folder, name)}
        (folder / MANIFEST).write_text(json.dumps(listed))


def test_a_checkpoint_whose_record_cannot_be_read_is_put_aside(tmp_path):
    """Its files are as they were written, so nothing of it is deleted where its step is saved again."""
    to = checkpoints(tmp_path)
    save(to, 1)
    fields = json.loads((to.path(1) / RECORD).read_text())
    del fields["seen"]
    (to.path(1) / RECORD).write_text(json.dumps(fields))
    listed = json.loads((to.path(1) / MANIFEST).read_text())
    listed["files"][RECORD] = {"size": (to.path(1) / RECORD).stat().st_size, "xxh3": checksum(to.path(1), RECORD)}
    (to.path(1) / MANIFEST).write_text(json.dumps(listed))
    save(to, 1)
    assert newest(to) == (1, []) and len([name for name in names(to) if name.endswith(".unread")]) == 1
