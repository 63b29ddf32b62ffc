"""Starting a recipe under `accelerate launch` from another program, and ending all processes that it starts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from app.distributed.environment import plain_thread_counts


def launcher_words(profile: Path, processes: int, script: Path, *flags: str) -> list[str]:
    """Return the command that starts a script under a profile, on a free port.

    Args:
        processes: their number; 0: as many as the profile says.
    """
    count = ["--num_processes", str(processes)] if processes else []
    head = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(profile), *count]
    return [*head, "--main_process_port", "0", str(script), *flags]


def environment() -> dict[str, str]:
    """Return this process's environment with OMP_NUM_THREADS set, without which the launcher warns that it sets it.

    Its value does not matter: every run shares the cores among its processes.
    """
    plain_thread_counts()
    return {"OMP_NUM_THREADS": "1", **os.environ}


class Stalled(Exception):
    """Raised for a command that made no progress for too long."""


def run(words: list[str], output: Path, moved: Callable[[], object], patience: float) -> int:
    """Run a command with its output in a file. However this call ends, all processes of the command end with it.

    Args:
        moved: called twice a second, and once more when the command has ended; it returns another value when the
            command has made progress.
        patience: seconds that may pass without progress.

    Returns:
        The command's exit status.

    Raises:
        Stalled: there was no progress for that long.
    """
    # A signal must end the launch too. It is only noted here, as it may come while the command is being started.
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(143))
    processes: set[psutil.Process] = set()
    process: subprocess.Popen | None = None
    try:
        with output.open("wb") as file:
            process = subprocess.Popen(words, stdout=file, stderr=file, env=environment(), start_new_session=True)
        seen, since = None, time.monotonic()
        while True:
            try:
                status = process.wait(0.5)
                moved()
                return status
            except subprocess.TimeoutExpired:
                processes.update(family(process.pid))
                now = moved()
            if asked:
                sys.exit(asked[0])
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > patience:
                raise Stalled
    finally:
        kill(processes.union(family(process.pid) if process else ()))
        signal.signal(signal.SIGTERM, before)


def family(pid: int) -> list[psutil.Process]:
    """List a process and its descendants. A process group would not do: torchrun gives each rank its own session."""
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    kill(family(pid))


def kill(members: Iterable[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone."""
    members = list(members)
    for member in members:
        with suppress(psutil.NoSuchProcess):  # psutil checks that the number is not another process's by now
            member.kill()
    psutil.wait_procs(members, timeout=10)
