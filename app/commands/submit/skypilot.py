"""SkyPilot: a managed job on spot machines of any cloud, which comes back when they are taken away."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.commands.submit.engine import Engine, advice, called, watching
from app.commands.submit.job import PORT, Job
from app.commands.submit.job_file import TEMPLATES, in_shell, in_yaml
from app.distributed.environment import PREEMPTED
from app.errors import UserError
from app.launching import program
from app.storage.addresses import address

if TYPE_CHECKING:
    from app.commands.submit.command import Options


class Fields(NamedTuple):
    """What a template for SkyPilot may name."""

    name: str
    nodes: int
    processes: int
    hardware: str
    """A line of resources."""
    preempted: int
    """The exit status of a run that has saved and left early."""
    folder: str
    setup: str
    port: int
    launch: str
    training: str


class SkyPilot(Engine):
    """SkyPilot, by sky."""

    client = "sky"
    suffix = ".skypilot.yaml"
    template = TEMPLATES / "skypilot.yaml"
    options = ("accelerators", "setup")

    def job_name(self, text: str) -> str:
        """Keep small letters, digits and dashes."""
        name = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")[:50].rstrip("-")
        return name if name and name[0].isalpha() else f"run-{name}".rstrip("-")

    def fields(self, job: Job, options: "Options") -> NamedTuple:
        """Name the profile and the recipe as the user did: the folder is copied to each machine."""
        if not address(job.run):
            raise UserError(
                f"--run.dir {job.run}: it would be lost with the machine: give a bucket, such as s3://bucket/runs/NAME"
            )
        if job.gpus and not re.fullmatch(r"[A-Za-z][\w.-]*", options.accelerators):
            raise UserError(f"--accelerators {options.accelerators}: name the kind of GPU alone, such as H100")
        for path in (str(job.recipe), *([job.given] if "/" in job.given else [])):
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise UserError(f"{path}: only the current folder is copied to the machines: give a path in it")
        gpus = f"accelerators: {in_yaml(f'{options.accelerators}:{job.gpus}')}"
        return Fields(
            job.name,
            job.nodes,
            job.processes,
            gpus if job.gpus else f'cpus: "{job.processes}+"',
            PREEMPTED,
            ".",
            in_yaml(options.setup),
            PORT,
            in_shell(job.launch(program.name().split(), job.given)),
            in_shell(job.training),
        )

    def submit(self, file: Path, job: Job) -> str:
        """Launch it with sky; a second job of a run ends by itself, because the first holds the run's folder."""
        words = ["sky", "jobs", "launch", "--yes", "--detach-run", "--name", job.name, str(file)]
        if not self.is_here:
            return self.by_hand(file, words)
        called(words)
        watch = ["sky jobs queue", f"sky jobs logs --name {job.name}", watching(job.run)]
        return f"submitted as {job.name}\n{advice(watch, f'sky jobs cancel --name {job.name}')}"
