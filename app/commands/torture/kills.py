"""Killing runs of a recipe again and again, and comparing those that finish with a run that was left alone."""

import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import xxhash

from app.errors import UserError
from app.launching import launcher
from app.launching.profiles import Profile
from app.rundir import metrics_file
from app.rundir.throughput import SPEEDS

MOMENTS = ("writing", "renaming", "deleting")


class Outcome(NamedTuple):
    """What a finished run must have in common with the untouched one."""

    lines: list[dict[str, Any]]
    """Of metrics.jsonl, without speeds."""
    damaged: int
    """Lines that cannot be read."""
    weights: dict[str, str]
    """Hashes of the files of model/ that hold weights, by their names."""


class Lost(Exception):
    """Raised for a run that could not be resumed, or hung."""


@dataclass
class Kill:
    """One kill: what was killed, at which moment, and how many lines the run had logged."""

    who: str
    moment: str
    profile: str
    step: int
    trouble: str = ""


@dataclass
class Start:
    """One start of a run, by its launcher."""

    process: subprocess.Popen
    began: float
    """Seconds since the epoch."""


@dataclass
class Torture:
    """Kill runs of one recipe, and compare those that finish with one that was left alone."""

    recipe: Path
    flags: list[str]
    profiles: list[Profile]
    folder: Path
    patience: float
    say: Callable[[str], None] = print
    kills: list[Kill] = field(default_factory=list)
    finished: int = 0
    differences: list[str] = field(default_factory=list)

    def untouched(self) -> Outcome:
        """Train the run that is left alone, under the first profile, and return its outcome."""
        status = self._wait(self._start(self.folder / "untouched", self.profiles[0]).process)
        if status:
            raise UserError(f"{self.recipe} fails without any kill:\n{self._output()[-3000:]}")
        return outcome(self.folder / "untouched")

    def run(self, kills: int, chance: random.Random, expected: Outcome) -> None:
        """Kill so many times, starting new runs where some finish, and let the last run finish.

        Args:
            expected: the outcome of the run that was left alone.
        """
        number = 0
        while len(self.kills) < kills:
            number += 1
            folder = self.folder / f"tortured-{number}"
            while len(self.kills) < kills and self._until_killed(folder, chance):
                self.say(f"kill {len(self.kills)}/{kills}: {_in_words(self.kills[-1])}")
            self._finish(folder, chance)
            differences = compare(expected, outcome(folder))
            self.finished += 1
            self.differences += [f"{folder.name}: {text}" for text in differences]
            self.say(f"{folder.name} finished: {differences[0] if differences else 'the same as the untouched run'}")

    def _until_killed(self, folder: Path, chance: random.Random) -> bool:
        """Start or resume a run and kill it; return False if it finished before that."""
        profile, step = chance.choice(self.profiles), _steps(folder)
        moment = chance.choice(MOMENTS) if chance.random() < 0.5 else "training"
        who = chance.choice(("all", "the launcher", "one rank"))
        start = self._start(folder, profile)
        if moment == "training":
            # Sometimes before the first step: while the program starts, loads, or resumes.
            here = (lambda: True) if chance.random() < 0.2 else (lambda: _steps(folder) > step)
            pause = chance.uniform(0, 4.0)
        else:
            here, pause = (lambda: _moment(folder, start.began) == moment), chance.choice((0.0, 0.0, 0.002, 0.02))
        while not here():
            if start.process.poll() is not None:
                return self._ended(start.process, folder, profile, step)
            time.sleep(0.001)
        time.sleep(pause)
        if start.process.poll() is not None:
            return self._ended(start.process, folder, profile, step)
        family = self._kill(start.process, who, chance)
        self.kills.append(Kill(who, moment, profile.name, _steps(folder)))
        self._leave(start.process, family, who)
        return True

    def _ended(self, process: subprocess.Popen, folder: Path, profile: Profile, step: int) -> bool:
        """Return False for a run that finished before it was killed; raise Lost for one that failed."""
        if process.returncode == 0:
            return False
        raise Lost(
            f"{folder} did not go on after step {step} under {profile.name}: status {process.returncode}\n"
            f"{self._output()[-3000:]}"
        )

    def _finish(self, folder: Path, chance: random.Random) -> None:
        step, profile = _steps(folder), chance.choice(self.profiles)
        process = self._start(folder, profile).process
        if self._wait(process):
            self._ended(process, folder, profile, step)

    def _start(self, folder: Path, profile: Profile) -> Start:
        folder.mkdir(parents=True, exist_ok=True)
        began = time.time()
        words = launcher.launcher_words(
            profile.file, profile.processes, self.recipe, *self.flags, "--run.dir", str(folder)
        )
        with self._log.open("wb") as file:
            process = subprocess.Popen(
                words, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )
        return Start(process, began)

    def _kill(self, start: subprocess.Popen, who: str, chance: random.Random) -> list[psutil.Process]:
        """Kill some processes of a run, and return all that it had."""
        family = launcher.family(start.pid)
        ranks = [process for process in family if process.pid != start.pid]
        victims = {"all": family, "the launcher": [psutil.Process(start.pid)], "one rank": ranks}[who]
        if who == "one rank" and ranks:
            victims = [chance.choice(ranks)]
        for process in victims:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        return family

    def _leave(self, process: subprocess.Popen, family: list[psutil.Process], who: str) -> None:
        """Check that the processes that were not killed end by themselves."""
        self._wait(process)
        _, alive = psutil.wait_procs(family, timeout=self.patience)
        if alive:
            self.kills[-1].trouble = f"{len(alive)} processes went on after {who} was killed"
            launcher.kill(alive)

    def _wait(self, process: subprocess.Popen) -> int:
        try:
            return process.wait(self.patience * 10)
        except subprocess.TimeoutExpired:
            raise Lost(f"nothing ended within {self.patience * 10:.0f} s:\n{self._output()[-3000:]}") from None
        finally:
            if process.poll() is None:
                launcher.kill_tree(process.pid)

    @property
    def _log(self) -> Path:
        return self.folder / "output"

    def _output(self) -> str:
        return self._log.read_text(errors="replace")


def outcome(folder: Path) -> Outcome:
    """Read the outcome of a finished run."""
    file = folder / "metrics.jsonl"
    whole, damaged = metrics_file.read_lines(file)
    damaged += not file.read_bytes().endswith(b"\n")  # a finished run writes its lines to their ends
    lines = [line.fields for line in whole]
    for line in lines:
        for name in SPEEDS:
            line.pop(name, None)
    weights = {
        str(file.relative_to(folder)): xxhash.xxh3_128_hexdigest(file.read_bytes())
        for file in sorted((folder / "model").rglob("*.safetensors"))
    }
    return Outcome(lines, damaged, weights)


def compare(expected: Outcome, now: Outcome) -> list[str]:
    """List in what two outcomes differ, the steps first."""
    differences = []
    pairs = zip(expected.lines, now.lines, strict=False)
    first = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if first:
        names = [name for name in {**first[0], **first[1]} if first[0].get(name) != first[1].get(name)]
        differences.append(f"step {first[0]['step']} differs in {', '.join(names)}")
    elif len(expected.lines) != len(now.lines):
        differences.append(f"{len(now.lines)} lines in metrics.jsonl, {len(expected.lines)} expected")
    if now.damaged:
        differences.append(f"{now.damaged} damaged lines in metrics.jsonl")
    differences += [f"{name} differs" for name, digest in expected.weights.items() if digest != now.weights.get(name)]
    if not expected.weights:
        differences.append("the recipe writes no model to compare: call run.finish")
    return differences


def _steps(folder: Path) -> int:
    """Count the lines that a run has logged."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _moment(folder: Path, since: float) -> str:
    """Tell what is happening to a run's checkpoints: one of MOMENTS, or nothing.

    Args:
        since: drafts that are older than this time were left by earlier kills, and do not count.
    """
    newest, drafts = -1, []
    try:
        for path in (folder / "checkpoints").iterdir():
            number = int(path.name[5:13])
            if path.suffix == ".tmp" and path.stat().st_ctime > since:
                drafts.append((number, path))
            elif not path.suffix:
                newest = max(newest, number)
    except OSError:
        return ""
    for number, path in drafts:
        if number < newest:
            return "deleting"
        return "renaming" if (path / "manifest.json").exists() else "writing"
    return ""


def _in_words(kill: Kill) -> str:
    where = "in training" if kill.moment == "training" else f"while {kill.moment} a checkpoint"
    parts = [f"{kill.who}, {where}", f"{kill.step} lines logged", f"under {kill.profile}"]
    return "; ".join([", ".join(parts), *filter(None, [kill.trouble])])
