"""app.lock: one run holds a folder, also on disks without flock, and on disks that several machines share.

The holders are processes of their own. Another machine is one with another name whose flock is not seen here.
"""

import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from app import launch, lock
from app.lock import InUse, Lock
from launching import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
BEAT = 0.3


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock, "BEAT", BEAT)


def failing_with(number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    return flock


def unseen(file, operation):
    """Lock as a disk does whose locks are local to a machine."""


def attempt(path, answer, host, flock, together=None):
    lock._held.clear()  # what the fork remembers of its parent
    socket.gethostname = lambda: host
    lock.fcntl.flock = flock or lock.fcntl.flock
    if together is not None:
        own = launch.this_process()
        lock.launch.this_process = lambda: together.wait(30) is None or own  # the last thing before it is written
    try:
        _held = Lock(path)
        answer.send(os.getpid())
    except InUse:
        answer.send(None)
    signal.pause()


@contextmanager
def held(path, host="elsewhere", flock=unseen):
    """Have a process hold a lock, and kill it in the end; gives the process."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=attempt, args=(path, theirs, host, flock), daemon=True)
    process.start()
    try:
        assert ours.poll(30) and ours.recv() == process.pid
        yield process
    finally:
        process.kill()
        process.join(30)


def taken(path) -> float:
    """Take a lock and give it back; returns the seconds that it took."""
    start = time.monotonic()
    Lock(path).release()
    return time.monotonic() - start


def test_a_holder_on_another_machine_is_known_by_its_beat(tmp_path, capsys):
    path = tmp_path / "lock"
    with held(path) as process:
        with pytest.raises(InUse, match=f"process {process.pid} on elsewhere since "):
            Lock(path)
        (line,) = capsys.readouterr().err.splitlines()
        assert str(process.pid) in line and "elsewhere" in line and str(tmp_path) in line
        time.sleep(3 * BEAT)
        with pytest.raises(InUse):  # it still lives
            Lock(path)
    capsys.readouterr()
    assert taken(path) > 2 * BEAT
    assert "watching" in capsys.readouterr().err


def test_what_was_given_back_elsewhere_is_taken_at_once(tmp_path, capsys):
    path = tmp_path / "lock"
    Lock(path).release()
    assert path.read_text() == "" and taken(path) < BEAT and not capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_flock_the_process_is_asked_for(tmp_path, monkeypatch, capsys, number):
    path = tmp_path / "lock"
    with held(path, socket.gethostname(), failing_with(number)) as process:
        monkeypatch.setattr(lock.fcntl, "flock", failing_with(number))
        with pytest.raises(InUse, match=f"process {process.pid} on "):
            Lock(path)
    assert taken(path) < 2 * BEAT and not capsys.readouterr().err


def test_a_number_that_another_process_has_now_is_not_the_holder(tmp_path, monkeypatch):
    """Of this very process, begun at another time."""
    monkeypatch.setattr(lock.fcntl, "flock", failing_with(errno.ENOLCK))
    holder = {"host": socket.gethostname(), "process": f"{os.getpid()} 1.5", "since": "yesterday"}
    (tmp_path / "lock").write_text(json.dumps(holder))
    Lock(tmp_path / "lock").release()
    (tmp_path / "lock").write_text(json.dumps({**holder, "process": launch.this_process()}))
    with pytest.raises(InUse):
        Lock(tmp_path / "lock")


def test_without_flock_and_elsewhere_the_beat_decides(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    with held(path, flock=failing_with(errno.ENOLCK)):
        monkeypatch.setattr(lock.fcntl, "flock", failing_with(errno.ENOLCK))
        with pytest.raises(InUse, match="elsewhere"):
            Lock(path)
    Lock(path).release()


def test_other_faults_of_the_disk_are_not_taken_for_a_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock.fcntl, "flock", failing_with(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        Lock(tmp_path / "lock")


def test_of_two_that_find_it_free_together_one_gets_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 4.0)
    together, pairs = FORK.Barrier(2), [FORK.Pipe() for _ in range(2)]
    answers, processes = [ours for ours, _ in pairs], []
    for (_, theirs), host in zip(pairs, ("a", "b"), strict=True):
        arguments = (tmp_path / "lock", theirs, host, failing_with(errno.ENOLCK), together)
        processes.append(FORK.Process(target=attempt, args=arguments, daemon=True))
        processes[-1].start()
    try:
        assert all(answer.poll(30) for answer in answers)
        assert sum(answer.recv() is not None for answer in answers) == 1
    finally:
        for process in processes:
            process.kill()
            process.join(30)


FORKING = """
import os, sys, time
from app import lock
lock.BEAT = 0.1
held = lock.Lock(__import__("pathlib").Path(sys.argv[1]))
time.sleep(0.5)
if not os.fork():
    os.close(1), os.close(2)
    time.sleep(60)
print("end")
"""


def test_the_beat_ends_with_its_process_and_does_not_go_on_in_forks(tmp_path):
    """The program ends by itself, without giving the lock back; what it has forked lives on."""
    path = tmp_path / "lock"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FORKING, str(path)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.communicate(timeout=60)[0] == "end\n" and process.returncode == 0
        before = path.stat().st_mtime_ns
        time.sleep(0.5)
        assert path.stat().st_mtime_ns == before
        assert taken(path) < BEAT
    finally:
        os.killpg(process.pid, signal.SIGKILL)
