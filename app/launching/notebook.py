"""Starting a recipe from a notebook under any profile, in new processes."""

import dataclasses
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
from app.launching.launcher import environment, kill_tree, launcher_words

_WORKER = Path(__file__).with_name("worker.py")


def launch(main: Callable[[Any], Any], config: Any, profile: str, processes: int = 0) -> Any:
    """Run main(config) as `accelerate launch` would under a profile, and return what it returns on the main process.

    The processes are new. Functions and classes defined in cells are sent to them by value; the notebook may have used
    the GPU before; and only the run folder and the returned value come back. Interrupting the cell stops the run after
    its current step, with a checkpoint. The next call, or the same config anywhere else, resumes it.

    Args:
        main: of a recipe, or your own.
        config: its argument.
        profile: a file, or the name of one of ours, such as ddp_cpu; `ddp_cpu:3` starts three processes.
        processes: their number; 0: as many as the profile says.

    Raises:
        UserError: there is no such profile, or nothing can train under it.
        RuntimeError: a process failed; its output was printed.
    """
    import cloudpickle

    chosen = profiles.read(str(profile), flag="the profile")
    if processes:
        chosen = dataclasses.replace(chosen, processes=processes)
    chosen.check()
    with tempfile.TemporaryDirectory(prefix="samestep-") as name:
        folder = Path(name)
        (folder / "path.json").write_text(json.dumps(sys.path))
        (folder / "job").write_bytes(cloudpickle.dumps((main, config)))
        status = _follow(launcher_words(chosen.file, chosen.processes, _WORKER, str(folder)))
        if status:
            raise RuntimeError(f"the launch ended with status {status}; its output above says why")
        return pickle.loads((folder / "result").read_bytes())


def _follow(words: list[str]) -> int:
    """Run a command, and print its output as it comes; an interrupt asks its processes to stop."""
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
                for member in launcher.children() or [launcher]:  # it has not started any yet
                    member.send_signal(signal.SIGTERM)
            _print_all(process)
            process.wait()
            raise
        return process.wait()
    finally:
        kill_tree(process.pid)


def _print_all(process: subprocess.Popen) -> None:
    for line in process.stdout or ():
        print(line, end="", flush=True)
