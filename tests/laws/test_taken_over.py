"""A run is suspended on one machine while another takes over its folder; when it wakes up, it harms nothing."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.launching import ROOT, kill_tree, steps

SCRIPT = ROOT / "tests" / "laws" / "shared_disk.py"


def start(folder, host, *flags, pause=0.0):
    words = [sys.executable, SCRIPT, host, "--run.dir", folder / "run", "--run.save-every", 5, *flags]
    return subprocess.Popen(
        [str(word) for word in words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PAUSE": str(pause)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("timeout", [0, 3])
def test_a_run_that_wakes_up_leaves_the_newer_one_alone(tmp_path, timeout):
    """It ends at its next line or checkpoint; with a watchdog, at whichever of the two comes first."""
    old = start(tmp_path, "first", "--run.timeout", timeout, pause=0.15)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "run" / "metrics.jsonl").exists() or len(steps(tmp_path / "run")) < 12:
            assert time.monotonic() < end and old.poll() is None
            time.sleep(0.02)
        os.kill(old.pid, signal.SIGSTOP)
        new = start(tmp_path, "second", "--run.keep", 3)
        said, _ = new.communicate(timeout=60)
        assert new.returncode == 0 and "resuming" in said, said
        before = contents(tmp_path / "run")
        time.sleep(timeout)
        os.kill(old.pid, signal.SIGCONT)
        said, _ = old.communicate(timeout=30)
    finally:
        kill_tree(old.pid)
    ends = {2: "was taken over"} | ({1: "no progress for 3 s"} if timeout else {})
    assert old.returncode in ends and ends[old.returncode] in said, said
    assert contents(tmp_path / "run") == before
    assert [path.name[-2:] for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["30", "35", "40"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
