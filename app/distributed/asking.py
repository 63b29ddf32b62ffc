"""Programs that know when this machine, or this job, is to end, and are asked again and again beside training."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from app.errors import printable

SLURM = "Slurm's time limit"
EVERY = 5.0  # seconds between two calls of --run.notice
_LIMIT = 10.0  # seconds that a call may take
_SELDOM, _OFTEN = 300.0, 5.0  # seconds between two questions to Slurm, whose controller serves a whole cluster
_MOST = 1 << 16  # characters of an answer that are read
_NOT_THERE = (126, 127)  # a shell's statuses for a program that cannot be run, and that does not exist
_LEFT = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d\d)")


class Answer(NamedTuple):
    """How a program has ended."""

    status: int
    output: str
    errors: str


class Asking:
    """A program that is asked again and again, in a thread."""

    def __init__(self, words: list[str], heard: Callable[[Answer], float | None]):
        """Begin.

        Args:
            words: of the command; no shell reads them.
            heard: is given each answer, and returns the seconds until the next question; None: there is none.
        """
        self._words, self._heard = words, heard
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="asking", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more, and end the program where it runs."""
        self._closed.set()
        self._thread.join(5)

    def _ask(self) -> None:
        pause: float | None = 0.0
        while pause is not None and not self._closed.wait(pause):
            pause = self._heard(self._run())

    def _run(self) -> Answer:
        """Run it once, for at most some seconds; in a session of its own, which no signal to this one reaches."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        try:
            process = subprocess.Popen(self._words, **pipes, text=True, errors="replace", start_new_session=True)
        except OSError as error:
            return Answer(_NOT_THERE[1], "", str(error))
        until = time.monotonic() + _LIMIT
        while True:
            try:
                output, errors = process.communicate(timeout=0.5)
                return Answer(process.returncode, output[:_MOST], errors[:_MOST])
            except subprocess.TimeoutExpired:
                if self._closed.is_set() or time.monotonic() > until:
                    with suppress(OSError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
                    return Answer(-signal.SIGKILL, "", f"no answer in {_LIMIT:.0f} s")


def of_machine(command: str, hear: Callable[[str, float | None], None]) -> Asking:
    """Ask a shell's command every few seconds: its status 0 is a notice, and its output may say when this machine ends.

    Args:
        hear: is told of it, with the seconds that are left where they are known.
    """
    told: list[str] = []

    def heard(answer: Answer) -> float | None:
        if answer.status == 0 and not says_no(answer.output):
            hear("--run.notice", seconds_left(answer.output, time.time()))
            return None
        if answer.status in _NOT_THERE and not told:
            told.append(answer.errors)
            why = printable((answer.errors.strip().splitlines() or [f"status {answer.status}"])[-1])
            print(f"warning: --run.notice cannot be asked: {why}", file=sys.stderr, flush=True)
        return EVERY

    return Asking(["/bin/sh", "-c", command], heard)


def of_slurm(ends_in: Callable[[float], None], reserve: Callable[[], float]) -> Asking | None:
    """Ask Slurm how long this job may still run, seldom at first; None outside of Slurm.

    Its environment does not tell (Slurm 22.05), and the limit may be changed while the job runs.

    Args:
        ends_in: is told the seconds that are left.
        reserve: how many of them the run needs at its end.
    """
    job, squeue = os.environ.get("SLURM_JOB_ID"), shutil.which("squeue")
    if not job or not squeue:
        return None

    def heard(answer: Answer) -> float | None:
        left = time_left(answer.output) if answer.status == 0 else None
        if left is None:
            return _SELDOM
        ends_in(left)
        return min(_SELDOM, max(_OFTEN, (left - reserve()) / 2))

    return Asking([squeue, "-h", "-j", job, "-O", "TimeLeft"], heard)


def says_no(output: str) -> bool:
    """Tell whether a cloud says that this machine stays: FALSE (Google), or JSON with no `Events` in it (Azure)."""
    try:
        return output.strip() == "FALSE" or json.loads(output)["Events"] == []
    except (ValueError, TypeError, KeyError):
        return False


def time_left(said: str) -> float | None:
    """Read Slurm's time left, as 4-01:30:00, 1:30:00 or 30:00, in seconds; None where it is unlimited or not known."""
    match = _LEFT.fullmatch(said.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.group("days", "hours", "minutes", "seconds"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def seconds_left(output: str, now: float) -> float | None:
    """Read how long is left in what a cloud says of this machine; None where it does not say, or no time is left.

    That is a time, or JSON with one under `time` (AWS), or under `NotBefore` of one of its `Events` (Azure), the
    earliest counts. A time without a zone is in UTC.

    Args:
        now: seconds since 1970.
    """
    try:
        said = json.loads(output)
    except ValueError:
        said = None
    if isinstance(said, dict):
        listed = said.get("Events")
        events = listed if isinstance(listed, list) else []
        times = [said.get("time"), *(event.get("NotBefore") for event in events if isinstance(event, dict))]
    else:
        times = [output.strip()]
    ends = [end for each in times if (end := _seconds(each)) is not None and end > now]
    return min(ends) - now if ends else None


def _seconds(said: Any) -> float | None:
    """Read a time as ISO 8601 or a mail's header writes it, in seconds since 1970."""
    if not isinstance(said, str):
        return None
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        with suppress(ValueError, TypeError, IndexError):
            moment = read(said)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return None
