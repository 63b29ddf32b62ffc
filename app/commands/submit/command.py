"""Hand a run to Slurm, Kubernetes or SkyPilot: write its job file, check it, and submit it.

    python -m app submit slurm recipes/cls.py --profile ddp --nodes 2 --run.dir /shared/runs/cls
    python -m app submit slurm recipes/cls.py --profile ddp --options partition=gpu time=12:00:00 --dry-run
    python -m app submit kubernetes recipes/cls.py --profile ddp --image lab/train --secret s3 --run.dir s3://lab/cls
    python -m app submit skypilot recipes/cls.py --profile ddp --accelerators H100 --run.dir s3://bucket/runs/cls

The flags of the recipe may follow. They are read as the run would read them, before anything is written. The job file
goes into the folder jobs/ here, and the engine's own program submits it: sbatch, kubectl or sky. Where that is missing,
carry the file to a machine that has it. A job that is stopped comes back and goes on with its run. So does a job that
you submit again by repeating the command. The exit status is 0 if the job is submitted or already there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from app.errors import UserError, did_you_mean, printable
from app.launching import program


@dataclass
class Options:
    """What to submit, where, and on how many machines."""

    engine: Annotated[str, tyro.conf.Positional]
    """slurm, kubernetes or skypilot."""
    recipe: Annotated[Path, tyro.conf.Positional]
    """The recipe's file. For kubernetes, its path in the image too."""
    profile: str = ""
    """Profile of each machine: a file, or a name such as ddp. FILE:4 starts 4 processes on each, whatever the file
    says; a profile for several machines is divided among them."""
    nodes: int = 1
    """Number of machines."""
    name: str = ""
    """Name of the job. Default: that of the run's folder."""
    template: str = ""
    """A job file of your own to fill in, in the place of the engine's. Copy that one first: its head says where it is,
    and what {{words}} it may have."""
    options: tuple[str, ...] = ()
    """For slurm: options of sbatch, without dashes, such as partition=gpu time=12:00:00 exclusive. They win over those
    of the template."""
    image: str = ""
    """For kubernetes: the container image. It has this project's packages, and the recipe in its working directory."""
    volume: str = ""
    """For kubernetes: a PersistentVolumeClaim and where it is mounted, such as runs:/runs, for a run folder on a
    disk. A folder in a bucket needs none."""
    secret: str = ""
    """For kubernetes: a Secret whose fields become environment variables, such as the keys of a bucket."""
    accelerators: str = ""
    """For skypilot: the kind of GPU, such as H100. Their number is the profile's."""
    setup: str = "python -m pip install --quiet '.[buckets]'"
    """For skypilot: the command that prepares each machine, in a copy of the current folder."""
    dry_run: bool = False
    """Write and check the job file, and submit nothing."""


def main(options: Options, flags: list[str]) -> int:
    """Write, check and submit; return the exit status.

    Args:
        flags: of the recipe.

    Raises:
        UserError: an option, a flag or the profile is wrong, the run folder cannot be kept, or the engine refuses.
    """
    from app.commands.submit import engines, job_file
    from app.commands.submit.job import described

    if options.engine not in engines.BY_NAME:
        names = ", ".join(engines.BY_NAME)
        raise UserError(f"{options.engine}: give one of {names}{did_you_mean(options.engine, engines.BY_NAME)}")
    engine = engines.BY_NAME[options.engine]
    engines.check_options(engine, options)
    job = described(options, flags, engine.job_name)
    text = job_file.filled(Path(options.template) if options.template else engine.template, engine.fields(job, options))
    file = job_file.write(text, f"{job.name}{engine.suffix}", job.run)
    profile = job.profile
    each = f"{job.nodes} x {job.processes} processes" if job.nodes > 1 else profile.in_short
    print(f"{file}: {each}, {profile.precision}, for the run in {printable(job.run)}")
    if options.dry_run:
        words = ["plan", job.training[0], "--profile", f"{job.given}:{profile.processes}", *flags]
        print(f"what it will be: {program.typed(job_file.in_shell(words))}")
        print(engine.examined(file) or "nothing is submitted (--dry-run)")
        return 0
    print(engine.submit(file, job))
    return 0
