"""The checkpoints of one run: step, score, size, layout, and whether their files are as they were written."""

import shlex
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from app import storage
from app.commands import costs
from app.commands.output import size, table, write_json
from app.config import BestMetric
from app.errors import printable, whole_urls
from app.launching import program
from app.rundir.foreign import plain, text
from app.rundir.history import History, age
from app.rundir.time_spent import speed


@dataclass
class Checkpoint:
    """What is told of a checkpoint."""

    step: int
    scores: dict[str, Any]
    bytes: int
    layout: str
    saved: float
    """Seconds since the epoch."""
    unevaluated: bool
    verified: bool | None
    """None if its files were not read."""
    problem: str
    """Why it cannot be used; empty if it can."""
    best: bool


def show(run: History, verify: bool, price: float, mtbf: float, json: str) -> int:
    """Print the checkpoints of a run and where its time went, and return 1 if a checkpoint is damaged, else 0.

    Args:
        verify: read all files.
        price: of one device an hour; 0 for none.
        mtbf: mean hours between two failures of the run's hardware; 0 where it is not given.
        json: a file to write the list to; empty for none.
    """
    from app.checkpoints.store import CheckpointStore

    asked = run.asked_best
    store = CheckpointStore(run.folder / "checkpoints", 0, 1, best=asked)
    best = store.best({})
    best_step = best[0] if best else None
    checkpoints = [_checkpoint(store.path(step), step, verify, step == best_step) for step in store.steps()]
    count = f"{len(checkpoints)} checkpoint{'' if len(checkpoints) == 1 else 's'}"
    print(f"{run.place}: {run.status}, step {run.step} of {run.record.steps}, {count}")
    if checkpoints:
        head = ["step", "score", "", "size", "layout", "saved", "files"]
        print(table(head, [_row(checkpoint, asked, run) for checkpoint in checkpoints], right=(0, 3)))
    for checkpoint in checkpoints:
        if checkpoint.problem:
            print(f"\nstep {checkpoint.step}: {printable(whole_urls(checkpoint.problem))}")
    if checkpoints and not verify:
        print("\n--verify compares every file with its checksum")
    _show_time(run, price, mtbf)
    if best:
        good = {one.step: store.path(one.step) for one in checkpoints if not one.problem}
        print(_about_best(run.folder, best[0], store.retention.best_step(good, {})))
    about: dict[str, Any] = {
        "folder": whole_urls(str(run.folder)),
        "status": run.status,
        "step": run.step,
        "steps": run.record.steps,
    }
    about["time"] = costs.for_programs(run.account, speed(run.spent), price, mtbf)
    write_json(json, {**about, "checkpoints": [asdict(checkpoint) for checkpoint in checkpoints]})
    return int(any(checkpoint.problem for checkpoint in checkpoints))


def _show_time(run: History, price: float, mtbf: float) -> None:
    if run.account is None:
        if price or mtbf:
            print("\nwhere its time went is not known: an older version has trained it; launches from now on tell it")
        return
    print(f"\n{costs.spent_table(run.account, price)}")
    launches, estimated = len(run.spent), sum(launch.end != "recorded" for launch in run.spent)
    print(f"{launches} launch{'es' * (launches > 1)}; {run.account.goodput:.1%} of the time made steps that count")
    if estimated:
        goes_on = estimated == 1 and run.status == "running"
        whose = "the launch that goes on" if goes_on else f"{estimated} of them did not write its end"
        print(f"estimated in part: {whose}, and counts until metrics.jsonl was last written")
    pace = speed(run.spent)
    if pace is not None:
        print("\n".join(costs.saving_lines(pace, price, mtbf)))


def _about_best(folder: Path, step: int, best_of_good: tuple[int, float] | None) -> str:
    """Say how to get the best checkpoint's model, or the best of the others' if its own files are damaged.

    Args:
        step: the best checkpoint's.
        best_of_good: step and score of the best one that is not damaged; None if there is none.
    """
    export = f"{program.typed('export')} {printable(shlex.quote(whole_urls(str(folder))))}"
    if best_of_good is None:
        return f"\nthe best one, of step {step}, is damaged, and no other one has its score"
    if best_of_good[0] != step:
        others = f"the best of the others as a model: {export} --step {best_of_good[0]}"
        return f"\nthe best one, of step {step}, is damaged; {others}"
    return f"\nthe best one as a model: {export} --best"


def _checkpoint(folder: Path, step: int, verify: bool, best: bool) -> Checkpoint:
    from app.checkpoints import record
    from app.distributed.state import manifest

    problem, scores, unevaluated, layout = "", {}, False, ""
    try:
        saved = record.read(folder)
        scores, unevaluated, layout = plain(saved.metrics), saved.unevaluated, text(saved.layout)
        if verify:
            manifest.verify(folder)
    except (OSError, ValueError) as error:
        problem = text(error)
    files = storage.at(folder)
    written = files.entry(manifest.MANIFEST) or files.entry()  # nothing changes the list once it is written
    return Checkpoint(
        step=step,
        scores=scores,
        bytes=sum(entry.size for entry in files.files()),
        layout=layout,
        saved=written.changed if written else 0.0,
        unevaluated=unevaluated,
        verified=(not problem) if verify else None,
        problem=problem,
        best=best,
    )


def _row(checkpoint: Checkpoint, asked: str, run: History) -> list[Any]:
    scores, score = checkpoint.scores, run.score
    names = [BestMetric.parse(asked).name, score[0] if score else "", *scores]
    name = next((name for name in names if name in scores), None)
    value = "not evaluated" if checkpoint.unevaluated else ""
    if name is not None:
        value = f"{name} {scores[name]:.4g}" if isinstance(scores[name], float) else f"{name} {scores[name]}"
    files = "damaged" if checkpoint.problem else {True: "verified", None: "not read"}[checkpoint.verified]
    when = f"{datetime.fromtimestamp(checkpoint.saved):%Y-%m-%d %H:%M} ({age(checkpoint.saved)} ago)"
    best = "best" if checkpoint.best else ""
    return [checkpoint.step, value, best, size(checkpoint.bytes), checkpoint.layout, when, files]
