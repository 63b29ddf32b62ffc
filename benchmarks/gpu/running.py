"""Run one part within its time limit; results are written as they come, so that an early end loses nothing."""

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
LINES = 40  # characters of the end of its output, kept next to its results


def run_part(part: Part, folder: Path, small: bool, limit: float, about: dict[str, Any]) -> dict[str, Any]:
    """Run a part, show its output, and return its result, which PART.json has at any time; PART.txt has all output.

    Args:
        limit: seconds, after which all its processes are killed.
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
            with suppress(json.JSONDecodeError):  # it was killed while it wrote
                result["left"] = json.loads(left.read_text())
            left.unlink()
        text = printed.read_text(errors="replace")
        learn(text, status=status, end=text.splitlines()[-LINES:])
    notes.unlink()
    return result


def _follow(words: list[str], printed: Path, notes: Path, limit: float, learn: Callable[[str], None]) -> str:
    """Run a command, show and pass on its output so far, and return how it ended."""
    start, text, size = time.monotonic(), "", 0
    process = _start(words, printed, notes)
    processes = set(family(process.pid))
    try:
        with printed.open(errors="replace") as output:
            while True:
                processes.update(family(process.pid))
                ended = process.poll() is not None
                late = not ended and time.monotonic() - start > limit
                if late:
                    kill(processes)
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
        kill(processes)  # whatever ends this call; also processes that an ended part has left
        process.wait()
        shutil.rmtree(printed.with_suffix(".tmp"), ignore_errors=True)
    return "out of time" if late else "failed" if process.returncode else "passed"


def _start(words: list[str], printed: Path, notes: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": search_path(), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # Tests that need a GPU run without one too. They write results to a file, because pytest captures their output.
    environment |= {"CUDA_PARTS_ON_CPU": "1", "BENCH_FOUND": str(notes.absolute())}
    # A killed part leaves its folders there, with checkpoints of gigabytes.
    environment["TMPDIR"] = str(printed.with_suffix(".tmp").absolute())
    os.makedirs(environment["TMPDIR"], exist_ok=True)
    environment["COLUMNS"] = "240"  # or pytest leaves out the reasons of skips
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
    """Read the output so far: lines of JSON, and results of tests with the reasons of skips."""
    results, tests = [], {}
    for line in text.splitlines():
        if line.startswith('{"'):
            try:
                results.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # the line is still being written
        elif match := TEST.match(line):
            name, verdict, reason = match.groups()
            tests[name] = f"{verdict.lower()}: {reason}" if reason else verdict.lower()
    return {"found": results, "tests": tests}


def _write(file: Path, result: dict[str, Any]) -> None:
    """Replace the file atomically, so that a reader never sees half of it."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(draft, file)
