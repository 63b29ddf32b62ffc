"""Train a small model, in one run after another: stopped.py FOLDER RUN[@SECONDS][:FLAG:VALUE ...] ...

Every step takes some seconds more. A run whose name begins with "hang" stops making progress in its fifth step, on the
last rank.
"""

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from app import OptimConfig, Run, RunConfig, parse

DATA = list(torch.randn(400, 4, generator=torch.Generator().manual_seed(0)))


@dataclass
class Config:
    """Forty steps, of four micro-batches."""

    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=20, micro_batch=5, steps=40, log_every=1, save_every=100, trackers=()
        )
    )


def train(config: Config, pause: float, hangs: bool) -> None:
    """Train one run to its end, or until it is stopped."""
    with Run(config) as run:
        model, optimizer = run.prepare(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)), OptimConfig())
        for batch in run.batches(DATA, torch.stack):
            time.sleep(pause)
            while hangs and run.steps_done == 5 and run.accelerator.is_last_process:
                time.sleep(1)
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
        run.finish(model)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / f"pid-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    for word in sys.argv[2:]:
        head, *flags = word.split(":")
        name, _, pause = head.partition("@")
        train(parse(Config, ["--run.dir", str(folder / name), *flags]), float(pause or 0), name.startswith("hang"))
