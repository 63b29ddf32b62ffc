"""Law 4 with a notice at each place of a run: it saves, or says what is saved, in time, and goes on bitwise."""

import functools
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from support.launching import ROOT, Training, scores, steps, weights

SCRIPT = ROOT / "tests" / "laws" / "noticed.py"
GRACE = 6  # seconds, in which a loaded machine saves this small model
HEADS = {
    "one": [],
    "ddp": ["-m", "app", "launch", "ddp_cpu:2"],
    "fsdp": ["-m", "app", "launch", "fsdp_cpu:2"],
}
# Slow for less than the grace, one after the other in one launch: the run leaves by itself. With the rank that has the
# notice. In `long`, steps are slow compared with the grace.
LEAVE = {
    "first": (1, "first@1"),
    "inside": (0, "step@1"),
    "long": (1, f"steps@{GRACE / 5}"),
    "evaluation": (0, "evaluation@1"),
    "checkpoint": (1, "checkpoint@1"),
    "export": (0, "model@1"),
}
# Slow for longer: the run is ended. With the place, and what is said of the newest checkpoint.
CUT = {
    "preparing": ("data", "there is no checkpoint yet"),
    "endless": ("step", "the newest checkpoint is step 4"),
    "scoring": ("evaluation", "there is no checkpoint yet"),
    "writing": ("checkpoint", "there is no checkpoint yet"),
    "exporting": ("model", "the newest checkpoint is step 12"),
}
# The last run of the same launch is ended, and others in launches of their own.
ENDED = {"one": ["preparing", "endless", "writing", "exporting"], "ddp": ["preparing"], "fsdp": ["endless"]}


@contextmanager
def training(folder: Path, layout: str, *runs: str, env: dict | None = None):
    """Launch runs of noticed.py; at the end, no process of theirs is left."""
    words = [sys.executable, *HEADS[layout], SCRIPT, folder, *runs]
    before = [f"{name}={value}" for name, value in (env or {}).items()]
    started = Training(folder, ["env", *before, *words] if before else words)
    try:
        yield started
    finally:
        started.end()


def processes(layout: str) -> int:
    return 1 if layout == "one" else 2


def wait_at(now: Training, layout: str, run: str, place: str) -> None:
    """Wait until each rank that comes to a place is there; the main process alone writes checkpoints and models."""
    count = 1 if place in ("checkpoint", "model") else processes(layout)
    now.wait_for(lambda: len([*now.folder.glob(f"{run}-{place}-*")]) == count)


def ask(now: Training, layout: str, rank: int) -> float:
    """Send one rank SIGTERM; return when."""
    now.rank(min(rank, processes(layout) - 1)).send_signal(signal.SIGTERM)
    return time.monotonic()


def word(name: str) -> str:
    """Return what noticed.py gets to make a run that is ended."""
    return f"{name}@{CUT[name][0]}@60:--run.grace:{GRACE}"


def left_by_themselves(now: Training, layout: str) -> dict[str, float]:
    """Give notice to runs that leave in time, all in one launch; return how long each took."""
    took = {}
    for name, (rank, place) in LEAVE.items():
        wait_at(now, layout, name, place.partition("@")[0])
        if name == "long":
            now.reach(name, 2)
        asked = ask(now, layout, rank)
        now.wait_for(lambda name=name: now.status(name) in ("preempted", "finished"))
        took[name] = time.monotonic() - asked
    return took


def ended(now: Training, layout: str, name: str) -> str:
    """Give notice to the last run of a launch, which is too slow; return what it printed."""
    place, _ = CUT[name]
    wait_at(now, layout, name, place)
    before, asked = len(now.output()), ask(now, layout, 1)
    now.wait_for(lambda: now.status(name) == "preempted")
    assert time.monotonic() - asked < (GRACE if place != "data" else GRACE / 2), now.output()
    assert now.process.wait(30) == 75 and "Traceback" not in now.output(), now.output()
    return now.output()[before:]


def cut_short(folder: Path, layout: str, name: str) -> str:
    """Launch a run that is too slow, and give it notice; return what it printed."""
    with training(folder, layout, word(name)) as now:
        return ended(now, layout, name)


class Told(NamedTuple):
    """Runs that had notice on one layout, and were then resumed."""

    folder: Path
    took: dict[str, float]
    statuses: dict[str, str]
    made: dict[str, int]
    said: dict[str, str]


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory):
    """Give a function: notices at all places on a layout, and then one launch in which each run is resumed."""

    @functools.cache
    def gone_on(layout: str) -> Told:
        folder, (last, *others) = tmp_path_factory.mktemp(layout), ENDED[layout]
        runs = [f"{name}@{place}:--run.grace:{GRACE}" for name, (_, place) in LEAVE.items()]
        with training(folder, layout, *runs, word(last)) as now:
            took = left_by_themselves(now, layout)
            said = {last: ended(now, layout, last)}
        statuses = {name: now.status(name) for name in LEAVE}
        made = {name: len(steps(folder / name)) for name in LEAVE}
        said |= {name: cut_short(folder, layout, name) for name in others}
        go_on(folder, layout, *LEAVE, *said, "whole")
        return Told(folder, took, statuses, made, said)

    return gone_on


def go_on(folder: Path, layout: str, *names: str) -> None:
    """Launch runs once more, without notice, up to their ends."""
    with training(folder, layout, *(f"{name}@none" for name in names)) as now:
        assert now.process.wait(120) == 0, now.output()


def check_same(run: Path, whole: Path) -> None:
    """Compare a run that was resumed with one that was left alone, in every bit."""
    assert len(steps(whole)) == 12 and len(scores(whole)) == 3
    assert steps(run) == steps(whole) and scores(run) == scores(whole), run.name
    assert weights(run) == weights(whole), run.name
    assert (run / "model" / "part.json").exists()


LAYOUTS = ["one", "ddp", "fsdp"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_leaves_in_time_by_itself(gone_on, layout):
    """Whatever it does, and whichever rank has the notice: it saves, or has finished."""
    told = gone_on(layout)
    assert told.statuses == {name: "finished" if name == "export" else "preempted" for name in LEAVE}
    assert max(told.took.values()) < GRACE, told.took


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_step_is_begun_that_would_be_too_long(gone_on, layout):
    """With several ranks, too, the step in which the notice comes is the last one."""
    assert gone_on(layout).made["long"] == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_is_too_slow_says_what_is_saved(gone_on, layout):
    """It ends in time with status 75, as a run that is to be repeated, also where one rank alone has the notice."""
    for name, output in gone_on(layout).said.items():
        assert output.count(CUT[name][1]) == 1, output


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_was_stopped_goes_on_bitwise(gone_on, layout):
    told = gone_on(layout)
    for name in (*LEAVE, *told.said):
        check_same(told.folder / name, told.folder / "whole")


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_place_in_which_a_run_is_ended(tmp_path, layout):
    for name in CUT.keys() - set(ENDED[layout]):
        assert cut_short(tmp_path, layout, name).count(CUT[name][1]) == 1
    go_on(tmp_path, layout, *(CUT.keys() - set(ENDED[layout])), "whole")
    for name in CUT.keys() - set(ENDED[layout]):
        check_same(tmp_path / name, tmp_path / "whole")


def test_a_command_gives_notice(tmp_path):
    with training(tmp_path, "one", f"run@steps@0.3:--run.notice:test -e {tmp_path}/gone:--run.steps:400") as now:
        now.reach("run", 2)
        (tmp_path / "gone").touch()
        assert now.process.wait(20) == 75 and "--run.notice: the run saves and stops" in now.output(), now.output()
        assert now.status("run") == "preempted"


# Counts down from 13 seconds, from the first time on that it is asked.
SQUEUE = """#!/bin/sh
test -e {end} || date -d '+13 seconds' +%s > {end}
printf '0:%02d\\n' $(($(cat {end}) - $(date +%s)))
"""


def test_a_run_stops_before_the_time_of_its_job_is_over(tmp_path):
    """In steps of 4 seconds, with 3 to be left after the last one: the third one is not begun."""
    (tmp_path / "squeue").write_text(SQUEUE.format(end=tmp_path / "end"))
    (tmp_path / "squeue").chmod(0o755)
    slurm = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    with training(tmp_path, "one", "run@steps@4:--run.grace:3", env=slurm) as now:
        assert now.process.wait(60) == 75, now.output()
        assert time.time() < float((tmp_path / "end").read_text()) - 3
        assert "Slurm's time limit: the run saves and stops" in now.output()
        made = len(steps(tmp_path / "run"))
        assert 1 <= made <= 2 and (tmp_path / "run" / "checkpoints" / f"step-{made:08d}").is_dir()
