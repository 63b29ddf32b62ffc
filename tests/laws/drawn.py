"""Draw random numbers wherever a recipe can: in rows, collate, the forward pass of an evaluation, a step's body.

It makes three steps that change no weight, with an evaluation after the first and the second, and writes into a folder
rank-R.json: what each rank drew in the body of each step, before and after its micro-batches.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import dropout

from app import OptimConfig, Run, RunConfig
from app.training.scores.regression import Regression

PICTURES = torch.randn(23, 6, 6, generator=torch.Generator().manual_seed(0))


@dataclass
class Config:
    """Exact mode, so that all layouts have the same weights; five micro-batches a step, eight an evaluation."""

    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=10, micro_batch=2, steps=3, log_every=1, save_every=100, exact=True, trackers=()
        )
    )


class Pictures:
    """Rows that draw from numpy and Python when they are read."""

    def __len__(self) -> int:
        return len(PICTURES)

    def __getitem__(self, index: int) -> torch.Tensor:
        return PICTURES[index] + random.random() + torch.from_numpy(np.random.rand(6)).float()


def crop(rows: list[torch.Tensor]) -> torch.Tensor:
    """Cut a random part out of every row, as random crops do."""
    places = torch.randint(0, 3, (len(rows), 2)).tolist()
    return torch.stack([row[y : y + 4, x : x + 4] for row, (y, x) in zip(rows, places, strict=True)])


class Noisy(nn.Module):
    """A model that draws in evaluation too, as a VAE or a diffusion model does: one draw for each micro-batch."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(16, 8), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.first(x.flatten(1))
        return self.out(dropout(hidden + torch.randn(8), 0.5, training=True)).squeeze(-1)


def main(folder: Path, rank: str) -> None:
    """Train and evaluate."""
    config, drawn = Config(), []
    config.run.dir = str(folder / "run")
    with Run(config) as run:
        # A rate too small to change a weight, so that both evaluations see the same model.
        model, optimizer = run.prepare(Noisy(), OptimConfig(lr=1e-30, weight_decay=0))
        for batch in run.batches(Pictures(), crop):
            before = torch.rand(()).item()
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            if run.steps_done < 3:
                scores = run.scores_of(Regression())
                for micro in run.evaluation(model, Pictures(), crop, micro_batch=3):
                    made = model(micro.inputs)
                    scores.update(micro.weight, made, made.detach() * 0, loss=made.square().mean() + random.random())
                run.log(scores.compute())
            drawn.append([before, torch.rand(()).item(), random.random(), np.random.rand()])
        run.finish(model)
    (folder / f"rank-{rank}.json").write_text(json.dumps(drawn))
