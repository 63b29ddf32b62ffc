"""app.training.metrics: torchmetrics' values, and the same bits however the samples are spread."""

import pytest
import torch
from torchmetrics import MeanSquaredError, PearsonCorrCoef
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelF1Score,
)

from app.training.metrics import Classification, MultiLabel, Regression
from app.training.scores import Scores

ROWS = 203


def draw(kind):
    """Draw logits and targets; classes 5 and 6 never occur, and label 2 is neither there nor found."""
    random = torch.Generator().manual_seed(1)
    if kind == "classes":
        logits = torch.randn(ROWS, 7, generator=random)
        logits[:, 6] -= 9
        return logits, torch.randint(0, 5, (ROWS,), generator=random)
    if kind == "pixels":
        return torch.randn(ROWS, 3, 4, 5, generator=random), torch.randint(0, 3, (ROWS, 4, 5), generator=random)
    if kind == "labels":
        logits, target = torch.randn(ROWS, 3, generator=random), torch.rand(ROWS, 3, generator=random) < 0.4
        logits[:, 2], target[:, 2] = -1, False
        return logits, target.float()
    shape = (ROWS,) if kind == "amount" else (ROWS, 2)
    target = torch.randn(shape, generator=random) * 3 + 7
    return target + torch.randn(shape, generator=random), target


MEASURES = {
    "classes": (
        lambda: Classification(7, top=2),
        {
            "accuracy": MulticlassAccuracy(7, average="micro"),
            "f1": MulticlassF1Score(7, average="macro"),
            "top2": MulticlassAccuracy(7, average="micro", top_k=2),
        },
    ),
    "pixels": (
        lambda: Classification(3),
        {"accuracy": MulticlassAccuracy(3, average="micro"), "f1": MulticlassF1Score(3, average="macro")},
    ),
    "labels": (
        lambda: MultiLabel(3),
        {"accuracy": MultilabelAccuracy(3, average="micro"), "f1": MultilabelF1Score(3, average="macro")},
    ),
    "amount": (Regression, {"mse": MeanSquaredError(), "pearson": PearsonCorrCoef()}),
    "amounts": (Regression, {"mse": MeanSquaredError()}),
}


def scores_of(make, state):
    measure = make()
    measure.state = state
    return measure.alone()


def state_of(make, logits, target, sizes):
    measure = make()
    for piece in zip(logits.split(sizes), target.split(sizes), strict=True):
        measure.update(*piece)
    return measure.state


@pytest.mark.parametrize("kind", MEASURES)
def test_scores_are_those_of_torchmetrics(kind):
    make, metrics = MEASURES[kind]
    logits, target = draw(kind)
    found = scores_of(make, state_of(make, logits, target, [100, 103]))
    expected = {}
    for name, metric in metrics.items():
        predicted = logits.sigmoid() if kind == "labels" else logits
        expected[name] = metric(predicted, target.int() if kind == "labels" else target).item()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", MEASURES)
def test_bits_do_not_depend_on_how_samples_are_spread(kind):
    """Over pieces of other sizes, and over ranks whose states are added up in another order."""
    make, _ = MEASURES[kind]
    logits, target = draw(kind)
    whole = scores_of(make, state_of(make, logits, target, [ROWS]))
    ranks = [state_of(make, a, b, 10) for a, b in zip(logits.split(60), target.split(60), strict=True)]
    for states in (ranks, ranks[::-1]):
        assert scores_of(make, sum(states[1:], states[0])) == whole


def test_the_confusion_matrix():
    logits, target = draw("classes")
    measure = Classification(7)
    measure.update(logits, target)
    measure.alone()
    assert torch.equal(measure.matrix().long(), MulticlassConfusionMatrix(7)(logits, target))


@pytest.mark.parametrize("target", [torch.tensor([2.0]), torch.tensor([3.1, 3.1, 3.1])])
def test_no_correlation_where_nothing_varies(target):
    state = state_of(Regression, target + torch.arange(len(target)), target, len(target))
    assert scores_of(Regression, state).keys() == {"mse"}


class Counted:
    """What a metric must have, and no more."""

    __slots__ = ("rows",)

    def __init__(self):
        self.rows = 0

    def to(self, device):
        """Move in place, and return nothing, as it may."""

    def update(self, predicted, target):
        self.rows += len(target)

    def compute(self):
        return self.rows


def test_any_object_that_updates_computes_and_moves_is_a_metric():
    """It need not be one of torchmetrics, and not know what those keep."""
    scores = Scores(torch.device("cpu"), rows=Counted())
    for size in (3, 2):
        scores.update(float(size), torch.zeros(size), torch.zeros(size))
    assert scores.compute() == {"eval/rows": 5, "eval/samples": 5}
