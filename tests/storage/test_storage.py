"""app.storage: what every kind of place promises, and that nothing else in app touches the files of runs.

A new kind of storage adds itself to KINDS. What only a disk has, such as links, is at the end.
"""

import ast
import errno
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import apart, buckets
from support.disks import mounted
from support.launching import ROOT

from app import storage
from app.storage import Changed, Kind, Storage
from app.storage.local import LocalStorage

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
KINDS: dict[str, Callable[[Path], Storage]] = {"local": LocalStorage, "bucket": buckets.storage_of}
DISKS = ["local"]
SEAL = "manifest.json"


@pytest.fixture(params=[pytest.param(kind, marks=[] if kind in DISKS else [pytest.mark.launches]) for kind in KINDS])
def files(request, tmp_path) -> Storage:
    """Give an empty storage of each kind."""
    if request.param not in DISKS:
        request.getfixturevalue("near")
    made = KINDS[request.param](tmp_path / "place")
    made.make()
    return made


def context_of(files: Storage):
    """Return how processes are started that use a storage; threads of obstore do not survive a fork."""
    return apart.FORK if isinstance(files, LocalStorage) else apart.SPAWN


def race(files: Storage, work: Callable[[int], object], processes: int = 4) -> list:
    """Let processes do something at once; return what each of them returned."""
    context = context_of(files)
    barrier, answers = context.Barrier(processes), context.Queue()

    def one(number: int, barrier, answers) -> None:
        barrier.wait(60)
        answers.put(work(number))

    running = [apart.start(context, one, number, barrier, answers) for number in range(processes)]
    results = [answers.get(timeout=60) for _ in running]
    for process in running:
        process.join(30)
    return results


def killed_while(files: Storage, work: Callable[[Callable[[], None]], None]) -> None:
    """Let a process work until it calls what it is given, and kill it there."""
    process = apart.start(context_of(files), lambda: work(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def test_a_range_ends_where_the_file_does(files):
    files.write("digits", b"0123456789")
    assert files.read("digits") == b"0123456789" and files.read("digits", 3, 4) == b"3456"
    assert files.read("digits", 8, 100) == b"89" and files.read("digits", 10) == b""
    with files.open("digits") as file:
        assert file.read(2) + file.read() == b"0123456789"
    with pytest.raises(FileNotFoundError):
        files.read("absent")


def test_a_file_is_replaced_whole_and_listed(files):
    files.make("a/b")
    files.write("a/b/file", "text", durable=True)
    files.write("a/b/file", "other text")
    files.write("a/one", b"1")
    assert files.read_text("a/b/file") == "other text"
    assert [entry.name for entry in files.entries("a")] == ["a/b", "a/one"]
    assert [(entry.name, entry.size) for entry in files.files()] == [("a/b/file", 10), ("a/one", 1)]
    assert {entry.name for entry in files.walk()} == {"a", "a/b", "a/b/file", "a/one"}
    entry = files.entry("a/one")
    assert entry.kind is Kind.FILE and entry.size == 1 and abs(entry.changed - time.time()) < 60
    assert files.exists("a") and files.is_folder("a") and not files.is_file("a") and not files.exists("b")
    assert (files.entry("a/one/under a file") is None and files.free() is None) or files.free() > 0
    files.delete("a/b")
    files.delete("absent")
    assert [entry.name for entry in files.walk()] == ["a", "a/one"]


def test_folders_are_found_by_what_they_hold(files):
    for name in ("x/run.json", "x/y/run.json", "x/y/z/run.json", "run.json"):
        files.make(name.rpartition("/")[0])
        files.write(name, "{}")
    assert sorted(files.find("run.json", 2)) == [files.place / name for name in ("", "x", "x/y")]


def test_of_many_that_put_one_succeeds(files):
    def put(number: int) -> list[bool]:
        results = []
        for turn in range(25):
            try:
                files.put_if_absent(f"file-{turn}", str(number).encode() * 1000)
                results.append(True)
            except FileExistsError:
                results.append(False)
        return results

    winners = [
        [number for number, mine in enumerate(turn) if mine] for turn in zip(*race_in_order(files, put), strict=True)
    ]
    assert [len(won) for won in winners] == [1] * 25
    assert [files.read(f"file-{turn}") for turn in range(25)] == [str(won[0]).encode() * 1000 for won in winners]
    assert len(files.entries()) == 25  # and no draft


def race_in_order(files: Storage, work: Callable[[int], list]) -> list[list]:
    results = dict(race(files, lambda number: (number, work(number))))
    return [results[number] for number in sorted(results)]


def test_of_many_that_replace_none_loses_what_another_wrote(files):
    """A counter: each reads it and writes the next number, and starts again where another was first."""
    files.put_if_absent("count", b"0")

    def count(number: int) -> int:
        refused = 0
        for _ in range(25):
            while True:
                data, version = files.version("count")
                try:
                    files.replace_if_unchanged("count", str(int(data) + 1).encode(), version)
                    break
                except Changed:
                    refused += 1
        return refused

    assert sum(race(files, count)) > 0  # they have met
    assert files.read("count") == b"100" and len(files.entries()) == 1


def test_versions_go_on_from_one_write_to_the_next(files):
    first = files.put_if_absent("file", b"one")
    second = files.replace_if_unchanged("file", b"two", first)
    with pytest.raises(Changed):
        files.replace_if_unchanged("file", b"three", first)
    assert files.version("file") == (b"two", second)
    files.delete("file")
    with pytest.raises(Changed):
        files.replace_if_unchanged("file", b"three", second)
    assert not files.exists("file")


def fill(files: Storage, name: str) -> str:
    """Write a draft as a checkpoint is written; return its name."""
    draft = files.draft(name)
    files.make(f"{draft}/state")
    files.local(f"{draft}/state/rank").write_bytes(b"tensors")  # as a library writes it
    files.fill(f"{draft}/{SEAL}", "{}")
    for part in (f"{draft}/state/rank", f"{draft}/{SEAL}", f"{draft}/state", draft):
        files.up(part)
    return draft


def test_a_folder_is_published_whole(files):
    draft = fill(files, "step-1")
    assert files.published(SEAL) == [] and files.drafts("step-1") == [draft]
    files.publish(draft, "step-1", SEAL)
    assert files.published(SEAL) == ["step-1"] and files.drafts("step-1") == []
    assert files.read("step-1/state/rank") == b"tensors" and files.read_text(f"step-1/{SEAL}") == "{}"
    assert (files.down("step-1") / "state" / "rank").read_bytes() == b"tensors"


def test_a_crash_before_publishing_leaves_nothing_visible(files):
    def work(die: Callable[[], None]) -> None:
        fill(files, "step-1")
        die()

    killed_while(files, work)
    assert files.published(SEAL) == [] and not files.exists("step-1")
    for draft in files.drafts("step-1"):
        files.delete(draft)
    assert files.entries() == []


def test_a_crash_while_a_file_is_written_leaves_the_earlier_one(files):
    files.write("file", "before")

    def work(die: Callable[[], None]) -> None:
        with files.drafted("file") as path:
            path.write_text("half")
            die()

    killed_while(files, work)
    assert files.read_text("file") == "before" and len(files.drafts("file")) == 1


@pytest.mark.parametrize("folder", [False, True])
def test_what_a_library_writes_has_its_name_at_the_end(files, folder):
    with files.drafted("model") as path:
        (path.mkdir() if folder else None, (path / "inside" if folder else path).write_text("text"))
        assert not files.exists("model")
    assert files.read_text("model/inside" if folder else "model") == "text"
    with pytest.raises(ZeroDivisionError), files.drafted("other") as path:
        path.write_text("text")
        raise ZeroDivisionError
    assert [entry.name for entry in files.entries()] == ["model"]


def test_published_folders_are_taken_back_or_put_aside(files):
    for name in ("one", "two"):
        files.publish(fill(files, name), name, SEAL)
    files.retract("one", SEAL)
    assert files.asides("two", "kept") == []
    aside = files.put_aside("two", SEAL, "kept")
    assert files.asides("two", "kept") == [aside] and files.asides("tw", "kept") == files.asides("two", "kep") == []
    assert "one" not in files.published(SEAL) and "two" not in files.published(SEAL)
    assert aside.startswith("two.") and aside.endswith(".kept") and files.read(f"{aside}/state/rank") == b"tensors"


def test_a_log_shows_each_line_at_once(files):
    log = files.log("log", b"first\n")
    log.append(b"second\n")
    with files.open_log("log") as file:
        assert list(file) == [b"first\n", b"second\n"]
    log.append(b"third\n")
    with files.open_log("log", start=13) as file:
        assert file.read() == b"third\n"
    log.close()
    files.log("log", b"anew\n").append(b"more\n")
    assert files.open_log("log").read() == b"anew\nmore\n"
    files.delete("log")
    with pytest.raises(FileNotFoundError):
        files.open_log("log")


def test_a_log_that_was_taken_away_says_so(files):
    log = files.log("log", b"")
    files.delete("log")
    with pytest.raises(OSError):
        log.append(b"line\n")


def test_a_lease_is_held_by_one(files):
    lease = files.lease("lock")
    with pytest.raises(FileNotFoundError):
        lease.mark()
    assert lease.take() is not False
    lease.write("me")
    before = files.lease("lock").mark()
    assert before.text == "me"
    time.sleep(0.05)
    lease.renew()
    assert files.lease("lock").mark() not in (before,) and files.lease("lock").mark().text == "me"

    close = lease.close if context_of(files) is apart.FORK else bool  # what a fork has of it

    def other(number: int) -> bool:
        close()
        return files.lease("lock").take() is False

    assert race(files, other, 2) == [True, True]
    lease.clear()
    assert files.lease("lock").mark().text == ""
    lease.close()
    lease.close()
    assert files.lease("lock").take() is not False


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside"])
def test_no_name_leads_out(files, name):
    for act in (files.entry, files.read, files.delete, files.make, lambda name: files.write(name, "text")):
        with pytest.raises(OSError, match="leads out"):
            act(name)


def test_an_empty_folder_is_deleted_and_no_other(files):
    files.write("file", "")
    files.delete_if_empty()
    assert files.exists("file")
    files.delete("file")
    files.delete_if_empty()
    assert not files.exists()


@pytest.mark.parametrize("kind", DISKS)
def test_a_full_disk_costs_no_file_that_is_there(tmp_path, kind):
    with mounted(tmp_path / "disk") as disk:
        files = KINDS[kind](disk)
        version = files.put_if_absent("file", b"before")
        log = files.log("log", b"line\n")
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(files.free() - 8192))
        big = bytes(100_000)
        for act in (
            lambda: files.write("file", big),
            lambda: files.put_if_absent("new", big),
            lambda: files.replace_if_unchanged("file", big, version),
            lambda: log.append(big),
        ):
            with pytest.raises(OSError) as error:
                act()
            assert error.value.errno == errno.ENOSPC
        assert [entry.name for entry in files.entries()] == ["ballast", "file", "log"]
        assert files.read("file") == b"before" and files.read("log") == b"line\n"
        files.delete("ballast")
        log.append(b"more\n")
        assert files.open_log("log").read() == b"line\nmore\n"
        log.close()


# Of a disk alone


@pytest.fixture
def disk(tmp_path) -> Storage:
    (tmp_path / "disk").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("outside")
    return storage.at(tmp_path / "disk")


def test_links_are_seen_and_not_followed(disk, tmp_path):
    (disk.place / "link").symlink_to(tmp_path / "outside")
    (disk.place / "file").symlink_to(tmp_path / "outside" / "file")
    assert disk.is_link("link") and disk.is_folder("link") and disk.is_file("file")
    assert [entry.kind for entry in disk.entries()] == [Kind.LINK, Kind.LINK]
    assert [entry.name for entry in disk.walk()] == ["file", "link"]
    with pytest.raises(OSError):
        disk.read("file")
    assert disk.read("file", follow=True) == b"outside"
    with pytest.raises(OSError, match="leads out"):
        disk.make("link/inner")
    disk.write("file", "ours")
    disk.delete("link")
    assert not disk.is_link("file") and (tmp_path / "outside" / "file").read_text() == "outside"


def test_a_link_in_the_place_of_a_log_is_not_written_through(disk, tmp_path):
    log = disk.log("log", b"")
    disk.delete("log")
    (disk.place / "log").symlink_to(tmp_path / "outside" / "file")
    log.append(b"line\n")
    assert (tmp_path / "outside" / "file").read_text() == "outside"


def test_a_disk_without_hard_links_has_one_winner_too(disk, monkeypatch):
    def link(*args):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    disk.put_if_absent("file", b"one")
    with pytest.raises(FileExistsError):
        disk.put_if_absent("file", b"two")
    assert disk.read("file") == b"one" and len(disk.entries()) == 1


def test_a_pipe_does_not_make_a_reader_wait(disk):
    os.mkfifo(disk.place / "pipe")
    with pytest.raises(OSError, match="no file"):
        disk.read("pipe")
    assert disk.entry("pipe").kind is Kind.OTHER


# Who may touch files

APP = ROOT / "app"
# Files that are not a run's, and who reads or writes them.
ELSEWHERE = {
    "storage/": "the owner",
    "data/": "the user's data, and caches of them in the user's own cache folder",
    "tasks/": "models that the user named, and reference files in the cache",
    "launching/": "profiles, recipes, the list of trusted folders in the user's home, and a notebook's own scratch",
    "config/file_kinds.py": "the first bytes of the user's data",
    "distributed/asking.py": "where Slurm's programs are",
    "distributed/environment.py": "/proc, and where the launcher looks for a worker's error",
    "rundir/recipe_source.py": "the recipe that is run, wherever it is",
    "commands/__init__.py": "the modules that commands are",
    "commands/curves.py": "pictures that the user named",
    "commands/doctor/": "the machine, and how well its disks keep files",
    "commands/evaluate/": "models that the user named, and a worker's scratch",
    "commands/export/": "the folder that the user named",
    "commands/launch/": "recipes",
    "commands/lr_range/": "recipes, and a scratch run's output",
    "commands/new/": "the recipe that the user wants written",
    "commands/output.py": "files that the user named with --json",
    "commands/own_folder.py": "folders that a command makes for its own runs, with its mark in them",
    "commands/plot/": "pages that the user named",
    "commands/predict/": "inputs and outputs that the user named",
    "commands/prove/": "scratch runs, looked at from outside",
    "commands/recipe_file.py": "the recipe that the user named",
    "commands/submit/": "job files, and templates that the user named",
    "commands/tokenize/": "texts that the user named, and shards in the machine's scratch before they go up",
    "commands/torture/": "scratch runs, looked at from outside",
}
OF_PATHS = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "rename", "unlink", "mkdir", "rmdir", "iterdir"),
    *("glob", "rglob", "stat", "lstat", "is_file", "is_dir", "exists", "is_symlink", "touch", "chmod", "lchmod"),
    *("symlink_to", "hardlink_to", "samefile", "replace"),
}
OF_OS = {
    *("open", "fsync", "fdatasync", "rename", "renames", "replace", "remove", "unlink", "mkdir", "makedirs", "rmdir"),
    *("removedirs", "listdir", "scandir", "walk", "stat", "lstat", "link", "symlink", "truncate", "ftruncate", "utime"),
    *("chmod", "access"),
}
A_STORAGE = re.compile(r"(.*\.)?_?files|storage\.at\(.*\)", re.DOTALL)  # how variables that hold one are called
NO_PATHS = ("logger", "dataclasses")  # whose methods have such names


def touches(source: str) -> list[str]:
    """List the calls in a module that touch files without a storage, each with its line."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [f"{call.lineno}: {ast.unparse(call.func)}" for call in calls if _touches(call)]


def _touches(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id == "open"
    if not isinstance(call.func, ast.Attribute):
        return False
    receiver, name = ast.unparse(call.func.value), call.func.attr
    if receiver in ("os", "os.path", "shutil", "fcntl"):
        return receiver != "os" or name in OF_OS
    if name not in OF_PATHS or receiver in NO_PATHS or A_STORAGE.fullmatch(receiver):
        return False
    return name != "replace" or (len(call.args) == 1 and not call.keywords)  # of a text it has two


def is_bound(path: str) -> bool:
    """Tell whether a module may touch files only through a storage."""
    return not path.startswith(tuple(ELSEWHERE))


def bound() -> list[str]:
    paths = sorted(str(path.relative_to(APP)) for path in APP.rglob("*.py"))
    return [path for path in paths if is_bound(path)]


@pytest.mark.parametrize("path", bound())
def test_only_storage_touches_the_files_of_runs(path):
    source = (APP / path).read_text(encoding="utf-8")
    assert touches(source) == []
    assert not re.search(r"app\.storage\.(drafts|local)|from app\.storage import .*\b(drafts|local)\b", source)


@pytest.mark.parametrize("place", ELSEWHERE)
def test_whoever_is_left_out_touches_files(place):
    modules = [APP / place] if place.endswith(".py") else sorted((APP / place).rglob("*.py"))
    assert any(touches(module.read_text(encoding="utf-8")) for module in modules)


def test_what_runs_are_made_of_is_bound():
    assert {"rundir/folder.py", "checkpoints/store.py", "training/loop/ending.py", "run.py"} <= set(bound())
    assert "commands/runs/checkpoints.py" in bound()


@pytest.mark.parametrize(
    "line",
    [
        *("open('x')", "path.open()", "(folder / 'x').read_text()", "os.replace(a, b)", "os.path.exists(a)"),
        *("shutil.rmtree(a)", "draft.rename(path)", "Path(a, b).mkdir(parents=True)", "fcntl.flock(a, 2)"),
        *("folder.rglob('*')", "draft.replace(path)"),
    ],
)
def test_a_call_that_touches_files_is_seen(line):
    assert len(touches(line)) == 1


@pytest.mark.parametrize("line", ["text.replace('a', 'b')", "self._files.exists('x')", "storage.at(p).open('x')"])
def test_a_call_that_touches_none_is_not(line):
    assert touches(line) == []


def test_a_walk_tells_what_it_cannot_look_at_unless_it_is_tolerant(tmp_path, monkeypatch):
    """On a disk: one name that fails for a moment must not make its folder look empty."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("text")
    files, entry = LocalStorage(tmp_path), LocalStorage.entry

    def fail(storage, name="", follow=True):
        if name.endswith("file"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return entry(storage, name, follow)

    monkeypatch.setattr(LocalStorage, "entry", fail)
    for look in (lambda: list(files.walk()), files.files):
        with pytest.raises(OSError, match="Stale file handle"):
            look()
    assert [each.name for each in files.walk(tolerant=True)] == ["inner"]
