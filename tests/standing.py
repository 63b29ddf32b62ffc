"""Launches that stay: one for each layout, which runs what test after test asks of it; and a Python that is warm.

A launch takes 10 s of processor time before it does anything (each process imports torch and transformers), and most
laws need one on the same few layouts. What needs a launch of its own (an environment, a fault that ends it) has one.
The ranks of a launch that stays are forks of a Python that has made the imports, with the environment that the launcher
has given to the rank.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from app.launching.launcher import kill_tree, launcher_words

SERVER = Path(__file__).parent / "laws" / "serving.py"
RANKS = 28  # that stay at a time: up to 0.3 GB each


class Standing:
    """Processes that wait for commands.

    Args:
        ranks: how many.
        head: what starts them, but for laws/serving.py and its arguments.
        how: further arguments of laws/serving.py.
    """

    def __init__(self, ranks: int, head: list[str], *how: str, **options):
        self.folder, self.ranks = Path(tempfile.mkdtemp(prefix="standing-")), ranks
        self.count, self.printed = 0, self.folder / "output"
        for rank in range(max(1, ranks)):
            os.mkfifo(self.folder / f"rank-{rank}")
        # Opened for both, which does not wait for the other end; the ranks end when this process closes it.
        self.pipes = [os.open(self.folder / f"rank-{rank}", os.O_RDWR) for rank in range(max(1, ranks))]
        with self.printed.open("wb") as output:
            self.process = subprocess.Popen(
                [*head, SERVER, self.folder, *how],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )

    def run(self, folder: Path, script: str, *words: str, timeout: float) -> tuple[int | None, str]:
        """Run a script on all ranks; return its status, None for one that still runs, and what it printed."""
        self.count += 1
        already = self.printed.stat().st_size
        command = json.dumps([self.count, str(folder), script, words]) + "\n"
        for pipe in self.pipes:
            os.write(pipe, command.encode())
        end, status = time.monotonic() + timeout, None
        while status is None and time.monotonic() < end:
            time.sleep(0.01)
            ended = self.process.poll()
            through = [self.folder / f"{self.count}-{rank}" for rank in range(self.ranks)]
            status = max(int(file.read_text()) for file in through) if all(f.exists() for f in through) else ended
        return status, self.output(already)

    def output(self, begin: int = 0) -> str:
        """Read what the ranks printed, from a byte on."""
        return self.printed.read_bytes()[begin:].decode(errors="replace")

    def end(self) -> None:
        """Have the ranks end by themselves; kill what does not."""
        for pipe in self.pipes:
            os.close(pipe)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            kill_tree(self.process.pid)
            self.process.wait()
        shutil.rmtree(self.folder)


_standing: dict[tuple, Standing] = {}  # the one that was used last comes last


def stand(profile: Path, processes: int, env: dict[str, str]) -> Standing:
    """Return the launch of a layout under an environment; start it where it does not stand.

    Args:
        profile: the profile's file.
        processes: 0 for as many as the profile says.
    """
    ranks = processes or yaml.safe_load(profile.read_text())["num_processes"]
    place = str(_stand("source", 0, [sys.executable], env, "source").folder / "socket")
    return _stand(profile.read_text(), ranks, launcher_words(profile, processes, SERVER)[:-1], env, place)


def stand_warm(env: dict[str, str]) -> Standing:
    """Return the Python that has imported what recipes import, and forks a process for each command."""
    return _stand("fork", 1, [sys.executable], env, "fork")


def _stand(profile: str, ranks: int, head: list[str], env: dict[str, str], *how: str) -> Standing:
    """Return what stands of this kind, or start it, and end what was used longest ago."""
    env = {name: value for name, value in env.items() if name != "PYTEST_CURRENT_TEST"}
    key = (profile, ranks, frozenset(env.items()))
    found = _standing.pop(key, None)
    if found is None or found.process.poll() is not None:
        found = Standing(ranks, head, *how, env=env)
    while _standing and found.ranks + sum(each.ranks for each in _standing.values()) > RANKS:
        _standing.pop(next(iter(_standing))).end()
    _standing[key] = found
    return found


def end_all() -> None:
    """End all launches that stand."""
    while _standing:
        _standing.popitem()[1].end()
