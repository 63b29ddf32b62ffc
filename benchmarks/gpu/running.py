"""One part run within its time: what it finds is written as it comes, so that nothing is lost when it ends early."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from app.launcher import family, kill
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
    file, printed, left = (folder / f"{part.name}{kind}" for kind in (".json", ".txt", ".left.json"))
    left.unlink(missing_ok=True)
    words = [*part.command, *(part.small if small else ()), *((part.leaves, str(left)) if part.leaves else ())]
    result = {"part": part.name, "about": part.about, "status": "running", "small": small, "seconds": 0.0}
    result |= {"limit": limit, "date": time.strftime("%Y-%m-%d %H:%M:%S"), **about}
    result |= {"command": f"python {' '.join(words)}", "found": [], "tests": {}, "end": []}
    _write(file, result)
    if reason := part.lacks():
        result |= {"status": "skipped", "end": [reason]}
        printed.write_text(f"{reason}\n")
        _write(file, result)
        return result
    start = time.monotonic()
    process = _start(words, printed)
    known = {*family(process.pid)}
    try:
        with printed.open(errors="replace") as output:
            text = ""
            while True:
                known.update(family(process.pid))
                ended, late = process.poll() is not None, time.monotonic() - start > limit
                if late and not ended:
                    kill(known)
                text += (new := output.read())
                sys.stdout.write(new)
                sys.stdout.flush()
                if new:
                    result |= _learned(text)
                    _write(file, result)
                if ended or late:
                    break
                time.sleep(0.3)
    finally:
        kill(known)
    process.wait()
    status = "out of time" if not ended else "passed" if process.returncode == 0 else "failed"
    if left.exists():
        result["left"] = json.loads(left.read_text())
        left.unlink()
    result |= {"status": status, "seconds": round(time.monotonic() - start, 1), "end": text.splitlines()[-LINES:]}
    _write(file, result)
    return result


def _start(words: list[str], printed: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": search_path(), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    environment |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "CUDA_PARTS_ON_CPU": "1"}
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
