"""Contestants of a benchmark take turns, and are compared by what they did in them."""

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.copies import covered
from benchmarks.turns import Contestant, ratios, take_turns

pytestmark = pytest.mark.launches
STEPS = """
import json, os, time
from pathlib import Path
from benchmarks.gate import Gate

gate = Gate()
gate.begin()
for step in range({steps}):
    time.sleep({seconds})
    gate(8)
Path(os.environ["BENCH_GATE"], "result.json").write_text(json.dumps({{"eval/loss": 1.5}}))
"""


def sleeper(name: str, seconds: float, steps: int) -> Contestant:
    return Contestant(name, [sys.executable, "-c", STEPS.format(seconds=seconds, steps=steps)])


def test_one_that_takes_half_the_time_is_twice_as_fast():
    quick, slow = sleeper("quick", 0.02, 22), sleeper("slow", 0.04, 22)
    take_turns([quick, slow], rounds=5, steps=4, warm_up=2)
    assert [len(contestant.turns) for contestant in (quick, slow)] == [5, 5]
    assert quick.turns[0]["items"] == 4 * 8
    assert statistics.median(ratios(quick, slow)) == pytest.approx(2, rel=0.3)
    assert slow.result == {"eval/loss": 1.5}


def test_contestants_choose_their_threads_alike(monkeypatch):
    """A number that is meant for launchers would be the peers' alone, as a run of ours shares the cores by itself."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told = STEPS.format(steps=4, seconds=0.01).replace('"eval/loss": 1.5', '"told": os.environ.get("OMP_NUM_THREADS")')
    contestant = Contestant("one", [sys.executable, "-c", told])
    take_turns([contestant], rounds=1, steps=1, warm_up=1)
    assert contestant.result == {"told": None}


def test_one_that_fails_is_named_with_what_it_said():
    broken = Contestant("broken", [sys.executable, "-c", "raise SystemExit('no such text')"])
    with pytest.raises(SystemExit, match="broken ended with status 1:\nno such text"):
        take_turns([broken], rounds=1, steps=1, warm_up=1)


def test_a_copy_is_hidden_where_a_kernel_runs():
    kernels = [(0, 10), (5, 20), (30, 40)]
    assert covered([(2, 12)], kernels) == 1
    assert covered([(15, 25)], kernels) == 0.5
    assert covered([(20, 30), (30, 40)], kernels) == 0.5
