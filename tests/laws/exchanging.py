"""Exchange Python objects between ranks, with mistakes on single ranks; write what each rank gets.

exchanging.py FOLDER: writes FOLDER/rank-R.json, which maps a case to its result or its error.
"""

import json
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch.distributed as dist

from app import Run, RunConfig, UserError
from app.distributed import collectives


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)


def together(both, error=None):
    """Fail in a block that all ranks run."""
    with both.together():
        if error is not None:
            raise error
    return "went on"


def cases(both, rank):
    """Return the cases: each is called on every rank."""
    lock, long = threading.Lock(), "x" * (10 ** (2 * rank + 1))
    only = lambda number, value, other=None: value if rank == number else other  # noqa: E731
    pairs = both.split(only(1, "odd", "even"))
    return {
        "who": lambda: [both.rank, both.size],
        "broadcast": lambda: both.broadcast(only(0, {"names": ["a", None], 3: (1.5, True)}) and ["a", None, 1.5]),
        "from the last": lambda: both.broadcast(f"of {rank}", source=2),
        "none": lambda: [both.broadcast(None), both.gather(None), both.scatter([None] * 3)],
        "sizes": lambda: [len(text) for text in both.gather(long)],
        "arrays": lambda: both.scatter(only(1, [np.arange(n) for n in (0, 1, 5)]), source=1).tolist(),
        "groups": lambda: [pairs.rank, pairs.size, pairs.gather(rank), pairs.broadcast(rank, source=pairs.size - 1)],
        "groups of a group": lambda: pairs.split(rank).gather(rank),
        "scatter in a group": lambda: pairs.scatter([f"{rank}.{i}" for i in range(pairs.size)]),
        "unpicklable, broadcast": lambda: both.broadcast(lock),
        "unpicklable, broadcast of another": lambda: both.broadcast(only(0, 7, lock)),
        "unpicklable, gather": lambda: both.gather(only(1, lock)),
        "unpicklable, scatter": lambda: both.scatter([1, 2, lock]),
        "too few": lambda: both.scatter(only(0, [1, 2])),
        "no list": lambda: both.scatter(None),
        "an array": lambda: both.scatter(only(0, np.arange(3) + 5)).item(),
        "a generator": lambda: both.scatter(only(0, (10 + n for n in range(3)))),
        "one number": lambda: both.scatter(only(0, 7)),
        "a generator that fails": lambda: both.scatter(only(0, (1 // (n - 1) for n in range(3)))),
        "no such rank": lambda: both.broadcast(1, source=3),
        "fails alone": lambda: together(both, only(1, ZeroDivisionError("by zero"))),
        "user alone": lambda: together(both, only(1, UserError("row 3 is empty"))),
        "all well": lambda: together(both),
    }


def main(folder, rank):
    """Go through all cases inside a run."""
    groups = dist.distributed_c10d._world.pg_map
    before = list(groups)
    with Run(Config(RunConfig(dir=str(folder / "run"), trackers=(), quiet=True))) as run:
        told = {}
        for name, case in cases(run.collectives, rank).items():
            try:
                told[name] = case()
            except Exception as error:
                told[name] = f"{type(error).__name__}: {error}"
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    for group in [
        group for group in groups if group not in (*before, dist.group.WORLD, collectives._process.background)
    ]:
        dist.destroy_process_group(group)  # this launch stays for other tests


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ.get("RANK", "0")))
