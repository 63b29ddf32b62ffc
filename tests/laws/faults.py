"""Make mistakes on several ranks, one after another in one launch, and write the error that each rank gets.

faults.py FOLDER CASE...: writes FOLDER/rank-R.json, which maps a case to its error or its result. Without a CASE,
all cases run.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torchmetrics.classification import MulticlassAUROC

from app import OptimConfig, Run, RunConfig, UserError
from app.data.config import TextData
from app.data.mixtures.joined import MixedRows
from app.data.mixtures.mix_file import read_mix
from app.distributed.environment import report_user_errors
from app.sampling.batch_plan import Step, Turn
from app.training.feeding.weighing import agreed

DATA = list(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)))
SPOILT = [*DATA[:7], torch.full((4,), torch.inf), *DATA[8:]]


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)


class Partly(nn.Module):
    """A model with an unused part."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


class Seldom(Partly):
    """A model with a part that only the first micro-batch on each rank uses."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return self.used(x) + (self.idle(x) if self.calls == 1 else 0)


class Swapped(nn.Module):
    """A model that takes two layers of one shape in the other order for some micro-batches."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        first, second = self.layers if x[0, 0] > 0 else reversed(self.layers)
        return second(first(x).tanh())


class Heads(nn.Module):
    """A model that runs two heads of one shape, of which the loss uses one."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        hidden = self.body(x).tanh()
        return [head(hidden) for head in self.heads][int(x[0, 0] > 0)]


class Tied(nn.Module):
    """A plain module with one weight under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def train(folder, model, body=lambda run, model: None, spoil=lambda run, model: None, rows=DATA, clip=1.0, **settings):
    """Train two steps, call `spoil` after each, and return what `body` returns after the last."""
    settings = {"global_batch": 10, "micro_batch": 5, "epochs": 1.0, "trackers": (), **settings}
    with Run(Config(RunConfig(dir=str(folder), **settings))) as run:
        model, optimizer = run.prepare(model, OptimConfig(clip=clip))
        for batch in run.batches(rows, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            spoil(run, model)
        result = body(run, model)
        run.finish(model)
    return result


def auroc(run, model):
    """Score four samples in one micro-batch, so that one rank has none."""
    scores = run.scores_of(auroc=MulticlassAUROC(3))
    labels = [0, 1, 2, 1]
    for micro in run.evaluation(model, list(zip(DATA, labels, strict=False))[:4], collate=list):
        rows, targets = zip(*micro.inputs, strict=True)
        scores.update(micro.weight, model(torch.stack(rows)).softmax(-1), torch.tensor(targets))
    return [scores.compute(), scores.compute()]


def drift(run, model):
    """Change one weight on the last rank."""
    if run.accelerator.is_last_process:
        with torch.no_grad():
            model.module[1].bias[2] += 1e-6


def skipping(folder):
    """Train on data with a sample of infinities and skip its steps; return how many were skipped."""
    torch.manual_seed(0)
    how = {"rows": SPOILT, "epochs": 3.0, "log_every": 1, "nonfinite": "skip"}
    return train(folder, nn.Linear(4, 3), body=lambda run, model: run.scores["skipped_steps"], **how)


def stopping(folder):
    """Reach a sample of infinities in a step neither logged nor clipped; return the error and the steps made."""
    made = []
    how = {"epochs": 6.0, "global_batch": 3, "micro_batch": 1, "log_every": 99, "save_every": 99, "check_every": 99}
    how |= {"rows": SPOILT, "clip": 0.0, "spoil": lambda run, model: made.append(run.steps_done)}
    try:
        train(folder, nn.Linear(4, 3), **how)
    except UserError as error:
        return str(error), len(made)


def not_shared(home):
    """Give each rank its own folder, as on machines without a shared disk."""
    home.mkdir()
    os.chdir(home)
    return train("here", nn.Linear(4, 3))


def left_early(run, model):
    """Leave a loop over micro-batches before its last one, and begin another."""
    batch = run._opened.current.batch
    for _ in batch.micros(model):
        break
    for _ in batch.micros(model):
        pass


def static(run, model):
    """Ask DDP for a static graph, and prepare another model."""
    run.accelerator.ddp_handler.static_graph = True
    run.prepare(nn.Linear(2, 2), OptimConfig())


def mixture(folder, rank):
    """Return the rows of two sources, mixed as a file says that is another one on each rank."""
    file = folder / f"mix-{rank}.yaml"
    file.write_text(f"sources: [{{name: a, path: a, weight: {1 + rank}}}, {{name: b, path: b, weight: 1}}]")
    return MixedRows(read_mix(TextData(), str(file)), [DATA[:10], DATA[10:]])


class Broken(list):
    """Rows, one of which cannot be read."""

    def __getitem__(self, row):
        if row == 12:
            raise UserError(f"row {row} cannot be read")
        return super().__getitem__(row)


def apart(folder, rows):
    """Train as if each rank were on its own machine."""
    before = dict(os.environ)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    try:
        return train(folder, nn.Linear(4, 3), rows=rows)
    finally:
        os.environ.clear()
        os.environ.update(before)


def unlike(rank):
    """Read a micro-batch on two ranks that compute it together, of which one can read fewer samples of it."""
    together = SimpleNamespace(ranks_per_data_rank=2, process_index=rank, device=torch.device("cpu"))
    ids = np.arange(4)

    def weighed(ids, missing):
        turn = Turn(0, ids, np.zeros(len(ids), int), 2.0, missing=missing)
        (step,) = agreed(iter([Step(0, [turn, turn._replace(index=1, idle=True, missing=0)], 2, 0.0)]), together)
        return step.weight, step.missing

    alike = weighed(ids, 1)
    try:
        return [alike, weighed(ids[rank:], 0)]  # of the same weight
    except UserError as error:
        return [alike, str(error)]


def main(folder, rank, chosen):
    """Run the chosen cases, or all."""
    report_user_errors()
    cases = {
        "unused": lambda: train(folder / "unused", Partly()),
        "seldom": lambda: train(folder / "seldom", Seldom()),
        "static": lambda: train(folder / "static", nn.Linear(4, 3), body=static),
        "swapped": lambda: train(folder / "swapped", Swapped()),
        "heads": lambda: train(folder / "heads", Heads(), micro_batch=1),
        "left early": lambda: train(folder / "left", nn.Linear(4, 3), body=left_early),
        "auroc": lambda: train(folder / "auroc", nn.Linear(4, 3), body=auroc),
        "tied": lambda: train(folder / "tied", Tied()),
        "batchnorm": lambda: train(folder / "batchnorm", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
        "drift": lambda: train(folder / "drift", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), spoil=drift),
        "other data": lambda: train(folder / "other", nn.Linear(4, 3), rows=DATA[: 20 - rank]),
        "other mix": lambda: train(folder / "other mix", nn.Linear(4, 3), rows=mixture(folder, rank)),
        "stopping": lambda: stopping(folder / "stopping"),
        "other contents": lambda: apart(folder / "contents", [*DATA[:12], DATA[12] + rank, *DATA[13:]]),
        "broken rows": lambda: apart(folder / "broken", Broken(DATA) if rank else DATA),
        "skipping": lambda: skipping(folder / "skipping"),
        "unlike": lambda: unlike(rank),
        "not shared": lambda: not_shared(folder / f"machine-{rank}"),
    }
    told = {}
    for case in chosen or cases:
        try:
            told[case] = cases[case]()
        except UserError as error:
            told[case] = str(error)
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]), sys.argv[2:])
