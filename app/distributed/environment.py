"""What a process knows of its launcher, before any Accelerator exists."""

import atexit
import builtins
import ctypes
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

from app.errors import mendable


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


def gpus_here() -> int:
    """Count the devices to train on. Apple's are none: they have no float64, in which sums over processes are exact."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return 0 if found is None or found.type == "mps" else torch.accelerator.device_count()


def take_gpu():
    """Have all that this process does on GPUs begin on its own one: the first use of any gives it a context there.

    accelerate 1.15 does so too, after it has joined the process group. Returns the device; None where the launcher
    started one process alone.
    """
    import torch

    if "LOCAL_RANK" not in os.environ:
        return None
    kind = torch.accelerator.current_accelerator().type
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def in_notebook() -> bool:
    """Tell whether this process is a notebook's, or an interactive IPython."""
    return hasattr(builtins, "__IPYTHON__")


def this_process() -> str:
    """Name this process so that no later one on this machine has the same name: its number and when it began."""
    return f"{os.getpid()} {_began(os.getpid())}"


def is_alive(process: str) -> bool:
    """Tell whether a process that `this_process` named on this machine still runs."""
    number, began = process.split()
    return _began(int(number)) == began


def was_here(process: str) -> bool:
    """Tell whether a process that `this_process` named began on this machine, since it was last started.

    The name of a host does not say it: several containers and machines may have the same one.
    """
    machine = process.split()[1].rpartition(".")[0]
    return not sys.platform.startswith("linux") or (bool(machine) and machine == _machine())


def _machine() -> str:
    """Tell this machine, and this container on it, from all others since it was started; nothing where it is hidden."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _began(number: int) -> str:
    """Tell when a process began, by a clock that nobody sets; nothing where there is none, or it has ended."""
    if sys.platform.startswith("linux"):
        # psutil's time moves when the machine's clock is set. Behind the name: the state first, the start as the 20th.
        try:
            state, *rest = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return ""
        return "" if state == b"Z" else f"{_machine()}.{rest[18].decode()}"
    import psutil

    try:
        there = psutil.Process(number)
        return "" if there.status() == psutil.STATUS_ZOMBIE else str(there.create_time())
    except psutil.Error:
        return ""


def record_collectives() -> None:
    """Have NCCL keep its last collectives and write them to a file when one of them takes too long."""
    for name, value in {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}.items():
        os.environ.setdefault(name, value)


def choose_network() -> None:
    """Have gloo reach other machines through the interface that leads to the main process.

    It would take the one that this machine's name stands for, which is often the loopback.
    """
    if os.environ.get("WORLD_SIZE", "1") == str(local_world_size()) or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    import psutil

    main = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    family, kind, _, _, address = socket.getaddrinfo(*main, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # nothing is sent
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own in (each.address.partition("%")[0] for each in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def leave_with_launcher() -> None:
    """Have Linux end this process when its launcher is killed: torchrun gives each rank a session of its own.

    A process that `accelerate launch` runs alone gets SIGTERM: the launcher hands none on, so that is how the child
    learns of it. Ranks of torchrun, which does, are killed at once.
    """
    import psutil

    if not sys.platform.startswith("linux"):
        return
    number = signal.SIGKILL if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIGTERM
    if _launcher_command() is not None:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, number)
    # An orphan that began with a launcher's environment: that was killed before this line was reached.
    if os.getppid() == 1 and _launcher_command() is None and _LAUNCHED in psutil.Process().environ():
        os.kill(os.getpid(), number)


def _launcher_command() -> list[str] | None:
    """Return the words of the `accelerate launch` that is this process's parent, if it is one."""
    import psutil

    try:
        command = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return None
    names = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "launch.py")
    return command if any(os.path.basename(word) in names for word in command) else None


class Profile(NamedTuple):
    """A profile, and whether it was named on the command line; otherwise it is the user's saved default."""

    settings: Any
    named: bool


def launcher_profile() -> Profile | None:
    """Read the profile that `accelerate launch` was given; None where there is none to find.

    accelerate 1.15 does not pass `use_cpu` on to processes started through torchrun, so a rank reads it from the
    file that its parent was started with.
    """
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    command = _launcher_command()
    if command is None:
        return None
    path, named = default_config_file, False
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word in ("--config_file", "--config-file"):
            path, named = following, True
        elif word.startswith(("--config_file=", "--config-file=")):
            path, named = word.partition("=")[2], True
    return Profile(load_config_from_file(path), named) if os.path.isfile(path) else None


_LAUNCHED = "ACCELERATE_MIXED_PRECISION"  # accelerate's launcher gives it to every process
# Set where nothing but the interpreter's own end is left to do: the status to leave with.
leave_with: int | None = None


def _leave() -> None:
    """Skip the end of the interpreter: threads in torch's C++ (gloo's; one that saves, after Ctrl-C) can abort in it.

    A status that the program gives to sys.exit after its run is lost with it.
    """
    if leave_with is not None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(leave_with)


def report_user_errors() -> None:
    """Make an error that is the user's to mend, and uncaught, end this process with its message and status 2.

    Ctrl-C ends it with 130.
    """
    previous = sys.excepthook
    atexit.register(_leave)  # before torch and the others register theirs, so it comes last

    def hook(kind, error, traceback):
        global leave_with
        leave_with = 130 if issubclass(kind, KeyboardInterrupt) else None
        if issubclass(kind, KeyboardInterrupt):
            raise SystemExit(130)
        told = mendable(error)
        if told is None:
            return previous(kind, error, traceback)
        # Before the ranks know of each other, the first one of each machine speaks.
        if getattr(error, "audible", int(os.environ.get("LOCAL_RANK", "0")) == 0):
            # torch's own hook around this one holds sys.stderr back, and loses it when this one ends the process.
            print(f"error: {told}", file=sys.__stderr__, flush=True)
        raise SystemExit(2)

    sys.excepthook = hook
