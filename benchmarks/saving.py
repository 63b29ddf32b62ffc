"""Time how long training waits for a checkpoint: written while it goes on, at once, and by accelerate's save_state.

    python -m benchmarks.saving [--gigabytes 0.6] [--rounds 5]

One process, on a GPU if there is one, trains a model with AdamW: 12 bytes a weight. Below 2 GB the ways of saving take
turns; above it they run one after the other, so that GPU memory and disk hold the state only once.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from app import OptimConfig, Run, RunConfig
from benchmarks.gate import wait_for_gpu

TOGETHER = 2.0  # gigabytes


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)


class Bench:
    """A run that pauses after every step, so that several runs can take turns."""

    def __init__(self, folder: Path, gigabytes: float, while_training: bool):
        width = 1024 if gigabytes < 1 else 4096
        self.layers = max(1, round(gigabytes * 1e9 / 12 / width**2))
        self.rows = list(torch.randn(64, width, generator=torch.Generator().manual_seed(0)))
        self.config = Config(
            RunConfig(
                dir=str(folder), steps=10**6, global_batch=8, micro_batch=8, log_every=10**6, save_every=10**6,
                keep=1, trackers=(), save_async=while_training, quiet=True,
            )
        )  # fmt: skip
        self.steps = self._steps(width)
        next(self.steps)

    def _steps(self, width: int):
        with Run(self.config) as self.run:
            network = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(self.layers)))
            model, optimizer = self.run.prepare(network, OptimConfig())
            for batch in self.run.batches(self.rows, torch.stack):
                for micro in batch.micros(model):
                    self.run.backward(model(micro.inputs).square().mean(), micro)
                self.run.step(optimizer)
                yield

    def seconds(self, save: Callable[[], object]) -> tuple[float, float, float]:
        """Save once; return the seconds of the call, of the call and the next five steps, and until all is on disk."""
        next(self.steps)
        wait_for_gpu()
        start = time.perf_counter()
        save()
        called = time.perf_counter() - start
        for _ in range(5):
            next(self.steps)
        wait_for_gpu()
        taken = time.perf_counter() - start
        self.run.services.checkpoint_manager.wait()
        return called, taken, time.perf_counter() - start

    def by_accelerate(self, folder: Path) -> None:
        """Save with accelerate's save_state."""
        super(type(self.run.accelerator), self.run.accelerator).save_state(str(folder))

    def close(self) -> None:
        """Leave the run, and free its memory."""
        self.steps.close()
        del self.steps, self.run
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# By name: whether the run saves in the background, and what saves.
WAYS = {
    "while training": (True, lambda bench, folder: bench.run.save()),
    "at once": (False, lambda bench, folder: bench.run.save()),
    "accelerate save_state": (False, lambda bench, folder: bench.by_accelerate(folder)),
    "nothing": (False, lambda bench, folder: None),
}


def main() -> None:
    """Print the median seconds of each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    # All runs of a group are in memory at the same time.
    groups = [[*WAYS]] if options.gigabytes < TOGETHER else [["while training"], ["at once", "nothing"]]
    for group in groups:
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", ".")) as folder:
            measure(group, options.gigabytes, options.rounds, Path(folder))


def measure(group: list[str], gigabytes: float, rounds: int, folder: Path) -> None:
    """Let ways of saving take turns, and print what each took."""
    kinds = {WAYS[name][0] for name in group}
    benches = {kind: Bench(folder / f"run-{kind}", gigabytes, kind) for kind in sorted(kinds)}
    times_by_way: dict[str, list[tuple]] = {name: [] for name in group}
    for number in range(rounds + 1):
        for name in group:
            kind, save = WAYS[name]
            times = benches[kind].seconds(partial(save, benches[kind], folder / "accelerate"))
            shutil.rmtree(folder / "accelerate", ignore_errors=True)
            if number:  # the first round allocates, and is not counted
                times_by_way[name].append(times)
    weights = sum(p.numel() for p in benches[kinds.pop()].run.accelerator._models[0].parameters())
    for name, rows in times_by_way.items():
        call, steps, disk = (statistics.median(times) for times in zip(*rows, strict=True))
        row = {"saved": name, "gigabytes": weights * 12 / 1e9, "call_seconds": call, "with_5_steps_seconds": steps}
        print(json.dumps({**row, "until_on_disk_seconds": disk, "rounds": rounds}), flush=True)
    for bench in reversed(benches.values()):  # in reverse: each restores the signal handlers that it found
        bench.close()


if __name__ == "__main__":
    main()
