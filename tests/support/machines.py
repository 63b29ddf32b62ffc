"""Two machines: network namespaces with a cable between them, which share nothing but the disk."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.launching import Training

FIRST = "10.77.0.1"


def ip(*words):
    """Run iproute2, which must succeed."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Machine:
    """One of the two, and its launcher."""

    def __init__(self, number, folder, profile, script):
        self.number, self.folder, self.profile, self.script = number, folder, profile, script
        self.name = f"samestep-{os.getpid()}-{number}"
        self.now = None

    def start(self, *words, more=()):
        """Type the command that a user types here.

        Args:
            words: for the script.
            more: options of the launcher.
        """
        launch = ["ip", "netns", "exec", self.name, sys.executable, "-m", "accelerate.commands.launch"]
        launch += ["--config_file", self.profile, "--main_process_ip", FIRST, "--machine_rank", self.number, *more]
        self.now = Training(self.folder, [*launch, self.script, *words], f"output-{self.number}")

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


@contextmanager
def two_machines(folder: Path, profile: Path, script: Path) -> Iterator[list[Machine]]:
    """Give two machines, on which a process each trains together; nothing of them is left in the end."""
    both = [Machine(number, folder, profile, script) for number in (0, 1)]
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
