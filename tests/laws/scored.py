"""Score random predictions with torchmetrics of every kind. FOLDER/run has the scores."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError, Metric, PearsonCorrCoef
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassAUROC
from torchmetrics.regression import R2Score
from torchmetrics.text import Perplexity

from app import OptimConfig, Run, RunConfig

SIZE, CLASSES = 101, 5
_random = torch.Generator().manual_seed(0)
LOGITS = torch.randn(SIZE, CLASSES, generator=_random)
TARGETS = torch.randint(CLASSES, (SIZE,), generator=_random)


@dataclass
class Config:
    """One step; what counts is its evaluation."""

    run: RunConfig = field(
        default_factory=lambda: RunConfig(global_batch=20, micro_batch=3, steps=1, log_every=1, trackers=())
    )


class Boxes(Metric):
    """Takes a list of dictionaries, as metrics of detection do; its value depends on the order of samples."""

    def __init__(self):
        super().__init__()
        self.add_state("found", default=[], dist_reduce_fx=None)

    def update(self, predicted):
        self.found += [each["boxes"].sum() * (1 + each["labels"]) for each in predicted]

    def compute(self):
        total = torch.zeros(())
        for each in self.found:
            total = total * 0.9 + each
        return total


def kinds() -> dict[str, tuple]:
    """Return a metric of each kind with the function that makes its arguments from logits and targets."""
    numbers = lambda x, y: (x[:, 0].square() * 1e3, x[:, 1])  # noqa: E731
    chosen = lambda x, y: (x.sigmoid()[:, 0], (y == 0).int())  # noqa: E731
    return {
        "mse": (MeanSquaredError(), numbers),
        "r2": (R2Score(), numbers),
        "r2_of_two": (R2Score(), lambda x, y: (x[:, :2], x[:, 2:4])),
        "boxes": (
            Boxes(),
            lambda x, y: ([{"boxes": row.view(1, -1), "labels": label} for row, label in zip(x, y, strict=True)],),
        ),
        "pearson": (PearsonCorrCoef(), numbers),
        "accuracy": (MulticlassAccuracy(CLASSES), lambda x, y: (x, y)),
        "auroc": (BinaryAUROC(), chosen),
        "auroc_binned": (MulticlassAUROC(CLASSES, thresholds=20), lambda x, y: (x.softmax(1), y)),
        "perplexity": (Perplexity(), lambda x, y: (x[:, None], y[:, None])),
        "mean": (MeanMetric(), lambda x, y: (x[:, 0],)),
    }


def main(folder: Path) -> None:
    """Train one step and evaluate."""
    config = Config()
    config.run.dir = str(folder / "run")
    with Run(config) as run:
        model, optimizer = run.prepare(nn.Linear(CLASSES, 1), OptimConfig(lr=0.1))
        for batch in run.batches(LOGITS, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            scored = {name: (run.scores_of(**{name: metric}), make) for name, (metric, make) in kinds().items()}
            for micro in run.evaluation(model, LOGITS, torch.stack, micro_batch=3):
                for scores, make in scored.values():
                    scores.update(micro.weight, *make(LOGITS[micro.ids], TARGETS[micro.ids]))
            found = [{k: v for scores, _ in scored.values() for k, v in scores.compute().items()} for _ in range(2)]
            assert found[0] == found[1]
            run.log(found[0])
        run.finish(model)
