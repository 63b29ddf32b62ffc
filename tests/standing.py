"""Launches that stay: one for each layout, which runs what test after test asks of it; and a Python that is warm.

A launch takes 10 s of processor time before it does anything (each process imports torch and transformers), and most
laws need one on the same few layouts. What needs a launch of its own (an environment, a fault that ends it) has one.
Ranks are forks of a Python that has made the imports, with the environment that the launcher has given to the rank.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from app.launching.launcher import kill_tree, launcher_words
from laws.forked import ask, status_of

SERVER = Path(__file__).parent / "laws" / "serving.py"
CLIENT = SERVER.with_name("forked.py")
RANKS = 20  # that stay at a time: up to 0.3 GB each


class Warm:
    """A Python that has made imports, and forks a process for each script that it is asked to run.

    Args:
        env: its environment, and that of the scripts.
        imports: the names of modules; empty: those that recipes import.
    """

    ranks = 0

    def __init__(self, env: dict[str, str], imports: Sequence[str] = ()):
        self.folder, self.env = Path(tempfile.mkdtemp(prefix="warm-")), env
        self.socket, self.python = self.folder / "socket", self.folder / "python"
        # Without `site`, Python starts in a tenth of the time.
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {CLIENT} {self.socket} "$@"\n')
        self.python.chmod(0o755)
        self.process = subprocess.Popen(
            [sys.executable, SERVER, "source", self.socket, self.python, *imports],
            stdin=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Wait until it can fork."""
        with socket.socket(socket.AF_UNIX) as knocking:
            while knocking.connect_ex(str(self.socket)):
                if (status := self.process.poll()) is not None:
                    raise ChildProcessError(f"the Python that forks others has ended with status {status}")
                time.sleep(0.05)

    def run(self, folder: Path, *words: str, timeout: float) -> tuple[int | None, str]:
        """Run a script, -m or -c; return its status, None for one that was still running, and what it printed."""
        self.wait()
        with tempfile.TemporaryFile() as output, open(os.devnull) as nothing:
            files = [nothing.fileno(), output.fileno(), output.fileno()]
            fork, _ = ask(str(self.socket), self.env, str(folder), list(words), files)
            fork.settimeout(timeout)
            try:
                status = status_of(fork)
            except TimeoutError:
                status = None
            fork.close()
            if status is None:
                time.sleep(1)  # for its stacks
            output.seek(0)
            said = output.read().decode(errors="replace")
        return (128 - status if status is not None and status < 0 else status), said

    def end(self) -> None:
        """Have it end by itself."""
        self.process.stdin.close()
        self.process.wait(20)
        shutil.rmtree(self.folder)


class Standing:
    """Processes that wait for commands.

    Args:
        ranks: how many.
        head: what starts them, but for laws/serving.py and its arguments.
        warm: makes the ranks.
    """

    def __init__(self, ranks: int, head: list[str], warm: Warm):
        self.folder, self.ranks = Path(tempfile.mkdtemp(prefix="standing-")), ranks
        self.count, self.printed = 0, self.folder / "output"
        self.stopped: set[int] = set()
        # Opened for both, which does not wait for the other end; the ranks end when this process closes it.
        *self.pipes, self.done = [self._pipe(name) for name in (*(f"rank-{rank}" for rank in range(ranks)), "done")]
        warm.wait()
        with self.printed.open("wb") as output:
            self.process = subprocess.Popen(
                [warm.python, *head[1:], SERVER, "serve", self.folder],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=warm.env,
            )

    def _pipe(self, name: str) -> int:
        os.mkfifo(self.folder / name)
        return os.open(self.folder / name, os.O_RDWR)

    def run(self, folder: Path, script: str, *words: str, timeout: float) -> tuple[int | None, str]:
        """Run a script on all ranks; return its status, None for one that still runs, and what it printed.

        Between two scripts all are stopped: the threads that wait for messages look for some 200 times a second.
        """
        self._go_on()
        self.count += 1
        already = self.printed.stat().st_size
        command = json.dumps([self.count, str(folder), script, words]) + "\n"
        for pipe in self.pipes:
            os.write(pipe, command.encode())
        end, said = time.monotonic() + timeout, b""
        while (ended := self.process.poll()) is None and time.monotonic() < end:
            if select.select([self.done], [], [], 0.1)[0]:
                said += os.read(self.done, 1 << 16)
            through = [list(map(int, line.split())) for line in said.splitlines(keepends=True) if line.endswith(b"\n")]
            if [number for number, *_ in through].count(self.count) == self.ranks:
                self._stop({process for _, *processes in through for process in processes})
                return 0, self.output(already)
        return ended, self.output(already)

    def _stop(self, processes: set[int]) -> None:
        self.stopped = processes
        for pid in processes:
            with suppress(ProcessLookupError):  # the next script finds that it has ended
                os.kill(pid, signal.SIGSTOP)

    def _go_on(self) -> None:
        while self.stopped:
            with suppress(ProcessLookupError):
                os.kill(self.stopped.pop(), signal.SIGCONT)

    def output(self, begin: int = 0) -> str:
        """Read what the ranks printed, from a byte on."""
        return self.printed.read_bytes()[begin:].decode(errors="replace")

    def end(self) -> None:
        """Have the ranks end by themselves; kill what does not."""
        self._go_on()
        for pipe in (*self.pipes, self.done):
            os.close(pipe)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            kill_tree(self.process.pid)
            self.process.wait()
        shutil.rmtree(self.folder)


_standing: dict[tuple, Standing | Warm] = {}  # the one that was used last comes last


def warm(env: dict[str, str]) -> Warm:
    """Return the warm Python of an environment; start it where there is none."""
    env = {name: value for name, value in env.items() if name != "PYTEST_CURRENT_TEST"}
    key = ("warm", frozenset(env.items()))
    _standing[key] = _standing.pop(key, None) or Warm(env)
    return _standing[key]


def stand(profile: Path, processes: int, env: dict[str, str]) -> Standing:
    """Return the launch of a layout under an environment; start it where it does not stand.

    Args:
        profile: the profile's file.
        processes: 0 for as many as the profile says.
    """
    source, ranks = warm(env), processes or yaml.safe_load(profile.read_text()).get("num_processes", 1)
    key = (profile.read_text(), ranks, frozenset(source.env.items()))
    found = _standing.pop(key, None)
    if found is None or found.process.poll() is not None:
        found = Standing(ranks, launcher_words(profile, processes, SERVER)[:-1], source)
    while (there := [one for one in _standing if _standing[one].ranks]) and found.ranks + sum(
        _standing[one].ranks for one in there
    ) > RANKS:
        _standing.pop(there[0]).end()
    _standing[key] = found
    return found


def end_all() -> None:
    """End all that stands; what the ranks are made by last."""
    for key in sorted(_standing, key=lambda key: _standing[key].ranks == 0):
        _standing.pop(key).end()
