"""What a run that is compared has written down, step by step."""

from pathlib import Path
from typing import Any, NamedTuple

from app.errors import UserError
from app.rundir import metrics_file
from app.training.loop.audit import FILE


class Trace(NamedTuple):
    """What a run has written down: the names of its buffers; by step, its lines of metrics.jsonl and audit.jsonl."""

    buffers: set[str]
    steps: dict[int, dict[str, Any]]


def read(folder: Path) -> Trace:
    """Read the steps that a run with --run.audit and --run.log-every 1 has written to both files.

    Raises:
        UserError: a line is damaged.
    """
    steps: dict[int, dict[str, Any]] = {}
    for name in (FILE, "metrics.jsonl"):
        lines, damaged = metrics_file.read_lines(folder / name)
        if damaged:
            raise UserError(
                f"{folder / name} has {damaged} damaged lines, so its run cannot be compared: train it again"
            )
        for line in (line.fields for line in lines):
            if name == FILE or "ids" in line:  # not an evaluation
                steps.setdefault(line["step"], {}).update(line)
    whole = {step: line for step, line in steps.items() if "weights" in line and ("ids" in line or not step)}
    return Trace(set(whole.get(0, {}).get("buffers", ())), whole)
