"""Time how long training waits for a checkpoint of 600 MB: written beside it, at once, and by accelerate's save_state.

    python -m benchmarks.saving [--rounds 5]

One process, on a GPU where there is one: a model of 50 million parameters and the state of AdamW. The ways take turns.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from app import OptimConfig, Run, RunConfig
from benchmarks.gate import wait_for_gpu

DATA = list(torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)))


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)


class Bench:
    """A run that pauses after every step, so that several can take turns."""

    def __init__(self, folder: Path, beside: bool):
        self.config = Config(
            RunConfig(
                dir=str(folder), steps=10**6, global_batch=8, micro_batch=8, log_every=10**6, save_every=10**6,
                keep=1, trackers=(), save_async=beside,
            )
        )  # fmt: skip
        self.steps = self._steps()
        next(self.steps)

    def _steps(self):
        with Run(self.config) as self.run:
            model, optimizer = self.run.prepare(
                nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(48))), OptimConfig()
            )
            for batch in self.run.batches(DATA, torch.stack):
                for micro in batch.micros(model):
                    self.run.backward(model(micro.inputs).square().mean(), micro)
                self.run.step(optimizer)
                yield

    def seconds(self, save) -> tuple[float, float]:
        """Save once; returns the seconds that the call took, and those of it and the five steps behind it."""
        next(self.steps)
        wait_for_gpu()
        start = time.perf_counter()
        save()
        called = time.perf_counter() - start
        for _ in range(5):
            next(self.steps)
        wait_for_gpu()
        taken = time.perf_counter() - start
        self.run.saving.wait()
        return called, taken


def main() -> None:
    """Print the medians of the seconds that each way takes, and their ratios to saving at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(dir=".") as folder:
        beside, at_once = (Bench(Path(folder, name), name == "beside") for name in ("beside", "at-once"))
        contents = {
            "beside training": (beside, lambda: beside.run.save()),
            "at once": (at_once, lambda: at_once.run.save()),
            "accelerate save_state": (
                at_once,
                lambda: super(type(at_once.run.accelerator), at_once.run.accelerator).save_state(
                    f"{folder}/accelerate"
                ),
            ),
            "nothing": (at_once, lambda: None),
        }
        found = {name: [] for name in contents}
        for number in range(rounds + 1):
            for name, (bench, save) in contents.items():
                times = bench.seconds(save)
                if number:  # the first round allocates
                    found[name].append(times)
        state = sum(f.stat().st_size for f in Path(folder, "at-once", "checkpoints").rglob("*") if f.is_file())
    print(f"{state / 1e6:.0f} MB of state; medians of {rounds} rounds")
    print(f"{'':24}{'the call':>12}{'of at once':>12}{'and 5 steps':>14}")
    calls = {name: statistics.median(times[0] for times in rows) for name, rows in found.items()}
    for name, rows in found.items():
        loop = statistics.median(times[1] for times in rows)
        print(f"{name:24}{calls[name]:10.2f} s{calls[name] / calls['at once']:12.2f}{loop:12.2f} s")


if __name__ == "__main__":
    main()
