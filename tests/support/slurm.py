"""A Slurm of two nodes on this machine, by its own daemons: jobs wait, run, are requeued, and lose a node.

Needs Debian's slurm-wlm and munge, and root.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.launching.launcher import kill
from support.launching import environment

NODES = ("n1", "n2")
# Nodes share this machine, each with a port of its own. Without systemd and cgroups, processes are found by their
# parents. A lost node is given up after 10 s; a task has 20 s between SIGTERM and SIGKILL.
CONF = """
ClusterName=samestep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=20
SlurmdTimeout=10
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The cluster; its files are in a folder whose path is short enough for a socket."""

    def __init__(self, folder: Path):
        """Write its configuration; nothing is started yet."""
        self.folder, self._daemons = folder, {}
        sockets = [socket.socket() for _ in range(len(NODES) + 1)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        host = socket.gethostname()
        text = CONF.format(host=host, port=ports[0], folder=folder)
        for node, port in zip(NODES, ports[1:], strict=True):
            text += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=4000\n"
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are idle."""
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        self._start("munged", "--foreground", "--force", *(f"--{flag}={self.folder / n}" for flag, n in files.items()))
        self.wait_for((self.folder / "munge.socket").exists)
        self._start("slurmctld", "-D")
        for node in NODES:
            self.back(node)
        self.wait_for(lambda: self.type("sinfo", "-h", "-o", "%T %D") == f"idle {len(NODES)}")

    def _start(self, *words: str, name: str = "") -> None:
        log = (self.folder / f"{name or words[0]}.out").open("ab")
        variables = environment(self.variables)
        with log:
            self._daemons[name or words[0]] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True
            )

    def back(self, node: str) -> None:
        """Start a node."""
        self._start("slurmd", "-D", "-N", node, name=node)

    def lose(self, node: str) -> None:
        """Kill a node's daemon with all its jobs, none of which gets a word out."""
        kill(self._of(node))

    def _of(self, node: str) -> list[psutil.Process]:
        """List the daemons of a node and of its steps, which have its log open, with all that they have started."""
        log, found = str(self.folder / f"slurmd.{node}.log"), []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if process.name() in ("slurmd", "slurmstepd") and log in (file.path for file in process.open_files()):
                    found += [process, *process.children(recursive=True)]
        return found

    def type(self, *words: str, **more: str) -> str:
        """Type a command of Slurm's that must succeed, and return what it prints."""
        done = subprocess.run(
            words, env=environment({**self.variables, **more}), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING."""
        fields = self.type("scontrol", "--oneliner", "show", "job", job).split()
        return next(field.partition("=")[2] for field in fields if field.startswith("JobState="))

    def wait_for(self, there: Callable[[], object], seconds: float = 30) -> None:
        """Wait until something is there."""
        end = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        """Return the ends of what the daemons have written."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-1500:]}" for file in files)

    def stop(self) -> None:
        """End all jobs and daemons."""
        for node in NODES:
            self.lose(node)
        for daemon in self._daemons.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


@contextlib.contextmanager
def slurm() -> Iterator[Slurm]:
    """Run a cluster."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    if missing or os.getuid():
        pytest.skip("needs Slurm: as root, apt-get install slurm-wlm munge")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
