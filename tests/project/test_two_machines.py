"""Law 4 on two machines: network namespaces with a cable between them, which share nothing but the run folder."""

import sys
import time
from types import SimpleNamespace

import pytest
from support.launching import ROOT, profile_of, run, steps
from support.machines import two_machines

SCRIPT = ROOT / "tests" / "laws" / "stopped.py"
FLAGS = "@0.1:--run.save-every:2"


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Give two machines for the toy recipe."""
    folder = tmp_path_factory.mktemp("machines")
    profile = profile_of(folder, "ddp_2nodes", num_processes=2, use_cpu=True, mixed_precision="no")
    with two_machines(folder, profile, SCRIPT) as both:
        yield both


@pytest.fixture(scope="module")
def story(machines):
    """Lose the first machine, then the second behind a cut cable, then a rank; start them again; finish on one."""
    first, second = machines
    seen = SimpleNamespace(folder=first.folder)
    for machine in machines:
        machine.start(first.folder, "whole", f"hang{FLAGS}:--run.timeout:20")
    first.now.reach("hang", 4)
    time.sleep(0.5)
    began = time.monotonic()
    first.lose()
    seen.status = second.now.process.wait(60)
    seen.seconds, seen.last_words = time.monotonic() - began, second.now.output()
    second.lose()

    # From here on they wait for a machine that is lost. In a folder of this name nothing hangs.
    (first.folder / "hang").rename(first.folder / "run")
    command = f"run{FLAGS}:--run.timeout:3:--run.stop-at:30"
    for machine in machines:
        machine.start(first.folder, command, more=["--max_restarts", "2"])
    first.now.reach("run", 12)
    before = first.now.rank(0)
    second.cable("down")
    second.lose()
    before.wait(60)
    second.cable("up")
    second.start(first.folder, command, more=["--max_restarts", "1"])  # for the rank, later; coming back costs none
    first.now.wait_for(lambda: first.now.output().count("resuming") == 2)
    first.now.reach("run", 17)
    first.now.rank(0).kill()
    seen.ends = [machine.now.process.wait(90) for machine in machines]
    seen.output = first.now.output()

    one = [sys.executable, SCRIPT, first.folder, "run", "one"]
    seen.alone = run(one, env={"PYTHONPATH": str(ROOT)})
    return seen


def agree(some, others):
    """Compare two runs on different layouts."""
    assert len(some) == len(others) == 40
    for a, b in zip(some, others, strict=True):
        assert a["ids"] == b["ids"] and a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_two_machines_train_as_one_process(story):
    agree(steps(story.folder / "whole"), steps(story.folder / "one"))


def test_a_machine_that_loses_the_first_ends_by_itself(story):
    assert story.status not in (0, None) and story.seconds < 20
    assert "the launcher of the first machine has gone; stacks of rank 1, step 5" in story.last_words


def test_a_lost_machine_comes_back(story):
    """The other waits for it, both go on from the checkpoint, and a killed rank is started again on both."""
    assert story.ends == [0, 0], story.output
    assert "no progress for 3 s (--run.timeout)" in story.output
    assert story.output.count("resuming") == 3
    assert steps(story.folder / "run")[:30] == steps(story.folder / "whole")[:30]


def test_what_two_machines_began_is_finished_on_one(story):
    assert story.alone.status == 0 and "saved on 2 data ranks, DDP" in story.alone.output, story.alone.output
    agree(steps(story.folder / "run"), steps(story.folder / "whole"))
