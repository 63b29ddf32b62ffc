"""What a process knows of its launcher, before any Accelerator exists."""

import atexit
import logging
import os
import sys
from typing import Any, NamedTuple

from app.errors import UserError


def is_main_process() -> bool:
    """Tell whether this process is the one that speaks."""
    return int(os.environ.get("RANK", "0")) == 0


def local_world_size() -> int:
    """Count the training processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_per_process() -> int:
    """Share this machine's cores among its training processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size())


class Profile(NamedTuple):
    """A profile, and whether it was named on the command line; otherwise it is the user's saved default."""

    settings: Any
    named: bool


def launcher_profile() -> Profile | None:
    """Read the profile that `accelerate launch` was given; None where there is none to find.

    accelerate 1.15 does not pass `use_cpu` on to processes started through torchrun, so a rank reads it from the
    file that its parent was started with.
    """
    import psutil
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    try:
        command = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return None
    names = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "launch.py")
    if not any(os.path.basename(word) in names for word in command):
        return None
    path, named = default_config_file, False
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word in ("--config_file", "--config-file"):
            path, named = following, True
        elif word.startswith(("--config_file=", "--config-file=")):
            path, named = word.partition("=")[2], True
    return Profile(load_config_from_file(path), named) if os.path.isfile(path) else None


# Set where all has gone well and nothing but the interpreter's own end is left to do.
leave_at_once = False


def _leave() -> None:
    """Skip the end of the interpreter: gloo's threads (torch 2.13) now and then abort in it, and the launcher fails.

    A status that the program gives to sys.exit after its run is lost with it.
    """
    if leave_at_once:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def report_user_errors() -> None:
    """Make a UserError that nobody catches end this process with its message alone and status 2; Ctrl-C with 130."""
    previous = sys.excepthook
    atexit.register(_leave)  # before torch and the others register theirs, so it comes last

    def hook(kind, error, traceback):
        global leave_at_once
        leave_at_once = False
        if issubclass(kind, KeyboardInterrupt):
            raise SystemExit(130)
        if not isinstance(error, UserError):
            return previous(kind, error, traceback)
        # Before the ranks know of each other, the first one of each machine speaks.
        if getattr(error, "audible", int(os.environ.get("LOCAL_RANK", "0")) == 0):
            # torch's own hook around this one holds sys.stderr back, and loses it when this one ends the process.
            print(f"error: {error}", file=sys.__stderr__, flush=True)
        raise SystemExit(2)

    sys.excepthook = hook
