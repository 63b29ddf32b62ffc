"""Slurm: a batch script, with a launcher on each node."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.commands.submit.engine import Engine, advice, called, watching
from app.commands.submit.job import Job
from app.commands.submit.job_file import FOLDER, TEMPLATES, in_shell
from app.errors import UserError
from app.launching import program

if TYPE_CHECKING:
    from app.commands.submit.command import Options

_WAITS_OR_RUNS = "PENDING,CONFIGURING,RUNNING,SUSPENDED,REQUEUED,RESIZING,SIGNALING,STAGE_OUT,STOPPED"


class Fields(NamedTuple):
    """What a template for Slurm may name."""

    name: str
    nodes: int
    processes: int
    log: str
    options: str
    """Lines of #SBATCH."""
    folder: str
    """The one in which the command was typed."""
    python: str
    launch: str
    training: str


class Slurm(Engine):
    """Slurm, by sbatch."""

    client = "sbatch"
    suffix = ".sbatch"
    template = TEMPLATES / "slurm.sbatch"
    options = ("options",)

    def job_name(self, text: str) -> str:
        """Keep letters, digits, dots, dashes and underscores."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-") or "run"

    def fields(self, job: Job, options: "Options") -> NamedTuple:
        """Name the profile and Python by their files, which all nodes see."""
        gpus = [f"#SBATCH --gpus-per-node={job.gpus}"] if job.gpus else []
        return Fields(
            job.name,
            job.nodes,
            job.processes,
            f"{FOLDER}/{job.name}-%j.log",
            "\n".join([*gpus, *map(_sbatch, options.options)]),
            in_shell([os.getcwd()]),
            in_shell([sys.executable]),
            in_shell(job.launch(_program(), str(job.profile.file.resolve()))),
            in_shell(job.training),
        )

    def examined(self, file: Path) -> str:
        """Ask sbatch when it would start."""
        if not self.is_here:
            return ""
        return " ".join(called(["sbatch", "--test-only", str(file)]).split()) + "\nnothing is submitted (--dry-run)"

    def submit(self, file: Path, job: Job) -> str:
        """Submit it with sbatch, unless a job of this name waits or runs that was submitted in this folder."""
        words = ["sbatch", str(file)]
        if not self.is_here:
            return self.by_hand(file, words)
        number = _there(job.name)
        said = f"job {number} is there already"
        if not number:
            number = called(["sbatch", "--parsable", str(file)]).strip().partition(";")[0]
            said = f"submitted as job {number}"
        log = shlex.quote(f"{FOLDER}/{job.name}-{number}.log")
        watch = [f"squeue --jobs {number}", f"tail -f {log}", watching(job.run)]
        return f"{said}\n{advice(watch, f'scancel {number}')}"


def _there(name: str) -> str:
    """Return the number of the job of a name that waits or runs and was submitted in this folder; empty if none is."""
    words = ["squeue", "--noheader", "--me", f"--name={name}", f"--states={_WAITS_OR_RUNS}", "--format=%i %Z"]
    lines = [line.strip().partition(" ") for line in called(words).splitlines()]
    return next((number for number, _, folder in lines if folder == os.getcwd()), "")


def _program() -> list[str]:
    """Return the words that start this program on a node, whatever its PATH."""
    beside = Path(sys.executable).with_name(program.name())
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", "app"]


def _sbatch(option: str) -> str:
    """Return the line of a job file for an option of sbatch.

    Raises:
        UserError: it is none.
    """
    name, equals, value = option.partition("=")
    if not re.fullmatch(r"[a-z][a-z-]+", name) or not value.isprintable():
        raise UserError(f"--options {option}: give options of sbatch as NAME=VALUE, such as partition=gpu")
    if value and not re.fullmatch(r"[\w@%+=:,./&|!*\[\]()-]+", value):
        quoted = re.sub(r'(["\\])', r"\\\1", value)
        value = f'"{quoted}"'
    return f"#SBATCH --{name}{equals}{value}"
