"""Train a small model with a chosen fault that only shows on several ranks, for `prove` to find."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import nn

from app import OptimConfig, Run, RunConfig, parse

ROWS = torch.randn(29, 8, generator=torch.Generator().manual_seed(0))


@dataclass
class Config:
    """Ten samples a step in micro-batches of 4, 3 and 3: an average over ranks would weight them wrongly."""

    fault: Literal[
        "none", "start", "samples", "augmentation", "loss", "weights", "average", "rate", "update", "buffer", "norm"
    ] = "none"
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-2))
    run: RunConfig = field(default_factory=lambda: RunConfig(global_batch=10, micro_batch=4, steps=40, trackers=()))


class Remembering(nn.LayerNorm):
    """A norm that remembers a mean of what its process has seen."""

    def __init__(self, width: int):
        super().__init__(width)
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x):
        if self.training:
            self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x)


class Model(nn.Module):
    """Two layers, a norm, and dropout."""

    def __init__(self, norm: type[nn.Module]):
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(8, 16), norm(16), nn.Linear(16, 1)

    def forward(self, x):
        return self.out(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.1, self.training)).squeeze(-1)


def main(config: Config) -> dict[str, float]:
    """Train, and return the scores, of which there are none."""
    with Run(config) as run:
        fault, rank, ranks = config.fault, run.accelerator.data_rank, run.accelerator.data_ranks
        own = np.random.default_rng(rank)
        if fault == "start":
            torch.rand(ranks - 1)
        norm = {"norm": nn.SyncBatchNorm, "buffer": Remembering}.get(fault, nn.LayerNorm)
        model, optimizer = run.prepare(Model(norm), config.optim)

        def augment(row, generator):
            drawn = own if fault == "augmentation" and rank else generator
            return row + 0.1 * torch.from_numpy(drawn.standard_normal(8)).float()

        weights = np.ones(len(ROWS))
        weights[::2] += (ranks - 1) * (fault == "weights")
        rows = ROWS[: len(ROWS) - (ranks - 1) * (fault == "samples")]
        for batch in run.batches(rows, torch.stack, weights=weights[: len(rows)], augment=augment):
            working = sum(not turn.idle for turn in batch._step.turns)
            for micro in batch.micros(model):
                loss = (model(micro.inputs) - micro.inputs.sum(1)).square().mean()
                if fault == "loss":
                    loss = loss * (1 + 0.01 * rank)
                if fault == "average":
                    run._opened.current.metrics.add("loss", loss, micro)
                    run.gradients.backward(
                        loss, micro._replace(weight=(not micro.idle) / working / ranks * batch._step.weight)
                    )
                else:
                    run.backward(loss, micro)
            if fault == "rate":
                optimizer.param_groups[0]["lr"] /= ranks
            run.step(optimizer)
            with torch.no_grad():
                next(model.parameters()).add_(1e-3 * (ranks - 1) * (fault == "update"))
        return run.finish(model)


if __name__ == "__main__":
    main(parse(Config))
