"""What a process knows about its launcher and its machine, before there is an Accelerator."""

import atexit
import builtins
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from app.errors import UserError, mendable, printable

if TYPE_CHECKING:
    import torch

# What launchers set for each process, and torch needs to let them meet.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_main_process() -> bool:
    """Tell whether this is the main process, which prints for all."""
    return int(os.environ.get("RANK", "0")) == 0


def local_rank() -> int:
    """Return this process's number among the training processes of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Count the training processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def world_size() -> int:
    """Return the number of processes on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def cores_per_process() -> int:
    """Return the number of cores for each training process of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size())


def plain_thread_counts() -> None:
    """Have environment variables of threads hold a number or nothing, as accelerate's launcher and its state need.

    OpenMP also takes a list, of which the first number is for the outermost level, the only one here.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if (said := os.environ.get(name)) is None:
            continue
        first = said.partition(",")[0].strip()
        if first.isascii() and first.isdigit():
            os.environ[name] = first
        elif not first:
            del os.environ[name]
        else:
            raise UserError(f"{name}={said}: give the number of threads, for example {name}=1, or leave it out")


def check_ranks() -> None:
    """Refuse an environment with a part of what a launcher tells each process: of a cluster, or left from another run.

    Raises:
        UserError: it names what is there, and what is not.
    """
    alone = os.environ.get("WORLD_SIZE", "1") == "1" and "LOCAL_RANK" not in os.environ
    missing = [name for name in RANK_VARIABLES if name not in os.environ]
    if alone or not missing:
        return
    there = ", ".join(f"{name}={os.environ[name]}" for name in RANK_VARIABLES if name in os.environ)
    raise UserError(
        f"the environment has {there}, as a launcher sets it for each process, and no {', '.join(missing)}: start the "
        "recipe with accelerate launch, or unset the former to train in one process"
    )


def gpus_here() -> int:
    """Count the GPUs. Apple's do not count: they have no float64, in which sums over processes are exact."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return 0 if device is None or device.type == "mps" else torch.accelerator.device_count()


def check_gpus(wanted: int) -> None:
    """Refuse a profile that asks for more GPUs than this machine has.

    Args:
        wanted: processes on this machine, with a GPU for each.

    Raises:
        UserError: it has too few, or none.
    """
    here = gpus_here()
    if here and wanted > here:
        raise UserError(
            f"the profile starts {wanted} processes on this machine, which has {here} GPUs: start {here} "
            f"(--num_processes {here} of accelerate launch, ddp:{here} of samestep launch), or use a profile for CPU "
            "such as accelerate_configs/ddp_cpu.yaml"
        )
    if not here:
        raise UserError(
            f"the profile wants a GPU for each of {wanted} processes here, and this machine has no GPU: use a profile "
            "for CPU such as accelerate_configs/cpu.yaml, ddp_cpu.yaml or fsdp_cpu.yaml"
        )


def take_gpu() -> "torch.device | None":
    """Select this process's own GPU before any is used: the first use of a GPU creates a context on it.

    accelerate 1.15 selects it too, but only after it has joined the process group. Returns the device; None if the
    launcher started one process alone.
    """
    import torch

    kind = torch.accelerator.current_accelerator()
    if "LOCAL_RANK" not in os.environ or kind is None:
        return None
    device = torch.device(kind.type, local_rank() % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def in_notebook() -> bool:
    """Tell whether this process is a notebook's, or an interactive IPython."""
    return hasattr(builtins, "__IPYTHON__")


def in_kernel() -> bool:
    """Tell whether this process is the kernel of a notebook, whose output is a page and not a terminal."""
    return hasattr(getattr(builtins, "get_ipython", lambda: None)(), "kernel")


def below_kernel() -> bool:
    """Tell whether the kernel of a notebook, or a command of its `!` cells, started this process."""
    return "JPY_PARENT_PID" in os.environ  # set by jupyter_client


def this_process() -> str:
    """Return a name for this process that no later one on this machine can have: its number and its start."""
    return f"{os.getpid()} {_began(os.getpid())}"


def is_alive(process: str) -> bool:
    """Tell whether a process of this machine, as named by `this_process`, still runs."""
    number, began = process.split()
    return _began(int(number)) == began


def was_here(process: str) -> bool:
    """Tell whether a process, as named by `this_process`, began on this machine since its last boot.

    The host's name does not tell: several containers and machines may have the same name.
    """
    machine = process.split()[1].rpartition(".")[0]
    return not sys.platform.startswith("linux") or (bool(machine) and machine == _machine())


def _machine() -> str:
    """Identify this boot of this machine and this container on it; empty if the system hides that."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _began(number: int) -> str:
    """Return when a process began, by a clock that cannot be set; empty if there is no such process."""
    if sys.platform.startswith("linux"):
        # psutil's time changes when the clock is set. After the name, the 1st field is the state, the 20th the start.
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
    """Have NCCL record its last collectives, and write them to a file when one takes too long."""
    for name, value in {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}.items():
        os.environ.setdefault(name, value)


def choose_network() -> None:
    """Have gloo use the network interface that leads to the main process.

    By default it uses the one of this machine's name, which is often the loopback.
    """
    if os.environ.get("WORLD_SIZE", "1") == str(local_world_size()) or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    import psutil

    main = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    family, kind, _, _, address = socket.getaddrinfo(*main, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # nothing is sent
        local_address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if local_address in (each.address.partition("%")[0] for each in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def is_on(name: str) -> bool:
    """Tell whether an environment variable of a launcher switches something on: true or 1, however it is written."""
    return os.environ.get(name, "").lower() in ("true", "1")


def leave_with_launcher() -> None:
    """Have Linux end this process when its launcher is killed: torchrun gives each rank a session of its own.

    A process that `accelerate launch` runs alone gets SIGTERM, so that it can save: its launcher does not pass signals
    on. torchrun does, so its ranks are killed at once.
    """
    import psutil

    if not sys.platform.startswith("linux"):
        return
    ours = os.environ.get(LAUNCHER)
    if ours == str(os.getpid()):  # the launcher has become this process
        return
    number = signal.SIGKILL if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIGTERM
    if _launcher_command() is not None or ours == str(os.getppid()):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, number)
    # An orphan with a launcher's environment: its launcher was killed before this line was reached.
    if os.getppid() == 1 and ours != "1" and _launcher_command() is None and _LAUNCHED in psutil.Process().environ():
        os.kill(os.getpid(), number)


def _launcher_command() -> list[str] | None:
    """Return the command line of this process's parent, if that is an `accelerate launch`."""
    import psutil

    try:
        command = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return None
    names = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "launch.py")
    return command if any(os.path.basename(word) in names for word in command) else None


class LauncherProfile(NamedTuple):
    """The launcher's profile, and whether the command line named it; otherwise it is the user's saved default."""

    settings: Any
    named: bool


def launcher_profile() -> LauncherProfile | None:
    """Read the profile that `accelerate launch` was given; None if there is none.

    accelerate 1.15 does not pass `use_cpu` on to processes that torchrun starts, so a rank reads it from the file that
    is named on its parent's command line.
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
    return LauncherProfile(load_config_from_file(path), named) if os.path.isfile(path) else None


SILENCE = 10.0  # seconds that a process waits which has an error and leaves its message to another one
LAUNCHER = "SAMESTEP_LAUNCHER"
"""Environment variable with the process number of the launcher, where that is `python -m app launch`."""
_LAUNCHED = "ACCELERATE_MIXED_PRECISION"  # accelerate's launcher gives it to every process
OUTCOME = "SAMESTEP_OUTCOME"
"""Environment variable with the file in which ranks tell such a launcher of several that their run was preempted."""
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, repeat the command


class _End:
    """The end of this process. There is one object of it, because a process ends once."""

    def __init__(self) -> None:
        self.status: int | None = None
        """The exit status, set when only the interpreter's own end is left to do."""
        self.reports_user_errors = False
        """Whether `report_user_errors` was called."""

    def leave(self) -> None:
        """Skip the interpreter's end, in which threads of torch's C++ can abort (gloo's; one that saves, after Ctrl-C).

        A status that the program gives to sys.exit after its run is lost.
        """
        if self.status is not None:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)


end = _End()


def tell_preempted(preempted: bool) -> None:
    """Have this program end with status 75 if its last run was preempted, where no launcher takes that for a failure.

    torchrun and `accelerate launch` do: their ranks end with 0. Those of `samestep launch` tell it by a file.
    """
    if in_notebook():
        return
    outcome = os.environ.get(OUTCOME)
    if outcome and local_rank() == 0:
        with suppress(OSError):  # the launcher has gone
            Path(outcome).write_text("preempted" if preempted else "")
    ranks = "TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_RANK" in os.environ
    if preempted and not ranks and (os.environ.get(LAUNCHER) == str(os.getpid()) or _launcher_command() is None):
        end.status = PREEMPTED


def report_user_errors() -> None:
    """End this process with one message and status 2 at an uncaught error that the user can fix.

    Ctrl-C ends it with status 130. A notebook, or a prompt of Python, goes on after an error, and shows tracebacks.
    """
    if end.reports_user_errors or in_notebook() or hasattr(sys, "ps1"):
        return
    end.reports_user_errors = True
    previous = sys.excepthook
    atexit.register(end.leave)  # before torch and others register theirs, so that it runs last

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        end.status = 130 if issubclass(kind, KeyboardInterrupt) else None
        if issubclass(kind, KeyboardInterrupt):
            raise SystemExit(130)
        told = mendable(error)
        if told is None:
            return previous(kind, error, traceback)
        # Before ranks can communicate, the first one of each machine prints.
        if getattr(error, "audible", local_rank() == 0):
            # torch's own hook around this one buffers sys.stderr, and loses it when this one ends the process.
            with suppress(OSError):  # nobody reads it any more
                print(f"error: {printable(str(told), also=chr(10))}", file=sys.__stderr__, flush=True)
        elif not hasattr(error, "audible"):
            # The launcher ends all processes at the first end, and the one that prints may be slower.
            time.sleep(SILENCE)
        raise SystemExit(2)

    sys.excepthook = hook
