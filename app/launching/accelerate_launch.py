"""`accelerate launch` in this process: accelerate's own code, without what it adds to the output of a run.

accelerate's own command ends with a traceback of the launcher and status 1 when a run fails, stops ranks by SIGTERM at
Ctrl-C and kills them 30 seconds later, saved or not, and takes port 29500 for every launch.
"""

import logging
import os
import signal
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from types import FrameType

import psutil

from app.distributed.environment import OUTCOME, PREEMPTED
from app.launching.launcher import environment
from app.launching.profiles import Profile

# Signals that torch's launcher answers with SIGTERM to its ranks, and SIGKILL after 30 seconds. A run listens to none.
_OF_TORCH = "SIGQUIT"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Exit statuses that need no message: the run has said why it ended, or somebody has ended it.
_SAID = (2, 128 + signal.SIGINT, 128 + signal.SIGTERM)


def usual_profile() -> str:
    """Choose the profile of a launch that names none: all GPUs of this machine, or its CPU."""
    from app.distributed.environment import gpus_here

    count = gpus_here()
    return f"ddp:{count}" if count > 1 else ("gpu" if count else "cpu")


def launch(profile: Profile, words: list[str]) -> int:
    """Start a script's processes under a profile, and return the status of the first one that failed, or 0.

    One process takes the place of this one, so then this function does not return.

    Args:
        words: options of `accelerate launch`, the script, and its flags.

    Raises:
        UserError: nothing, or not this machine, can train under the profile.
    """
    from accelerate.commands.launch import launch_command_parser

    from app.distributed import accelerate_patches
    from app.distributed.environment import LAUNCHER, check_gpus

    profile.check()
    alone = profile.machines == 1
    if profile.on_cpu:  # accelerate 1.15 does not pass `use_cpu` on to processes that torchrun starts
        os.environ["ACCELERATE_USE_CPU"] = "true"
    else:
        check_gpus(profile.processes // profile.machines)
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.update(environment())
    head = ["--config_file", str(profile.file), "--num_processes", str(profile.processes)]
    arguments = launch_command_parser().parse_args([*head, *(["--main_process_port", "0"] if alone else []), *words])
    if not profile.wrapping and alone:
        _become(accelerate_patches.complete(arguments))
    return _start_all(arguments)


def _become(arguments: Namespace) -> None:
    """Replace this process by the script's: signals, the terminal and the status are then the run's own."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    command, of_script = prepare_simple_launcher_cmd_env(arguments)
    sys.stdout.flush()
    os.execve(command[0], command, of_script)


class _Stopped(BaseException):
    """Raised where torch's launcher would start ranks again that a signal has ended."""


class _Signals:
    """The signals that were passed on to the ranks."""

    def __init__(self):
        self.first = 0
        self._ranks: set[psutil.Process] = set()

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to all ranks, which end by themselves; end if there are none yet."""
        ranks = psutil.Process().children()
        if not ranks:
            sys.exit(128 + number)
        if not self.first:
            self.first, self._ranks = number, set(ranks)
            signal.signal(signal.SIGALRM, self._look)
            signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        for rank in ranks:
            # Before a run listens, SIGINT would make Python print where it is; SIGTERM ends it without a word.
            rank.send_signal(number if _listens(rank.pid) else signal.SIGTERM)

    def _look(self, number: int, frame: FrameType | None) -> None:
        if not self._ranks.issuperset(psutil.Process().children()):
            raise _Stopped


def _listens(pid: int) -> bool:
    """Tell whether a run in a process has its own handlers, by SIGUSR1, which nothing else handles."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) & 1 << signal.SIGUSR1 - 1)


def _start_all(arguments: Namespace) -> int:
    """Start the ranks, pass signals on to them, and return their status."""
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments.signals_to_handle = _OF_TORCH
    # It writes what becomes of each rank when one has failed.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    signals = _Signals()
    scratch = tempfile.TemporaryDirectory(prefix="samestep-")
    outcome = Path(scratch.name, "outcome")
    os.environ[OUTCOME] = str(outcome)
    before = {number: signal.signal(number, signals.pass_on) for number in _PASSED_ON}
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return 128 + signals.first if signals.first and failure.exitcode < 0 else _told(rank, failure.exitcode)
    except _Stopped:
        return 128 + signals.first
    except SignalException as ended:
        return 128 + ended.sigval
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        told = outcome.read_text() if outcome.exists() else ""
        scratch.cleanup()
    return PREEMPTED if told else 0


def _told(rank: int, status: int) -> int:
    """Say which rank failed, if it could not say so itself; return the status as shells do.

    Args:
        status: the number of a signal, negative, if one ended the rank.
    """
    number, status = -status, status if status >= 0 else 128 - status
    if number > 0 and status not in _SAID:
        memory = ": the machine may have run out of memory" if number == signal.SIGKILL else ""
        print(f"error: rank {rank} was ended by {signal.Signals(number).name}{memory}", file=sys.stderr)
    elif status not in _SAID:
        print(f"error: rank {rank} ended with status {status}; its messages are above", file=sys.stderr)
    return status
