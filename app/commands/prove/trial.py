"""Training a recipe under one profile for some steps, in processes of its own, with an audit of every step."""

import itertools
import random
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from app.commands.prove.trace import Trace, read
from app.launching.launcher import Stalled, launcher_words, run
from app.launching.profiles import Profile
from app.rundir import run_record
from app.rundir.metrics_file import Follower
from app.rundir.progress import Progress
from app.rundir.run_record import RunRecord
from app.rundir.throughput import SPEEDS

OUTPUT = "output.txt"
_ERROR = re.compile(r"(?:\[rank\d+\]: )?((?!subprocess|torch.distributed.elastic)[\w.]*(?:Error|Exception)(?:: .*)?)$")


@dataclass
class Chain:
    """The launches of one training: each goes on under its profile until its step, counted from 1."""

    launches: list[tuple[Profile, int]]

    @property
    def name(self) -> str:
        """Return the profile's name, or how many launches there are."""
        return self.profile.name if len(self.launches) == 1 else f"across, {len(self.launches)} launches"

    @property
    def path(self) -> str:
        """Return the profiles of several launches, each with the step at which it stops; empty for one."""
        launches = self.launches if len(self.launches) > 1 else []
        return ", ".join(f"{profile.name} to {until}" for profile, until in launches)

    @property
    def profile(self) -> Profile:
        """Return the profile of the last launch."""
        return self.launches[-1][0]


def draw(profiles: list[Profile], steps: int, seed: int) -> Chain:
    """Draw where a run stops, and under which profiles it goes on: twice through all of them, if steps suffice.

    Args:
        steps: of the whole run; each launch makes one or more.
    """
    random_ = random.Random(seed)
    count = min(2 * len(profiles), steps)
    turns: list[Profile] = []
    while len(turns) < count:
        further = random_.sample(profiles, len(profiles))
        if turns and further[0] == turns[-1]:  # a launch on the same layout moves nothing
            further.append(further.pop(0))
        turns += further
    stops = sorted(random_.sample(range(1, steps), count - 1))
    return Chain(list(zip(turns, [*stops, steps], strict=False)))


@dataclass
class Trial:
    """One training of the recipe, and its outcome.

    Args:
        ended: why it ended early; empty if it made all steps.
        refused: whether it ended with a message for the user.
        record: its run.json; None if it never began.
        warnings: that it printed, each once.
    """

    chain: Chain
    folder: Path
    trace: Trace
    seconds: float
    ended: str = ""
    refused: bool = False
    record: RunRecord | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """Tell whether it reached its first step."""
        return 0 in self.trace.steps

    @property
    def made(self) -> int:
        """Count the steps that it made."""
        return max(self.trace.steps, default=0)


def train(recipe: Path, flags: list[str], chain: Chain, exact: bool, folder: Path, patience: float) -> Trial:
    """Train into a new folder, whose checkpoints and model are deleted afterwards.

    Args:
        flags: of the recipe.
        patience: seconds without a step after which the run is killed.
    """
    folder.mkdir(parents=True)
    steps = chain.launches[-1][1]
    began, watch, ended = time.monotonic(), _Watch(folder / "metrics.jsonl", steps), ""
    try:
        for number, (profile, until) in enumerate(chain.launches, 1):
            words = launcher_words(profile.file, profile.processes, recipe, *flags, *_mode(folder, until, exact))
            output = folder / (f"{number:02}-{OUTPUT}" if len(chain.launches) > 1 else OUTPUT)
            status = run(words, output, watch, patience)
            if status:
                ended = reason(output.read_text(errors="replace")) or f"exit status {status}"
                break
    except Stalled:
        ended = f"no step in {patience:g} s, and was killed"
    finally:
        watch.progress.close()
        for name in ("checkpoints", "model"):
            shutil.rmtree(folder / name, ignore_errors=True)
    trial = trial_of(chain, folder, ended, time.monotonic() - began)
    if not ended and trial.made < steps:
        trial.ended = f"ended after {trial.made} of {steps} steps"
    return trial


def _mode(folder: Path, until: int, exact: bool) -> list[str]:
    """Return the flags of a launch that stops at a step."""
    mode = {"dir": str(folder), "stop-at": str(until), "exact": str(exact).lower(), "audit": "true", "resume": "auto"}
    mode |= {"log-every": "1", "check-every": "1"}
    # These take time and are not compared.
    mode |= {"eval-every": "1000000000", "save-every": "1000000000", "save-async": "false"}
    return [*(word for name, value in mode.items() for word in (f"--run.{name}", value)), "--run.trackers"]


def trial_of(chain: Chain, folder: Path, ended: str, seconds: float) -> Trial:
    """Read the outcome of a run from its folder."""
    trace, record = read(folder), None
    if 0 in trace.steps:
        record = run_record.read(folder)
    outputs = [file.read_text(errors="replace") for file in sorted(folder.glob(f"*{OUTPUT}"))]
    printed = "\n".join(outputs).splitlines()
    warnings = list(dict.fromkeys(line for line in printed if line.startswith("warning: ")))
    refused = ended.startswith("error: ")
    return Trial(chain, folder, trace, seconds, ended.removeprefix("error: "), refused, record, warnings)


def reason(output: str) -> str:
    """Find why a launch failed in its output: the message for the user, the first error, or the last lines."""
    lines = output.splitlines()
    for position, line in enumerate(lines):
        if line.startswith("error: "):
            more = itertools.takewhile(lambda other: other.startswith("  "), lines[position + 1 :])
            return "\n".join([line, *more])
    first_error = next((match for match in map(_ERROR.match, lines) if match), None)
    if first_error:
        return first_error[1]
    # Such as a flag that the recipe does not have. The launcher's own traceback comes after it.
    return "\n".join(output.partition("Traceback (most recent call last)")[0].strip().splitlines()[-12:])


class _Watch:
    """A progress bar for a run in another process, which reads its metrics.jsonl."""

    def __init__(self, path: Path, steps: int):
        self.file, self.lines = Follower(path), 0
        self.progress, self.steps = Progress(True), steps
        self.progress.start(0, steps)

    def __call__(self) -> int:
        """Show the new lines, and return how many lines there are."""
        for line in self.file.new():
            self.lines += 1
            self._show(line)
        return self.lines

    def _show(self, line: dict) -> None:
        if "ids" in line:
            self.progress.advance()
            rate, per_step = line["samples_per_second"], line["samples"] / line["step"]
            left = (self.steps - line["step"]) * per_step / rate
            speeds = {name: line[name] for name in SPEEDS if name in line}
            self.progress.show(line["step"], {"loss": line.get("loss") or 0.0}, line.get("lr"), speeds, left)
