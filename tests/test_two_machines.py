"""Law 4 on two machines: network namespaces with a cable between them, which share nothing but the run folder."""

import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from launching import PROFILES, ROOT, Training, run, steps

SCRIPT = ROOT / "tests" / "laws" / "stopped.py"
FIRST = "10.77.0.1"
FLAGS = "@0.1:--run.save-every:2"


def ip(*words):
    """Run iproute2, which must succeed."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Machine:
    """One of the two, and its launcher."""

    def __init__(self, number, folder, profile):
        self.number, self.folder, self.profile = number, folder, profile
        self.name = f"samestep-{os.getpid()}-{number}"
        self.now = None

    def start(self, *runs, more=()):
        """Type the command that a user types here."""
        launch = ["ip", "netns", "exec", self.name, sys.executable, "-m", "accelerate.commands.launch"]
        launch += ["--config_file", self.profile, "--main_process_ip", FIRST, "--machine_rank", self.number, *more]
        self.now = Training(self.folder, [*launch, SCRIPT, self.folder, *runs], f"output-{self.number}")

    def cable(self, state):
        ip("-n", self.name, "link", "set", "eth0", state)

    def lose(self):
        """Kill the launcher with its ranks, none of which gets a word out."""
        self.now.process.send_signal(signal.SIGSTOP)
        self.now.end()

    def close(self):
        if self.now is not None and not self.now.file.closed:
            self.lose()
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Give two machines, on which a process each trains together; nothing of them is left in the end."""
    folder = tmp_path_factory.mktemp("machines")
    text = (PROFILES / "ddp_2nodes.yaml").read_text().replace("num_processes: 16", "num_processes: 2\nuse_cpu: true")
    (folder / "profile.yaml").write_text(text.replace("mixed_precision: bf16", "mixed_precision: 'no'"))
    both = [Machine(number, folder, folder / "profile.yaml") for number in (0, 1)]
    try:
        try:
            if not shutil.which("ip"):
                raise OSError("there is no `ip` (iproute2)")
            for machine in both:
                ip("netns", "add", machine.name)
            ends = [["eth0", "netns", machine.name] for machine in both]
            ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
            for machine, address in zip(both, (FIRST, "10.77.0.2"), strict=True):
                ip("-n", machine.name, "address", "add", f"{address}/24", "dev", "eth0")
                ip("-n", machine.name, "link", "set", "lo", "up")
                machine.cable("up")
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield both
    finally:
        for machine in both:
            machine.close()


@pytest.fixture(scope="module")
def story(machines):
    """Lose the first machine, then the second behind a cut cable, then a rank; start them again; finish on one."""
    first, second = machines
    seen = SimpleNamespace(folder=first.folder)
    for machine in machines:
        machine.start("whole", f"hang{FLAGS}:--run.timeout:20")
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
        machine.start(command, more=["--max_restarts", "2"])
    first.now.reach("run", 12)
    before = first.now.rank(0)
    second.cable("down")
    second.lose()
    before.wait(60)
    second.cable("up")
    second.start(command, more=["--max_restarts", "1"])  # for the rank, later; coming back costs none
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
