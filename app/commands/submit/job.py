"""What is to be run: the words of its command, and what a scheduler must know of it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.errors import UserError

if TYPE_CHECKING:
    from app.commands.submit.command import Options
    from app.launching.profiles import Profile

# A job file lies about for others to read. A password before a host, and the signature of a signed address.
_SECRET = re.compile(r"://[^/?#\s]*:[^/?#\s]*@|[?&](sig|X-Amz-Signature|X-Goog-Signature|Signature)=", re.IGNORECASE)
PORT = 29500
"""Where machines meet that no other job shares; it is accelerate's and torch's own default."""


class Job(NamedTuple):
    """One run on machines of a scheduler."""

    name: str
    """Allowed by the scheduler."""
    run: str
    """The run's folder, or its URL, as the run itself says it."""
    recipe: Path
    flags: list[str]
    """Of the recipe."""
    profile: "Profile"
    """For all machines together."""
    given: str
    """The profile's name or file as the user gave it, without a number of processes."""
    nodes: int

    @property
    def processes(self) -> int:
        """Return the number of processes on each machine."""
        return self.profile.processes // self.nodes

    @property
    def gpus(self) -> int:
        """Return the number of GPUs on each machine."""
        return 0 if self.profile.on_cpu else self.processes

    def launch(self, program: list[str], profile: str) -> list[str]:
        """Return the words of the launcher on each machine, up to what tells the machines apart.

        Args:
            program: the words that start this program there.
            profile: its name or file there.
        """
        return [*program, "launch", f"{profile}:{self.profile.processes}", "--num_machines", str(self.nodes)]

    @property
    def training(self) -> list[str]:
        """Return the words after those of the launcher: the recipe and its flags."""
        return [str(self.recipe), *self.flags]


def described(options: "Options", flags: list[str], job_name: Callable[[str], str]) -> Job:
    """Return the job that options ask for; the recipe has read its flags by then, and loaded nothing.

    Args:
        job_name: makes a name that the scheduler allows of any text.

    Raises:
        UserError: an option or a flag is wrong, a word holds a secret, or the profile cannot train the run.
    """
    from app.commands import recipe_file
    from app.sampling.batch_plan import BatchPlan

    for word in flags:
        if _SECRET.search(word):  # the word is not shown
            raise UserError(
                f"a flag of {options.recipe} has a password or a signature in a URL, which job files do not keep: give "
                "it to the job in its environment"
            )
    profile = _profile(options)
    run = recipe_file.run_to_opening(options.recipe, flags)
    settings = run.config
    BatchPlan(1, 1, settings.global_batch, settings.micro_batch).accumulation(profile.data_ranks)
    folder = settings.dir or f"runs/{run.name}"
    name = options.name or job_name(Path(folder).name)
    if name != job_name(name):
        raise UserError(f"--name {name}: give letters, digits and dashes, such as {job_name(name)}")
    given, colon, count = options.profile.rpartition(":")
    given = given if colon and count.isdigit() else options.profile
    return Job(name, folder, options.recipe, flags, profile, given, options.nodes)


def _profile(options: "Options") -> "Profile":
    """Return the profile for all machines together.

    Raises:
        UserError: there is none, or it cannot work on so many.
    """
    from app.launching import profiles

    if options.nodes < 1:
        raise UserError(f"--nodes {options.nodes}: at least 1 machine must train")
    if not options.profile:
        raise UserError("--profile is missing: say what each machine has, for example --profile ddp:8, or ddp_cpu:2")
    profile = profiles.read(options.profile)
    if profile.processes % profile.machines:
        profile.check()
    profile = profile.over(options.nodes, profile.processes // profile.machines * options.nodes)
    profile.check()
    return profile
