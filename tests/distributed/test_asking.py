"""What says when a machine or a job ends: how it is read, and how the programs are asked."""

import sys
import time
from datetime import UTC, datetime

import pytest

from app.distributed import asking

NOW = datetime(2026, 11, 25, 8, 20, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("4-01:30:05             \n", 4 * 86400 + 5405),
        ("1:30:00", 5400),
        ("0:07\n", 7),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("-0:10", None),
        ("", None),
    ],
)
def test_the_time_that_slurm_leaves(said, seconds):
    assert asking.time_left(said) == seconds


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ('{"action": "terminate", "time": "2026-11-25T08:22:00Z"}', 120),
        ("2026-11-25T08:21:30+00:00\n", 90),
        ("2026-11-25 10:21:00+02:00", 60),
        ("2026-11-25T08:20:05", 5),
        ('{"Events": [{"NotBefore": ""}, {"NotBefore": "Wed, 25 Nov 2026 08:25:00 GMT"}]}', 300),
        ('{"Events": [{"NotBefore": "Wed, 25 Nov 2026 09:00:00 GMT"}, {"NotBefore": "2026-11-25T08:20:30Z"}]}', 30),
        ("2026-11-25T08:19:00Z", None),  # it is over, or this clock is wrong
        ("TRUE", None),
        ('{"time": 5}', None),
        ("[1]", None),
        ('{"Events": 3}', None),
        ("", None),
    ],
)
def test_the_time_that_a_cloud_says(said, seconds):
    assert asking.seconds_left(said, NOW) == seconds


@pytest.mark.parametrize(
    ("said", "no"), [("FALSE\n", True), ('{"Events": []}', True), ("TRUE", False), ("", False), ("{}", False)]
)
def test_what_is_no_notice(said, no):
    assert asking.says_no(said) == no


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(asking, "EVERY", 0.05)


def told(command: str, seconds: float) -> list:
    """Ask a command for a while; return what was heard."""
    heard: list = []
    each = asking.of_machine(command, lambda *words: heard.append(words))
    end = time.monotonic() + seconds
    while not heard and time.monotonic() < end:
        time.sleep(0.02)
    each.close()
    return heard


@pytest.mark.launches
def test_a_command_is_asked_until_it_says_so(often, tmp_path):
    """A shell reads it; only its first yes counts."""
    counts = tmp_path / "asked"
    command = f'echo x >> {counts}; test "$(wc -l < {counts})" -ge 3 && date -u -d "+1 minute" +%FT%TZ'
    ((who, left),) = told(command, 10)
    assert who == "--run.notice" and 50 < left <= 61 and len(counts.read_text().split()) == 3


@pytest.mark.launches
def test_a_command_that_is_not_there_is_said_once(often, capsys):
    assert told("no-such-program --at-all", 0.5) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: --run.notice cannot be asked: ") and "no-such-program" in line


@pytest.mark.launches
def test_a_command_that_hangs_ends_with_the_run(often):
    began = time.monotonic()
    assert told("sleep 60", 0.2) == [] and time.monotonic() - began < 3


def test_outside_of_slurm_nobody_is_asked(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert asking.of_slurm(print, lambda: 1.0) is None


@pytest.mark.launches
def test_slurm_is_asked_for_this_job(monkeypatch, tmp_path):
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!{sys.executable}\nimport sys\nprint('2:05' if sys.argv[1:] == {WORDS} else 'INVALID')\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    heard: list = []
    each = asking.of_slurm(heard.append, lambda: 1.0)
    end = time.monotonic() + 10
    while not heard and time.monotonic() < end:
        time.sleep(0.02)
    each.close()
    assert heard == [125.0]


WORDS = ["-h", "-j", "17", "-O", "TimeLeft"]
