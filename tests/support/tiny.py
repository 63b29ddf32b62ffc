"""A run of a second, in the test's own process: a linear model on forty rows."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from app import OptimConfig, Run, RunConfig
from app.distributed.state.manifest import MANIFEST, checksum
from app.distributed.state.safe_reader import StateReader

DATA = list(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)


def train(folder, after=lambda run, model: None, rows=DATA, collate=torch.stack, width=4, **settings):
    """Train a small model for eight steps, saving after every second one; `after` is called at the end of each."""
    settings = {"global_batch": 10, "micro_batch": 5, "trackers": (), "epochs": 2.0, "save_every": 2, **settings}
    with Run(Config(RunConfig(dir=str(folder), **settings))) as run:
        model, optimizer = run.prepare(nn.Linear(width, 1), OptimConfig(lr=0.1))
        for batch in run.batches(rows, collate):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            after(run, model)
        return run.finish(model)


def train_and_score(folder, rows=DATA, lengths=None, scores=lambda step: {"eval/x": float(step)}, **settings):
    """Train a small model, four steps an epoch unless told otherwise; `scores` gives what a step's evaluation gives."""
    settings = {"global_batch": 10, "micro_batch": 5, "trackers": (), "epochs": 2.0, **settings}
    with Run(Config(RunConfig(dir=str(folder), **settings))) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
        for batch in run.batches(rows, torch.stack, lengths):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            if run.due(run.config.eval_every):
                run.log(scores(run.steps_done))
        return run.finish(model)


def saved(folder):
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-????????"))


def state_folder(folder, step) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}" / "state"


def enter(checkpoint: Path, name: str) -> None:
    """Enter a file as it is now in its checkpoint's manifest, as one who means harm would."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"][name] = {"size": (checkpoint / name).stat().st_size, "xxh3": checksum(checkpoint, name)}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def state_of(folder, step):
    tensors = {"models.0.weight": torch.empty(1, 4)}
    dcp.load(tensors, storage_reader=StateReader(state_folder(folder, step)), no_dist=True)
    return tensors["models.0.weight"]
