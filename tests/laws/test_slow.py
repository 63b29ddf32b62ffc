"""Slow work that makes progress is no hang; work without progress is one, also at the end of a run."""

import json

import pytest
from support.launching import ROOT, launch, steps


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Launch two ranks; their last run hangs."""
    folder = tmp_path_factory.mktemp("slow")
    return folder, launch("ddp_cpu", 2, ROOT / "tests/laws/slow.py", folder)


def about(slow, name):
    return json.loads((slow[0] / name / "run.json").read_text())


def test_slow_data_a_slow_last_checkpoint_and_a_slow_model_are_waited_for(slow):
    """Each takes longer than --run.timeout; the data also longer than the timeout of a collective."""
    folder, result = slow
    assert "resuming" in result.output, result.output
    assert about(slow, "slow")["status"] == "finished" and len(steps(folder / "slow")) == 4
    assert (folder / "slow/model/model.safetensors").exists()


def test_a_slow_checkpoint_is_waited_for_without_a_thread_too(slow):
    assert about(slow, "at once")["status"] == "finished"


def test_a_last_checkpoint_that_hangs_is_shown(slow):
    """The main process waits in its own code; the stack of the last rank ends where it hangs."""
    result = slow[1]
    assert result.status != 0
    run = about(slow, "stuck")
    assert run["status"] == "failed" and "no progress for 3 s (--run.timeout)" in run["error"]
    assert "in stuck_save" in result.output and all(f"stacks of rank {rank}" in result.output for rank in (0, 1))


def test_collectives_wait_longer_than_the_watchdog(slow):
    """Also in a process group of an earlier run; collectives outside training wait as good as for ever."""
    week = 7 * 24 * 3600
    for rank in (0, 1):
        limits = json.loads((slow[0] / f"limits-{rank}.json").read_text())
        assert limits["slow 1"] == limits["slow 3"] == [1800, week]
        assert limits["unhurried 1"] == [4120, week] and limits["never 1"] == [week, week]
