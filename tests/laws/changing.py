"""Train models with buffers that training changes, stop and resume, and write each rank's final buffers.

changing.py FOLDER: writes FOLDER/rank-R.json: a hash of each buffer by run, and the errors of runs with a fault.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from app import OptimConfig, Run, RunConfig, UserError
from app.distributed.environment import report_user_errors
from app.sampling.hashing import hash_of

ROWS = list(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
STEPS, STOP = 6, 3


@dataclass
class Config:
    """Six micro-batches of two samples: as many for each of two or three ranks. Two steps of three are not logged."""

    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            global_batch=12, micro_batch=2, steps=STEPS, log_every=4, save_every=3, eval_every=2, keep=9, trackers=()
        )
    )


class Codebook(nn.Module):
    """Vector quantisation with codes from running averages (van den Oord et al. 2017, appendix A.1)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("counts", torch.ones(5, dtype=torch.float64))

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            chosen = nn.functional.one_hot(nearest, 5).float()
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            # A new tensor in its place, as much code does.
            self.codes = self.codes + 0.1 * (chosen.T @ x.detach() - chosen.sum(0).unsqueeze(1) * self.codes)
        return x + (self.codes[nearest] - x).detach()


class Queue(nn.Module):
    """A queue of the last rows, with a pointer and a flag for a full queue."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(7, 4))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("full", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        if self.training:
            for row in x.detach():
                self.rows[self.pointer % 7] = row
                self.pointer += 1
            self.full |= self.pointer >= 7
        return x + self.rows.mean(0)


class Model(nn.Module):
    """An input normaliser, a codebook, a queue, spectral norm and BatchNorm; and a buffer that never changes."""

    def __init__(self):
        super().__init__()
        self.normalise = nn.BatchNorm1d(4, affine=False, momentum=None)
        self.first, self.book, self.queue = nn.Linear(4, 4), Codebook(), Queue()
        self.mapped, self.norm, self.out = spectral_norm(nn.Linear(4, 4)), nn.InstanceNorm1d(1), nn.Linear(4, 1)
        self.running = nn.InstanceNorm1d(1, track_running_stats=True)
        self.register_buffer("constant", torch.ones(3))
        self.register_buffer("late", torch.zeros((), dtype=torch.int32))

    def forward(self, x):
        x = self.queue(self.book(self.first(self.normalise(x))))
        return self.out(self.mapped(self.running(x.unsqueeze(1)).squeeze(1))).squeeze(-1) * self.constant.mean()


def train(folder, prepared=lambda run, model: None, in_step=lambda run, model: None, **settings):
    """Train, or resume; return a hash of each buffer."""
    config = Config()
    config.run.dir = str(folder)
    for name, value in settings.items():
        setattr(config.run, name, value)
    with Run(config) as run:
        model, optimizer = run.prepare(Model(), OptimConfig(lr=0.05))
        plain = run.accelerator.unwrap_model(model)
        prepared(run, plain)
        for batch in run.batches(ROWS, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            in_step(run, plain)
            if run.due(config.run.eval_every):
                scores = run.scores_of()
                for micro in run.evaluation(model, ROWS[:9], torch.stack):
                    scores.update(micro.weight, loss=model(micro.inputs).square().mean())
                run.log(scores.compute())
        run.finish(model)
        return {name: hash_of(buffer) for name, buffer in plain.named_buffers()}


def apart(run, model):
    """Give the last rank another constant from the start."""
    if run.accelerator.is_last_process:
        model.constant[1] += 1e-6


def late(run, model):
    """Change a buffer late, on the last rank only."""
    if run.accelerator.is_last_process and run.steps_done == 2:
        model.late += 1


def main(folder, rank):
    """Run all cases."""
    told = {"whole": train(folder / "whole")}
    train(folder / "stopped", stop_at=STOP)
    told["stopped"] = train(folder / "stopped")
    told["late"] = train(folder / "late", in_step=late)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        try:
            train(folder / "apart", prepared=apart, check_every=1)
        except UserError as error:
            told["apart"] = str(error)
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    report_user_errors()
    main(Path(sys.argv[1]), os.environ.get("RANK", "0"))
