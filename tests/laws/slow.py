"""Run one run after another in which a rank is slow while others wait; the last one hangs: slow.py FOLDER."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from toy import Config, train

from app import parse
from app.checkpoints import resume
from app.distributed import collectives
from app.distributed.state import sharded
from app.storage.drafts import draft_of
from app.training.loop import ending

FOLDER, LAST = Path(sys.argv[1]), os.environ["RANK"] == "1"
SECONDS, TIMEOUT = 6, 3  # how long the slow rank takes; --run.timeout
SAVE, CONTENTS, FROM_MAIN, WRITE = sharded.dcp.save, resume.contents, collectives.from_main, ending.save_model


def go(name: str, *flags: str) -> None:
    """Train a run, and note its time limits."""
    settings = ["--run.dir", str(FOLDER / name), "--run.steps", "4", "--run.timeout", str(TIMEOUT), *flags]
    train(parse(Config, settings), lambda run: limits.update({f"{name} {run.steps_done}": list(map(limit, groups()))}))
    (FOLDER / f"limits-{int(LAST)}.json").write_text(json.dumps(limits))


limits: dict[str, list] = {}


def groups() -> list:
    """Return the process groups of training and of saving."""
    return [dist.group.WORLD, collectives.background()]


def limit(group: dist.ProcessGroup) -> float:
    """Return the timeout of a group's collectives in seconds."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def grow(file: Path, seconds: float = SECONDS) -> None:
    """Write a file slowly, a little at a time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with file.open("ab") as out:
            out.write(b"more")
        time.sleep(0.2)
    file.unlink()


def slow_save(staged, storage_writer, **how):
    """Write slowly on the last rank."""
    if LAST:
        grow(Path(storage_writer.path) / "slow")
    return SAVE(staged, storage_writer=storage_writer, **how)


def stuck_save(*args, **how):
    """Hang on the last rank."""
    while LAST:
        time.sleep(1)
    return SAVE(*args, **how)


def slow_write(accelerator, model, folder, *parts):
    """Write the finished model slowly on the main process."""
    if not LAST:
        grow(draft_of(folder) / "slow")
    WRITE(accelerator, model, folder, *parts)


def slow_contents(data):
    """Look at data for a while."""
    time.sleep(SECONDS / 2)
    return CONTENTS(data)


def hasty(call, group=None, **how):
    """Give the other ranks' collectives one second to wait for what the main process does for all."""
    if group is not None:
        return FROM_MAIN(call, group, **how)
    before = timedelta(seconds=limit(dist.group.WORLD))
    collectives.gather(None)
    collectives.set_limit(timedelta(seconds=1))
    try:
        return FROM_MAIN(call, **how)
    finally:
        collectives.set_limit(before)


if __name__ == "__main__":
    sharded.dcp.save, resume.contents, collectives.from_main = slow_save, slow_contents, hasty
    go("slow", "--run.stop-at", "2")
    sharded.dcp.save, resume.contents, collectives.from_main = SAVE, CONTENTS, FROM_MAIN
    ending.save_model = slow_write
    go("slow")
    ending.save_model = WRITE
    go("unhurried", "--run.timeout", "4000")
    go("never", "--run.timeout", "0", "--run.save-async", "false")
    sharded.dcp.save = slow_save
    go("at once", "--run.save-async", "false")
    sharded.dcp.save = stuck_save
    go("stuck")
