"""Make mistakes on several ranks, one after another in one launch, and write down what each rank is told.

faults.py FOLDER: writes FOLDER/rank-R.json, from the name of a case to an error's words, or to a result.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torchmetrics.classification import MulticlassAUROC

from app import OptimConfig, Run, RunConfig, UserError
from app.launch import report_user_errors

DATA = list(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)))
FOLDER = Path(sys.argv[1])


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)


class Partly(nn.Module):
    """A model with a part that is not used."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


class Tied(nn.Module):
    """A plain module with one weight under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def train(name, model, folder=None, body=lambda run, model: None, **settings):
    """Train for two steps and return what `body` returns after them."""
    settings = {"global_batch": 10, "micro_batch": 5, "epochs": 1.0, "trackers": (), **settings}
    with Run(Config(RunConfig(dir=str(folder or FOLDER / name), **settings))) as run:
        model, optimizer = run.prepare(model, OptimConfig())
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
        result = body(run, model)
        run.finish(model)
    return result


def auroc(run, model):
    """Score four samples, which are one micro-batch: a rank has none."""
    scores = run.scores_of(auroc=MulticlassAUROC(3))
    labels = [0, 1, 2, 1]
    for micro in run.evaluation(model, list(zip(DATA, labels, strict=False))[:4], collate=list):
        rows, targets = zip(*micro.inputs, strict=True)
        scores.update(micro.weight, model(torch.stack(rows)).softmax(-1), torch.tensor(targets))
    return [scores.compute(), scores.compute()]


def not_shared():
    """Give each rank a folder of its own, as machines without a common disk have them."""
    home = FOLDER / f"machine-{os.environ['RANK']}"
    home.mkdir()
    os.chdir(home)
    return train("", nn.Linear(4, 3), folder="here")


if __name__ == "__main__":
    report_user_errors()
    cases = {
        "unused": lambda: train("unused", Partly()),
        "auroc": lambda: train("auroc", nn.Linear(4, 3), body=auroc),
        "tied": lambda: train("tied", Tied()),
        "batchnorm": lambda: train("batchnorm", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
        "not shared": not_shared,
    }
    told = {}
    for case, call in cases.items():
        try:
            told[case] = call()
        except UserError as error:
            told[case] = str(error)
    (FOLDER / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(told))
