"""Count collectives, and reads of numbers that make the host wait, in steps on this layout.

counting.py FOLDER CASE...: the main process writes the counts of a silent step and of a logged step of each case to
FOLDER/CASE.json.
"""

import json
import os
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from app import OptimConfig, Run, RunConfig
from app.distributed.environment import report_user_errors

COLLECTIVE = ("c10d::", "_c10d_functional::")
NOT_COUNTED = ("c10d::wait", "_c10d_functional::wait", "_c10d_functional::_wrap")
# By case: the limit of the gradient's norm, and whether the model has a buffer that training changes.
CASES = {"plain": (1.0, False), "unclipped": (0.0, False), "changing": (1.0, True)}


@dataclass
class Config:
    """Four micro-batches of three samples, on up to four processes; only the sixth step is logged."""

    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=12, micro_batch=3, steps=8, log_every=6, save_every=100, trackers=()
        )
    )


class Model(nn.Module):
    """A stack that FSDP shards layer by layer, with a buffer that DDP broadcasts by default."""

    def __init__(self, changes: bool = False):
        super().__init__()
        self.changes = changes
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.out = nn.Linear(16, 1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        if self.changes and self.training:
            self.scale.mul_(0.999)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.out(x).squeeze(-1).clone() * self.scale


@contextmanager
def counting(path: Path):
    """Count what steps 4 and 6 of the run in this block do, and write it on the main process."""
    counts, original, counts_here = {}, Run.batches, os.environ.get("RANK", "0") == "0"

    def batches(run: Run, *args, **kwargs):
        steps, profiler = original(run, *args, **kwargs), None
        while True:
            batch = next(steps, None)
            # The body of a step, and what the Run does after it until the next step begins.
            if profiler is not None:
                profiler.__exit__(None, None, None)
                if counts_here:
                    counts[run.steps_done - 1] = tally(profiler, reads)
                profiler = None
            if batch is None:
                return
            if run.steps_done in (4, 6):
                profiler = profile(activities=[ProfilerActivity.CPU])
                profiler.__enter__()
                reads.clear()
            yield batch

    with count_reads() as reads, patch.object(Run, "batches", batches):
        yield
    if counts_here:
        path.write_text(json.dumps({"silent": counts[4], "logged": counts[6]}))


def train(folder: Path, clip: float, changes: bool) -> None:
    """Train one run."""
    config = Config()
    config.run.dir = str(folder)
    data = list(torch.randn(50, 16, generator=torch.Generator().manual_seed(0)))
    with Run(config) as run:
        model, optimizer = run.prepare(Model(changes), OptimConfig(clip=clip))
        for batch in run.batches(data, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)


def tally(profiler, reads: Counter) -> dict:
    """Count collectives by name, and reads of numbers by the line of `app` that reads them."""
    # As they were recorded: a tree of them, which `events()` makes, takes longer than the run.
    names = Counter(event.name() for event in profiler.profiler.kineto_results.events())
    found = {name: n for name, n in names.items() if name.startswith(COLLECTIVE) and not name.startswith(NOT_COUNTED)}
    return {**found, "reads": dict(reads)}


@contextmanager
def count_reads():
    """Count each call by which code of `app` makes the host wait for a number."""
    reads = Counter()

    def counted(method):
        original = getattr(torch.Tensor, method)

        def read(tensor, *args, **kwargs):
            frame = sys._getframe(1)
            if "/app/" in frame.f_code.co_filename:
                file = frame.f_code.co_filename.rpartition("/app/")[2]
                reads[f"app/{file}:{frame.f_code.co_name}"] += 1
            return original(tensor, *args, **kwargs)

        return patch.object(torch.Tensor, method, read)

    with ExitStack() as stack:
        for method in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
            stack.enter_context(counted(method))
        yield reads


def main(folder: Path, *cases: str) -> None:
    """Train and count each case."""
    for case in cases:
        with counting(folder / f"{case}.json"):
            train(folder / case, *CASES[case])


if __name__ == "__main__":
    report_user_errors()
    main(Path(sys.argv[1]), *sys.argv[2:])
