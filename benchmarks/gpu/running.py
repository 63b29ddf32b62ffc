"""One part run within its time: what it finds is written as it comes, so that nothing is lost when it ends early."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.launching.launcher import family, kill
from benchmarks.gpu.parts import Part
from benchmarks.turns import ROOT, search_path

TEST = re.compile(r"^\S+::(\S+(?: [^ ]+)*?) (PASSED|FAILED|ERROR|SKIPPED)\b(?: \((.*)\))?")
LINES = 40  # of the end of what it printed, kept next to what it found


def run_part(part: Part, folder: Path, small: bool, limit: float, about: dict[str, Any]) -> dict[str, Any]:
    """Run a part, show what it prints, and return its result, which PART.json has at any time; PART.txt has it all.

    Args:
        limit: seconds after which all processes that it began are killed.
        about: the machine, its software and the project's commit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, printed, left, notes = (folder / f"{part.name}{kind}" for kind in (".json", ".txt", ".left", ".notes"))
    words = part.words(small)
    shown, words = (words + [part.leaves, at] * bool(part.leaves) for at in (left.name, str(left.absolute())))
    result = {"part": part.name, "about": part.about, "status": "running", "small": small, "seconds": 0.0}
    result |= {"limit": limit, "date": time.strftime("%Y-%m-%d %H:%M:%S"), **about}
    result |= {"command": f"python {' '.join(shown)}", "found": [], "tests": {}, "end": []}
    left.unlink(missing_ok=True)
    notes.write_text("")
    start = time.monotonic()

    def learn(text: str, **more) -> None:
        seconds = round(time.monotonic() - start, 1)
        result.update(_learned(f"{text}\n{notes.read_text()}"), seconds=seconds, **more)
        _write(file, result)

    if reason := part.lacks():
        printed.write_text(f"{reason}\n")
        learn("", status="skipped", end=[reason])
    else:
        learn("")
        status = _follow(words, printed, notes, limit, learn)
        if left.exists():
            with suppress(json.JSONDecodeError):  # it was ended while it wrote
                result["left"] = json.loads(left.read_text())
            left.unlink()
        text = printed.read_text(errors="replace")
        learn(text, status=status, end=text.splitlines()[-LINES:])
    notes.unlink()
    return result


def _follow(words: list[str], printed: Path, notes: Path, limit: float, learn: Callable[[str], None]) -> str:
    """Run a command, show and hand over what it has printed so far, and return how it ended."""
    start, text, size = time.monotonic(), "", 0
    process = _start(words, printed, notes)
    known = set(family(process.pid))
    try:
        with printed.open(errors="replace") as output:
            while True:
                known.update(family(process.pid))
                ended = process.poll() is not None
                late = not ended and time.monotonic() - start > limit
                if late:
                    kill(known)
                new = output.read()
                sys.stdout.write(new)
                sys.stdout.flush()
                if new or notes.stat().st_size != size:
                    text, size = text + new, notes.stat().st_size
                    learn(text)
                if ended or late:
                    break
                time.sleep(0.5)
    finally:
        kill(known)  # whatever ends this call, and what a part that has ended left running
        process.wait()
        shutil.rmtree(printed.with_suffix(".tmp"), ignore_errors=True)
    return "out of time" if late else "failed" if process.returncode else "passed"


def _start(words: list[str], printed: Path, notes: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": search_path(), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # Tests that want a GPU run without one too; what they find they leave in a file, as pytest keeps what they print.
    environment |= {"CUDA_PARTS_ON_CPU": "1", "BENCH_FOUND": str(notes.absolute())}
    # One that is killed leaves its folders there, with checkpoints of gigabytes.
    environment["TMPDIR"] = str(printed.with_suffix(".tmp").absolute())
    os.makedirs(environment["TMPDIR"], exist_ok=True)
    environment["COLUMNS"] = "240"  # or pytest leaves out why it skips
    with printed.open("w") as output:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _learned(text: str) -> dict[str, Any]:
    """Read what was printed so far: lines of JSON, and how tests ended, with why some were skipped."""
    found, tests = [], {}
    for line in text.splitlines():
        if line.startswith('{"'):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # it is still being written
        elif match := TEST.match(line):
            name, verdict, reason = match.groups()
            tests[name] = f"{verdict.lower()}: {reason}" if reason else verdict.lower()
    return {"found": found, "tests": tests}


def _write(file: Path, result: dict[str, Any]) -> None:
    """Replace the file at once: who reads it never sees half of it."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(draft, file)
