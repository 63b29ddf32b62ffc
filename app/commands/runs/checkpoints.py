"""The checkpoints of one run: step, score, size, layout, and whether their files are as they were written."""

import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

from app import storage
from app.commands.output import size, table, write_json
from app.config import BestMetric
from app.errors import printable
from app.rundir.foreign import plain, text
from app.rundir.history import History, age


def show(run: History, verify: bool, json: str) -> int:
    """Print the checkpoints of a run, and return 1 if one is damaged, else 0.

    Args:
        verify: read all files.
        json: a file to write the list to; empty for none.
    """
    from app.checkpoints.store import CheckpointStore

    asked = run.asked_best
    store = CheckpointStore(run.folder / "checkpoints", 0, 1, best=asked)
    best = store.best({})
    found = [_about(store.path(step), step, verify) for step in store.steps()]
    for checkpoint in found:
        checkpoint["best"] = best is not None and checkpoint["step"] == best[0]
    count = f"{len(found)} checkpoint{'' if len(found) == 1 else 's'}"
    print(f"{run.place}: {run.status}, step {run.step} of {run.record.steps}, {count}")
    if found:
        head = ["step", "score", "", "size", "layout", "saved", "files"]
        print(table(head, [_row(checkpoint, asked, run) for checkpoint in found], right=(0, 3)))
    for checkpoint in found:
        if checkpoint["problem"]:
            print(f"\nstep {checkpoint['step']}: {printable(checkpoint['problem'])}")
    if found and not verify:
        print("\n--verify compares every file with its checksum")
    if best:
        print(f"\nthe best one as a model: python -m app export {printable(shlex.quote(str(run.folder)))} --best")
    about = {"folder": str(run.folder), "status": run.status, "step": run.step, "steps": run.record.steps}
    write_json(json, {**about, "checkpoints": found})
    return int(any(checkpoint["problem"] for checkpoint in found))


def _about(folder: Path, step: int, verify: bool) -> dict[str, Any]:
    """Describe a checkpoint; `verified` is None if its files were not read."""
    from app.checkpoints import manifest, record
    from app.distributed import layout

    problem, scores, unevaluated, here = "", {}, False, ""
    try:
        saved = record.read(folder)
        scores, unevaluated = plain(saved.metrics), saved.unevaluated
        here = text(layout.in_short(saved.layout)) if saved.layout else ""
        if verify:
            manifest.verify(folder)
    except (OSError, ValueError) as error:
        problem = text(error)
    except (KeyError, TypeError, AttributeError):
        problem = f"{folder / record.RECORD} is not the record that was written"
    files = storage.at(folder)
    written = files.entry(manifest.MANIFEST) or files.entry()  # nothing changes the list once it is written
    return {
        "step": step,
        "scores": scores,
        "bytes": sum(entry.size for entry in files.files()),
        "layout": here,
        "saved": written.changed if written else 0.0,
        "unevaluated": unevaluated,
        "verified": (not problem) if verify else None,
        "problem": problem,
    }


def _row(checkpoint: dict[str, Any], asked: str, run: History) -> list[Any]:
    scores = checkpoint["scores"]
    known = run.score
    names = [BestMetric.parse(asked).name, known[0] if known else "", *scores]
    name = next((name for name in names if name in scores), None)
    value = "not evaluated" if checkpoint["unevaluated"] else ""
    if name is not None:
        value = f"{name} {scores[name]:.4g}" if isinstance(scores[name], float) else f"{name} {scores[name]}"
    files = "damaged" if checkpoint["problem"] else {True: "verified", None: "not read"}[checkpoint["verified"]]
    when = f"{datetime.fromtimestamp(checkpoint['saved']):%Y-%m-%d %H:%M} ({age(checkpoint['saved'])} ago)"
    best = "best" if checkpoint["best"] else ""
    return [checkpoint["step"], value, best, size(checkpoint["bytes"]), checkpoint["layout"], when, files]
