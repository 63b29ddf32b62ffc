"""Start a recipe from a notebook under any profile, in processes of its own."""

import json
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from app.launching import profiles
from app.launching.launcher import environment, kill_tree, words_of

_WORKER = Path(__file__).with_name("worker.py")


def launch(main: Callable[[Any], Any], config: Any, profile: str, processes: int = 0) -> Any:
    """Run main(config) as `accelerate launch` would under a profile, and return what it returns on the main process.

    The processes are new ones: what is defined in cells travels to them by value, a GPU that the notebook has used is
    no hindrance, and nothing that they change comes back but the run folder. Interrupting the cell stops the run behind
    the step that it is in, with a checkpoint; the next call, or the same config anywhere else, goes on from there.

    Args:
        main: a recipe's, or one of your own.
        profile: a file, or the name of one in accelerate_configs, such as ddp_cpu.
        processes: instead of those that the profile says.

    Raises:
        UserError: there is no such profile.
        RuntimeError: a process failed; what it said stands above.
    """
    import cloudpickle

    file = profiles.find(str(profile))
    profiles.read(str(file))  # refuses what is none
    with tempfile.TemporaryDirectory(prefix="samestep-") as name:
        folder = Path(name)
        (folder / "path.json").write_text(json.dumps(sys.path))
        (folder / "job").write_bytes(cloudpickle.dumps((main, config)))
        status = _follow(words_of(file, processes, _WORKER, str(folder)))
        if status:
            raise RuntimeError(f"the launch ended with status {status}; what went wrong stands above")
        return pickle.loads((folder / "result").read_bytes())


def _follow(words: list[str]) -> int:
    """Run a command, printing what it prints as it comes; an interrupt asks its processes to stop."""
    process = subprocess.Popen(
        words,
        env={"PYTHONUNBUFFERED": "1", **environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        try:
            _print_all(process)
        except KeyboardInterrupt:
            with suppress(psutil.NoSuchProcess):
                launcher = psutil.Process(process.pid)
                for member in launcher.children() or [launcher]:  # which has not come to start any
                    member.send_signal(signal.SIGTERM)
            _print_all(process)
            process.wait()
            raise
        return process.wait()
    finally:
        kill_tree(process.pid)


def _print_all(process: subprocess.Popen) -> None:
    for line in process.stdout:
        print(line, end="", flush=True)
