"""Training a recipe under one profile for some steps, in processes of its own, with an audit of every step."""

import itertools
import json
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.commands.prove.trace import Trace, read
from app.launching.launcher import Stalled, launcher_words, run
from app.launching.profiles import Profile
from app.rundir.metrics_file import Follower
from app.rundir.progress import Progress
from app.rundir.throughput import SPEEDS

OUTPUT = "output.txt"
_ERROR = re.compile(r"(?:\[rank\d+\]: )?((?!subprocess|torch.distributed.elastic)[\w.]*(?:Error|Exception)(?:: .*)?)$")


@dataclass
class Trial:
    """One training of the recipe, and its outcome.

    Args:
        ended: why it ended early; empty if it made all steps.
        refused: whether it ended with a message for the user.
        where: layout and versions, from run.json; empty if it never began.
        warnings: that it printed, each once.
    """

    profile: Profile
    folder: Path
    trace: Trace
    seconds: float
    ended: str = ""
    refused: bool = False
    where: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """Tell whether it reached its first step."""
        return 0 in self.trace.steps

    @property
    def made(self) -> int:
        """Count the steps that it made."""
        return max(self.trace.steps, default=0)


def train(
    recipe: Path, flags: list[str], profile: Profile, steps: int, exact: bool, folder: Path, patience: float
) -> Trial:
    """Train for `steps` steps into a new folder, whose checkpoints and model are deleted afterwards.

    Args:
        flags: of the recipe.
        patience: seconds without a step after which the run is killed.
    """
    folder.mkdir(parents=True)
    mode = {"dir": str(folder), "stop-at": str(steps), "exact": str(exact).lower(), "audit": "true", "resume": "auto"}
    mode |= {"log-every": "1", "check-every": "1"}
    # These take time and are not compared.
    mode |= {"eval-every": "1000000000", "save-every": "1000000000", "save-async": "false"}
    own = [word for name, value in mode.items() for word in (f"--run.{name}", value)]
    words = launcher_words(profile.file, profile.processes, recipe, *flags, *own, "--run.trackers")
    began, watch = time.monotonic(), _Watch(folder / "metrics.jsonl", steps)
    try:
        status = run(words, folder / OUTPUT, watch, patience)
        ended = (reason((folder / OUTPUT).read_text(errors="replace")) or f"exit status {status}") if status else ""
    except Stalled:
        ended = f"no step in {patience:g} s, and was killed"
    finally:
        watch.progress.close()
        for name in ("checkpoints", "model"):
            shutil.rmtree(folder / name, ignore_errors=True)
    trial = trial_of(profile, folder, ended, time.monotonic() - began)
    if not ended and trial.made < steps:
        trial.ended = f"ended after {trial.made} of {steps} steps"
    return trial


def trial_of(profile: Profile, folder: Path, ended: str, seconds: float) -> Trial:
    """Read the outcome of a run from its folder."""
    trace, where = read(folder), {}
    if 0 in trace.steps:
        about = json.loads((folder / "run.json").read_text())
        where = {**about["layout"], **about["versions"]}
    printed = (folder / OUTPUT).read_text(errors="replace").splitlines() if (folder / OUTPUT).exists() else []
    warnings = list(dict.fromkeys(line for line in printed if line.startswith("warning: ")))
    refused = ended.startswith("error: ")
    return Trial(profile, folder, trace, seconds, ended.removeprefix("error: "), refused, where, warnings)


def reason(output: str) -> str:
    """Find why a launch failed in its output: the message for the user, the first error, or the last lines."""
    lines = output.splitlines()
    for position, line in enumerate(lines):
        if line.startswith("error: "):
            more = itertools.takewhile(lambda other: other.startswith("  "), lines[position + 1 :])
            return "\n".join([line, *more])
    found = next((match for match in map(_ERROR.match, lines) if match), None)
    if found:
        return found[1]
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
