"""Time what a run adds to a step, and check that its time and memory do not grow over 2,000 steps.

    python -m benchmarks.overhead [--steps 2000]

The model is one small layer, so that a step consists almost only of what surrounds the model. The same loop runs bare,
in a run that logs every tenth step, and in a run that logs, checks and tracks (tensorboard) every step.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import nn

from app import OptimConfig, Run, RunConfig

ROWS = list(torch.randn(4096, 16, generator=torch.Generator().manual_seed(0)))
BATCH, BLOCK = 8, 50


@dataclass
class Config:
    """A config with no field but `run`."""

    run: RunConfig = field(default_factory=RunConfig)


def ours(folder: str, **settings) -> Iterator[None]:
    """Train in a run, pausing after each step."""
    common = {"global_batch": BATCH, "micro_batch": BATCH, "steps": 10**6, "save_every": 10**6, "eval_every": 10**6}
    with Run(Config(RunConfig(dir=folder, threads=1, **common, **settings))) as run:
        model, optimizer = run.prepare(nn.Linear(16, 16), OptimConfig())
        for batch in run.batches(ROWS, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            yield


def bare() -> Iterator[None]:
    """Train without anything else, pausing after each step."""
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = torch.utils.data.DataLoader(ROWS, batch_size=BATCH)
    while True:
        for rows in loader:
            model(rows).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def main() -> None:
    """Print milliseconds a step, early and late, and the memory of the run that logs everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    blocks = max(4, parser.parse_args().steps // BLOCK)
    process = psutil.Process()
    with tempfile.TemporaryDirectory() as name:
        every = {"log_every": 1, "check_every": 1, "trackers": ("tensorboard",)}
        loops = {
            "bare": bare(),
            "a run": ours(str(Path(name, "run")), trackers=(), log_every=10),
            "a run, all each step": ours(str(Path(name, "all")), **every),
        }
        times, held = {key: [] for key in loops}, []
        for _ in range(blocks):
            for key, loop in loops.items():
                start = time.process_time()
                for _ in range(BLOCK):
                    next(loop)
                times[key].append((time.process_time() - start) / BLOCK * 1e3)
            held.append(process.memory_info().rss)
        for loop in reversed(loops.values()):  # as nested runs would end
            loop.close()
    quarter = blocks // 4
    for key, milliseconds in times.items():
        early, late = (statistics.median(part) for part in (milliseconds[1 : quarter + 1], milliseconds[-quarter:]))
        print(f"{key:<22} {early:.3f} ms of processor time a step at first, {late:.3f} ms at the end")
    print(f"memory held by all three: {held[quarter] / 1e6:.0f} MB after a quarter, {held[-1] / 1e6:.0f} MB at the end")


if __name__ == "__main__":
    main()
