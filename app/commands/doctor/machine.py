"""What this machine has: versions, devices, ports, limits, access to the Hub. Each check yields findings."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import app
from app.commands.doctor.findings import NOTE, OK, TROUBLE, Finding, look
from app.commands.output import size
from app.errors import MODULES, is_installed

LOCK = Path(app.__file__).parents[1] / "requirements.lock"
PACKAGES = ("torch", "accelerate", "transformers", "datasets")
_SECONDS = 5.0  # until the Hub must have answered
_NO_WAIT = "; HF_HUB_OFFLINE=1 saves the wait"
_FILES = 4096  # open at once in loading processes and trackers, with a margin
_SHARED = 1 << 30  # bytes that loading processes and NCCL need


def versions() -> Iterator[Finding]:
    """Say which Samestep this is, and compare the installed versions with those that its tests run on."""
    yield Finding("samestep", app.__version__)
    yield Finding("python", platform.python_version())
    locked = {}
    if LOCK.is_file():
        locked = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE))
    for name in PACKAGES:
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "not installed", TROUBLE, f"make setup, or pip install {name}")
            continue
        wanted = locked.get(name)
        same = wanted is None or installed.partition("+")[0] == wanted.partition("+")[0]
        fix = "" if same else f"tests ran on {wanted}"
        yield Finding(name, installed, "ok" if same else NOTE, fix)
    for module, package in MODULES.items():
        if package not in PACKAGES and not is_installed(module):
            yield Finding(package, "not installed", NOTE, f"if something asks for it: pip install {package}")


def devices() -> Iterator[Finding]:
    """List the GPUs and the CPU."""
    import torch

    if torch.cuda.is_available():
        version = driver()
        version = f", driver {version}" if version else ""
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            free, whole = torch.cuda.mem_get_info(index)
            text = f"{about.name}, {size(free)} of {size(whole)} free, CUDA {torch.version.cuda}{version}"
            busy = free < whole / 2
            fix = "another program holds most of it: see nvidia-smi" if busy else ""
            yield Finding(f"GPU {index}", text, NOTE if busy else "ok", fix)
    elif torch.backends.mps.is_available():
        yield Finding("MPS", "available, but without float64", NOTE, "use accelerate_configs/cpu.yaml")
    elif shutil.which("nvidia-smi"):
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch cannot start CUDA"
        fix = "install torch for CUDA (pytorch.org), or a driver for CUDA " + (torch.version.cuda or "12 or newer")
        yield Finding("GPU", f"nvidia-smi is installed, but {why}", NOTE, fix)
    else:
        yield Finding("GPU", "none", "ok", "")
    yield Finding("CPU", f"{processor()}, kernels {torch.backends.cpu.get_cpu_capability()}")


def driver() -> str:
    """Return the version of NVIDIA's driver; empty if nvidia-smi does not answer."""
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ""
    return lines[0].strip() if lines else ""


def processor() -> str:
    """Name the processor."""
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def backends() -> Iterator[Finding]:
    """Tell which libraries ranks can communicate through."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("gloo", "not in this torch", TROUBLE, "install torch from pytorch.org: ranks on CPU need gloo")
    else:
        yield Finding("gloo", "available")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if dist.is_available() and dist.is_nccl_available():
        yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    elif gpus > 1:
        yield Finding("NCCL", f"not in this torch, for {gpus} GPUs", TROUBLE, "install torch for CUDA from pytorch.org")
    else:
        yield Finding("NCCL", "not available, and not needed without several GPUs")


def port() -> Iterator[Finding]:
    """Open a port, as ranks do to find each other, and see whether the launcher's default port is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", 29500))
        except OSError:
            yield Finding(
                "port", f"{free} is free, 29500 is taken", NOTE, "accelerate launch --main_process_port 0 ..."
            )
            return
    yield Finding("port", "29500, the launcher's default, is free")


def cores() -> Iterator[Finding]:
    """Compare the cores of the machine with those that this process may use."""
    there = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    share = _quota()
    if share and share < usable:
        fix = f"--run.threads {max(1, int(share))} for one process, or raise the limit: more threads only wait"
        yield Finding("cores", f"{share:.3g} of {there} by the container's limit", NOTE, fix)
    elif usable < there:
        fix = "taskset, the scheduler or the container hides the others: allow them if they are yours"
        yield Finding("cores", f"{usable} of {there} usable", NOTE, fix)
    else:
        yield Finding("cores", f"{there}, all usable")


def _quota() -> float:
    """Return how many cores a Linux control group grants; 0 for no limit."""
    try:
        granted, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 0.0 if granted == "max" else int(granted) / int(period)
    except (OSError, ValueError):
        return 0.0


def limits() -> Iterator[Finding]:
    """Examine the limits on open files and on shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FILES
    fix = f"ulimit -n {_FILES} before a launch" if few else ""
    if few and hard != resource.RLIM_INFINITY and hard < _FILES:
        fix = f"have the administrator raise the hard limit ({hard}) to {_FILES}"
    yield Finding("open files", str(soft), NOTE if few else "ok", fix)
    if not Path("/dev/shm").is_dir():
        yield Finding("/dev/shm", "none", NOTE, "load data without worker processes: --run.workers 0")
        return
    whole, _, free = shutil.disk_usage("/dev/shm")
    small = free < _SHARED
    fix = "docker run --shm-size 8g, or --run.workers 0 (NCCL needs it too)" if small else ""
    yield Finding("/dev/shm", f"{size(free)} of {size(whole)} free", NOTE if small else "ok", fix)


def hub() -> Iterator[Finding]:
    """See whether the Hub answers. Without it, everything still works on local folders."""
    fix = "download elsewhere (hf download NAME --local-dir FOLDER) and give the folder to --model or --data.path"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        yield Finding("hub", "offline by HF_HUB_OFFLINE", NOTE, fix)
        return
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    # In addition to the request's own limit: looking up a name may take long.
    for finding in look("hub", lambda: _ask(address), 2 * _SECONDS):
        reached = finding.verdict == OK
        answer = finding.found if reached else f"{address} cannot be reached: {finding.found}"
        yield Finding("hub", answer, finding.verdict if reached else NOTE, "" if reached else f"{fix}{_NO_WAIT}")


def _ask(address: str) -> Iterator[Finding]:
    request = urllib.request.Request(f"{address}/api/models?limit=1", headers={"User-Agent": "samestep"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        yield Finding("hub", f"{address} answers ({answer.status})")
