"""watchdog: what is progress, and that nothing which goes wrong while a hang is told keeps the process alive."""

import contextlib
import subprocess
import sys
import threading
import time

import pytest
from support.launching import ROOT

from app.distributed.state import manifest
from app.distributed.watchdog import Watchdog, note_in_time


@pytest.fixture
def dog(tmp_path, monkeypatch):
    """A watchdog of one second, which looks every second, over a folder; it only notes that it would end the run."""
    ended = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, reason: ended.append(reason))
    dog = Watchdog(1.0, lambda reason: None, [tmp_path])
    dog.ended = ended
    dog.start()
    yield dog
    dog.close()


def test_blocks_that_are_read_are_progress_while_ranks_wait_for_them(dog, tmp_path):
    """At a checkpoint's sums, of which each block is counted; in a step they are not."""
    (tmp_path / "file").write_bytes(bytes(9 << 20))
    with dog.long_work():
        for _ in range(16):
            before = dog._blocks
            manifest.entries(tmp_path, ["file"], dog.moved)
            assert dog._blocks == before + 3
            time.sleep(0.2)
        assert not dog.ended
    for _ in range(16):
        dog.moved()
        time.sleep(0.2)
    assert dog.ended


@pytest.mark.parametrize(("block", "ends"), [(Watchdog.unwatched, False), (contextlib.nullcontext, True)])
def test_what_is_left_to_others_is_not_watched(dog, block, ends):
    with block(dog):
        time.sleep(3.5)
    assert bool(dog.ended) is ends


HANG = """
import sys, time
from app.distributed.watchdog import Watchdog

def failed(reason):
    {what}

Watchdog(1, failed).start()
time.sleep(60)
"""


def test_a_failure_that_cannot_be_noted_ends_the_process_all_the_same():
    """The folder is another run's by now, or standard error is closed."""
    script = HANG.format(what="raise RuntimeError('taken over')").replace(
        "Watchdog(1", "sys.stderr.close(); Watchdog(1"
    )
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=40).returncode == 1
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("seconds", [0, 30])
def test_a_note_is_not_waited_for_beyond_its_time(seconds, monkeypatch):
    """A disk that hangs, or a note that fails, of which nobody hears."""
    heard = []
    monkeypatch.setattr(threading, "excepthook", heard.append)

    def note(reason):
        time.sleep(seconds)
        raise OSError(reason)

    began = time.monotonic()
    note_in_time(note, "no progress", seconds=0.2)
    assert time.monotonic() - began < 5 and not heard
