"""Tell two spirals apart.

accelerate launch spirals.py
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from app import OptimConfig, Run, RunConfig, parse
from app.training.metrics import Classification, Metric


@dataclass
class Config:
    """Tell two spirals apart."""

    focus: float = 2.0
    """How much less a point counts if the model is sure of it already. 0: cross-entropy."""
    run: RunConfig = field(
        default_factory=lambda: RunConfig(epochs=15, global_batch=64, micro_batch=16, trackers=(), threads=1)
    )
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-2))


class Spirals:
    """Points of two arms. A data set is anything that has a length and is indexed by sample."""

    def __init__(self, count: int, seed: int):
        random = np.random.default_rng(seed)
        angles = 3 * np.pi * np.sqrt(random.random(count))
        self.classes = random.integers(0, 2, count)
        turned = angles + np.pi * self.classes
        self.points = np.stack([angles * np.cos(turned), angles * np.sin(turned)], axis=1) / 10
        self.points += random.normal(0, 0.02, self.points.shape)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int):
        return self.points[index], self.classes[index]


def collate(rows):
    """Make model inputs of the rows of a micro-batch."""
    points, classes = zip(*rows)
    return torch.tensor(np.array(points), dtype=torch.float32), torch.tensor(classes)


def focal_loss(logits, truth, focus):
    """Return the mean over the micro-batch."""
    each = cross_entropy(logits, truth, reduction="none")
    return ((1 - torch.exp(-each)) ** focus * each).mean()


class Confident(Metric):
    """The share of points of which the model is nearly sure."""

    def __init__(self):
        super().__init__(2)  # float64 sums over all micro-batches and processes: sure points, all points

    def update(self, predicted, target):
        """Add a micro-batch: what `scores.update` got after the weight, here logits and classes."""
        sure = predicted.softmax(1).amax(1) > 0.99
        self.state += torch.stack([sure.sum(), torch.tensor(len(sure), device=sure.device)])

    def scores(self):
        """Divide last, when `self.total` has the sums of all processes."""
        sure, points = self.total
        return {"confident": sure / points}


def evaluate(run, model, points, config):
    scores = run.scores_of(Classification(["first", "second"]), Confident())
    for micro in run.evaluation(model, points, collate):
        inputs, truth = micro.inputs
        logits = model(inputs)
        scores.update(micro.weight, logits, truth, loss=focal_loss(logits, truth, config.focus))
    return scores.compute()


def build_model():
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def main(config):
    with Run(config) as run:
        run.keep_best("eval/accuracy")
        train, held_out = Spirals(2000, seed=0), Spirals(501, seed=1)
        model, optimizer = run.prepare(build_model(), config.optim)
        for batch in run.batches(train, collate):
            for micro in batch.micros(model):
                inputs, truth = micro.inputs
                run.backward(focal_loss(model(inputs), truth, config.focus), micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, held_out, config)
        return run.finish(model)


if __name__ == "__main__":
    main(parse(Config))
