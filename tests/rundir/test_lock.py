"""lock: one run holds a folder, on disks without flock and on disks that machines share, told by real processes."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from app.distributed import environment
from app.errors import UserError
from app.rundir import lock
from app.rundir.lock import FolderLock

# A fork starts at once, and has claimed nothing: locks are not inherited.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
BEAT = 0.25


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Beat faster."""
    monkeypatch.setattr(lock, "BEAT", BEAT)


def unsupported(code: int):
    def flock(descriptor, operation):
        raise OSError(code, os.strerror(code))

    return flock


def on_another_host() -> None:
    """Have another name, and locks that other machines do not see."""
    lock.socket.gethostname = lambda: "elsewhere"
    fcntl.flock = lambda descriptor, operation: None


@contextmanager
def holding(folder: Path, prepare=lambda: None, body=lambda held: signal.pause()):
    """Have another process take a folder and do something; give its process, killed in the end, and what it sends."""
    ours, theirs = FORK.Pipe()

    def hold() -> None:
        prepare()
        lock._held.clear()  # what the fork remembers of its parent
        held = FolderLock(folder)
        try:
            held.take()
        except UserError as error:
            theirs.send(str(error))
            return
        theirs.send("in")
        theirs.send(body(held))

    process = FORK.Process(target=hold)
    process.start()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(30)


def receive(pipe):
    assert pipe.poll(30)
    return pipe.recv()


def refusal(folder: Path) -> tuple[str, list[str]]:
    """Try to take a folder that is held; return the words of the refusal, and the lines before it."""
    said = []
    with pytest.raises(UserError) as error:
        FolderLock(folder, said.append).take()
    return str(error.value), said


def take(folder: Path) -> list[str]:
    """Take a folder and give it back; return the lines before."""
    said = []
    held = FolderLock(folder, said.append)
    held.take()
    held.release()
    return said


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_without_flock(tmp_path, monkeypatch, code):
    """A process of this host is asked for by its number and its start; nobody has to wait for it."""
    monkeypatch.setattr(fcntl, "flock", unsupported(code))
    with holding(tmp_path) as (process, pipe):
        assert receive(pipe) == "in"
        words, said = refusal(tmp_path)
        assert f"in use by process {process.pid} on {os.uname().nodename} since" in words and said == []
    assert take(tmp_path) == []  # it was killed
    assert take(tmp_path) == []


def test_another_process_with_the_number_of_the_holder(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", unsupported(errno.ENOLCK))
    began = f"{environment.this_process().split()[1].rpartition('.')[0]}.1"
    was = f"process {os.getppid()} on {os.uname().nodename} since 2001-01-01 00:00:00\n{os.getppid()} {began}\n"
    (tmp_path / "lock").write_text(was)
    assert take(tmp_path) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere psutil's time is all there is")
def test_a_process_keeps_its_name_when_the_clock_is_set(monkeypatch):
    name = environment.this_process()
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 0.0)
    assert environment.this_process() == name and environment.is_alive(name)
    assert not environment.is_alive(name + "0") and not environment.is_alive(f"{2**22 + 1} {name.split()[1]}")
    child = subprocess.Popen(["true"])
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert environment._began(child.pid) == ""
    child.wait()


def test_another_fault_of_the_disk_is_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", unsupported(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        FolderLock(tmp_path).take()


def test_a_holder_on_another_host_is_known_by_its_beat(tmp_path):
    with holding(tmp_path, on_another_host) as (process, pipe):
        assert receive(pipe) == "in"
        words, (line,) = refusal(tmp_path)
        assert f"in use by process {process.pid} on elsewhere since" in words
        assert f"{tmp_path} was last used by process {process.pid} on elsewhere" in line and "watching" in line
        process.kill()
        process.join(30)
        began = time.monotonic()
        assert len(take(tmp_path)) == 1
        assert 2 * BEAT < time.monotonic() - began < 5 * BEAT
    assert take(tmp_path) == []  # given back: nobody has to be watched


def test_the_clock_of_another_host_does_not_matter(tmp_path):
    with holding(tmp_path, on_another_host) as (process, pipe):
        assert receive(pipe) == "in"
        process.kill()
        process.join(30)
    for now in (0, 4e9):
        os.utime(tmp_path / "lock", (now, now))
        text = (tmp_path / "lock").read_text()
        assert len(take(tmp_path)) == 1
        (tmp_path / "lock").write_text(text)


@pytest.mark.parametrize("text", ["process 7 on here since", "\0\0\0", "anything\n"])
def test_a_lock_that_cannot_be_read_is_watched(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    assert len(take(tmp_path)) == 1


def test_who_stood_still_and_lost_its_folder_ends(tmp_path):
    """Stopped for longer than others wait, and woken up again."""

    def wake(held):
        time.sleep(BEAT)
        for _ in range(40):
            time.sleep(BEAT)
            try:
                held.check()
            except UserError as error:
                held.release()
                return str(error)

    with holding(tmp_path, on_another_host, wake) as (process, pipe):
        assert receive(pipe) == "in"
        os.kill(process.pid, signal.SIGSTOP)
        ours = FolderLock(tmp_path, lambda line: None)
        ours.take()
        text = (tmp_path / "lock").read_text()
        os.kill(process.pid, signal.SIGCONT)
        words = receive(pipe)
        assert f"taken over by process {os.getpid()} on {os.uname().nodename}" in words
        assert (tmp_path / "lock").read_text() == text
        ours.check()
        ours.release()


def test_of_several_that_come_at_once_one_gets_in(tmp_path):
    """To the folder of a holder that died, without a flock between them."""
    was = "process 1 on nowhere since 2001-01-01 00:00:00\n1 978307200.0\n"
    for _ in range(2):
        (tmp_path / "lock").write_text(was)
        with holding(tmp_path, on_another_host) as (_, a), holding(tmp_path, on_another_host) as (_, b):
            with holding(tmp_path, on_another_host) as (_, c):
                assert sorted(receive(pipe) == "in" for pipe in (a, b, c)) == [False, False, True]


def test_the_beat_keeps_no_process_alive_and_survives_no_fork(tmp_path):
    """And it goes on in the parent."""

    def fork(held):
        child = FORK.Process(target=lambda: os._exit(threading.active_count()), daemon=True)
        child.start()
        child.join(30)
        before = (tmp_path / "lock").stat().st_mtime_ns
        time.sleep(3 * BEAT)
        return child.exitcode, (tmp_path / "lock").stat().st_mtime_ns > before

    with holding(tmp_path, body=fork) as (process, pipe):
        assert receive(pipe) == "in"
        assert receive(pipe) == (1, True)
        process.join(10)
        assert process.exitcode == 0


def test_a_run_that_has_ended_beats_no_more(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(lock, "BEAT", 99)
        take(tmp_path)
        time.sleep(BEAT)
        assert not [thread for thread in threading.enumerate() if thread.name == "lock"]
    take(tmp_path)
    before = (tmp_path / "lock").stat().st_mtime_ns
    time.sleep(3 * BEAT)
    assert (tmp_path / "lock").stat().st_mtime_ns == before and (tmp_path / "lock").read_text() == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="machines are told apart by Linux's boot id")
@pytest.mark.parametrize("hidden", [False, True])
def test_another_machine_of_the_same_name(tmp_path, monkeypatch, hidden):
    """As of containers that share a disk: its boot id, or what processes it sees, is another; or cannot be known."""
    host, number, (machine, _, start) = (
        os.uname().nodename,
        os.getpid(),
        environment.this_process().split()[1].rpartition("."),
    )
    other = machine if hidden else machine[::-1]
    monkeypatch.setattr(environment, "_machine", lambda: "" if hidden else machine)
    (tmp_path / "lock").write_text(f"process {number} on {host} since 2001-01-01 00:00:00\n{number} {other}.{start}\n")
    assert len(take(tmp_path)) == 1


def test_a_lock_is_read_anew_when_it_matters(tmp_path, monkeypatch):
    """A process that has just woken up has not touched its lock since; what it gives back is not its own."""
    monkeypatch.setattr(lock, "BEAT", 99)
    held = FolderLock(tmp_path)
    held.take()
    held.check()
    (tmp_path / "lock").unlink()
    held.check()  # nobody else has it
    (tmp_path / "lock").write_text("process 7 on elsewhere since now\n7 a.b\n")
    with pytest.raises(UserError, match="taken over by process 7 on elsewhere"):
        held.check()
    held.release()
    assert (tmp_path / "lock").read_text().startswith("process 7")
