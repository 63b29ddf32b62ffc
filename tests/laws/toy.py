"""A small recipe that starts quickly: dropout, an evaluation, and steps that last PAUSE seconds (from the environment).

accelerate launch tests/laws/toy.py --run.dir runs/toy
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from app import OptimConfig, Run, RunConfig, parse

DATA = list(torch.randn(400, 4, generator=torch.Generator().manual_seed(0)))


@dataclass
class Config:
    """Forty steps of four micro-batches."""

    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=20, micro_batch=5, steps=40, log_every=1, save_every=100, trackers=()
        )
    )


def train(config: Config, before_step: Callable[[Run], None] = lambda run: None) -> dict[str, float]:
    """Train one run to its end, or until it is stopped."""
    pause = float(os.environ.get("PAUSE", "0"))
    with Run(config) as run:
        model, optimizer = run.prepare(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)), OptimConfig())
        for batch in run.batches(DATA, torch.stack):
            time.sleep(pause)
            before_step(run)
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                scores = run.scores_of()
                for micro in run.evaluation(model, DATA[:50], torch.stack):
                    scores.update(micro.weight, loss=model(micro.inputs).square().mean())
                run.log(scores.compute())
        return run.finish(model)


if __name__ == "__main__":
    train(parse(Config))
