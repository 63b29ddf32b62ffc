"""A scheduler: how it is told of a job, and how its own program is called."""

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.commands.submit.job import Job
from app.commands.submit.job_file import TEMPLATES
from app.errors import UserError, printable
from app.launching import program

if TYPE_CHECKING:
    from app.commands.submit.command import Options

_PATIENCE = 120.0  # seconds for an answer of a scheduler


class Engine:
    """A scheduler that takes job files."""

    client = ""
    """The program that submits."""
    suffix = ""
    """Of its job files."""
    template = TEMPLATES
    options: tuple[str, ...] = ()
    """Names of the options that are for it."""

    def job_name(self, text: str) -> str:
        """Return a text as a name that the scheduler allows; one that it allows stays as it is."""
        raise NotImplementedError

    def fields(self, job: Job, options: "Options") -> NamedTuple:
        """Return what a template may name, each as it stands in the file: quoted.

        Raises:
            UserError: an option is wrong or missing, or the run's folder would be lost.
        """
        raise NotImplementedError

    def examined(self, file: Path) -> str:
        """Have the scheduler look at a job file without taking it, and return its answer; empty if it cannot be asked.

        Raises:
            UserError: it refuses it.
        """
        return ""

    def submit(self, file: Path, job: Job) -> str:
        """Submit a job file unless its job is there already; return how to watch and stop the job.

        Raises:
            UserError: the scheduler refuses it.
        """
        raise NotImplementedError

    def by_hand(self, file: Path, words: list[str]) -> str:
        """Say how to submit a file where the scheduler's program is."""
        return f"there is no {self.client} here: where it is, type {shlex.join(words)}"

    @property
    def is_here(self) -> bool:
        """Tell whether the scheduler's program is on this machine."""
        return shutil.which(self.client) is not None


def called(words: list[str]) -> str:
    """Run a scheduler's program, and return what it prints.

    Raises:
        UserError: it fails; the message is its own.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise UserError(f"{words[0]} has not answered for {_PATIENCE:.0f} s; is its server there?") from None
    except OSError as error:
        raise UserError(f"{words[0]}: {error.strerror}") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it does not say why"]
        raise UserError(f"{shlex.join(words[:2])} refuses: {printable(lines[-1])}")
    return f"{done.stdout}\n{done.stderr}" if not done.stdout.strip() else done.stdout


def advice(watch: list[str], stop: str) -> str:
    """Return how to watch a job, how to stop it, and how to go on with its run."""
    lines = [f"watch it    {watch[0]}", *(f"            {each}" for each in watch[1:])]
    return "\n".join([*lines, f"stop it     {stop}", "go on       repeat this command: the run goes on where it was"])


def watching(run: str) -> str:
    """Return the command that shows a run."""
    return program.typed(f"watch {shlex.quote(run)}")
