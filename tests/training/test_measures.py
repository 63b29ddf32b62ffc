"""app.training.scores: torchmetrics' values, and the same bits however the samples are spread."""

import importlib
import re

import pytest
import torch
from support.launching import ROOT
from torchmetrics import MeanSquaredError, PearsonCorrCoef
from torchmetrics.classification import (
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelF1Score,
)

from app.training.scores.base import Metric
from app.training.scores.classification import Classification, MultiLabel
from app.training.scores.collecting import Scores, renamed
from app.training.scores.detection import AveragePrecision
from app.training.scores.regression import Regression
from app.training.scores.remarks import Remarks
from app.training.scores.segmentation import Overlap
from app.training.scores.tags import EntityScores, TokenScores

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


def update(metric, predicted, target):
    metric.update(predicted, target)
    return metric


def boxes(count: int, label: int = 0) -> dict[str, torch.Tensor]:
    corners = torch.tensor([[0.0, 0.0, 9.0, 9.0]]).repeat(count, 1)
    return {"boxes": corners, "scores": torch.full((count,), 0.9), "labels": torch.full((count,), label)}


ONE, OTHER = torch.tensor([[2.0, -1.0]]), torch.tensor([[-1.0, 2.0]])
# Of each metric: an evaluation that is worth little, and what is said of it; and one that is not.
DEGENERATE = {
    "Classification": (
        lambda: update(Classification(["no", "yes"]), torch.cat([ONE, ONE]), torch.tensor([0, 1])),
        "every prediction is no, one of 2 classes",
        lambda: update(Classification(["no", "yes"]), torch.cat([ONE, OTHER]), torch.tensor([1, 0])),
    ),
    "TokenScores": (
        lambda: update(TokenScores(["no", "yes"]), torch.cat([ONE, ONE])[None], torch.tensor([[0, 1]])),
        "every prediction is no",
        lambda: update(TokenScores(["no", "yes"]), torch.cat([ONE, OTHER])[None], torch.tensor([[1, 0]])),
    ),
    "MultiLabel": (
        lambda: update(MultiLabel(2), torch.tensor([[-1.0, -2.0]]), torch.tensor([[1.0, 0.0]])),
        "no label is predicted",
        lambda: update(MultiLabel(2), torch.tensor([[1.0, -2.0]]), torch.tensor([[0.0, 1.0]])),
    ),
    "Regression": (
        lambda: update(Regression(), torch.tensor([3.0, 3.001, 3.0]), torch.tensor([1.0, 3.0, 5.0])),
        "predictions are nearly constant",
        lambda: update(Regression(), torch.tensor([3.0, 3.5, 3.0]), torch.tensor([1.0, 3.0, 5.0])),
    ),
    "EntityScores": (
        lambda: update(EntityScores(["O", "B-a"]), torch.cat([ONE, ONE])[None], torch.tensor([[0, 1]])),
        "no entity is found, and there are 1",
        lambda: update(EntityScores(["O", "B-a"]), torch.cat([ONE, OTHER])[None], torch.tensor([[1, 0]])),
    ),
    "AveragePrecision": (
        lambda: update(AveragePrecision(["a"]), [boxes(0)], [boxes(2)]),
        "no box is found, and there are 2",
        lambda: update(AveragePrecision(["a"]), [boxes(1)], [boxes(2)]),
    ),
    "Overlap": (
        lambda: update(Overlap(["back", "cell"]), torch.zeros(1, 4), torch.tensor([[0, 0, 1, 1]])),
        "no pixel is right of cell",
        lambda: update(Overlap(["back", "cell"]), torch.tensor([[0, 1, 1, 0]]), torch.tensor([[0, 0, 1, 1]])),
    ),
}
# A reward, a distance, a share of tokens or a probability is a result like any other.
NEVER = {"Calibration", "TokenAccuracy", "PreferenceScores", "PixelFrechet", "Summed", "Repeated"}


def kinds_of(base: type) -> set[type]:
    return {kind for each in base.__subclasses__() for kind in (each, *kinds_of(each))}


@pytest.fixture(scope="module")
def metrics() -> dict[str, type[Metric]]:
    """Return every metric of the app by its name."""
    for module in sorted((ROOT / "app/training/scores").glob("*.py")):
        importlib.import_module(f"app.training.scores.{module.stem}")
    return {kind.__name__: kind for kind in kinds_of(Metric) if kind.__module__.startswith("app.")}


def test_each_metric_knows_what_is_worth_little(metrics):
    """A metric of the app without a line above is found here."""
    assert metrics.keys() == DEGENERATE.keys() | NEVER


def test_each_metric_has_scores_or_a_report_and_says_which(metrics):
    for name, kind in metrics.items():
        told = [
            getattr(kind, method) for method in ("scores", "report") if getattr(kind, method) != getattr(Metric, method)
        ]
        assert told, f"{name} has neither scores nor a report"
        for method in told:
            assert (method.__doc__ or "").strip(), f"{method.__qualname__} does not say what it returns"


def test_a_metric_that_tells_nothing_is_an_error():
    """It is one that forgot to define scores; one that only reports has none."""

    class Silent(Metric):
        pass

    class Told(Metric):
        def report(self):
            return {"sizes": self.total}

    with pytest.raises(NotImplementedError, match="Silent has neither scores nor a report"):
        Silent(1).alone()
    assert Told(1).alone() == {}


def test_scores_stand_in_their_folder():
    """No room but app/training/scores has a metric."""
    base = re.compile(r"class \w+\((Metric|Classification|Regression|Overlap)\)")
    elsewhere = [
        str(module.relative_to(ROOT))
        for folder in ("app", "recipes")
        for module in (ROOT / folder).rglob("*.py")
        if ROOT / "app/training/scores" not in module.parents and base.search(module.read_text())
    ]
    assert elsewhere == []


@pytest.mark.parametrize("name", DEGENERATE)
def test_what_is_worth_little_is_said(name):
    make, said, sound = DEGENERATE[name]
    metric, other = make(), sound()
    assert type(metric).__name__ == name
    metric.alone(), other.alone()
    assert metric.fault().startswith(said) and "--optim.lr" in metric.fault()
    assert other.fault() == ""


def test_remarks_have_the_names_that_the_scores_get():
    """Of each set, and what was said of an earlier evaluation is gone."""
    remarks = Remarks()
    make, said, sound = DEGENERATE["Classification"]
    for metric in (make(), sound()):
        names = list(metric.alone())
        remarks.add(metric, names, "eval/")
        with remarks.renamed(lambda names: renamed(names, "eval", "hard")):
            remarks.add(metric, names, "eval/")
        told = [f"{name}: {said}" for name in ("eval", "eval-hard")] if said else []
        assert [line.startswith(start) for line, start in zip(remarks.lines(), told, strict=True)] == [True] * len(told)
        said = ""
    assert remarks.meanings["eval-hard/f1"] == remarks.meanings["eval/f1"] == "mean over the classes"
    assert remarks.meanings["eval/f1_positive"] == "of the class yes"


def test_two_classes_have_the_f1_of_the_second():
    logits, target = torch.cat([ONE, OTHER, OTHER, ONE]), torch.tensor([0, 1, 0, 1])
    found = update(Classification(2), logits, target).alone()
    assert found["f1_positive"] == BinaryF1Score()(logits.argmax(1), target).item()
    assert "f1_positive" not in update(Classification(3), torch.eye(3), torch.arange(3)).alone()


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
    scores = Scores(torch.device("cpu"), Remarks(), rows=Counted())
    for size in (3, 2):
        scores.update(float(size), torch.zeros(size), torch.zeros(size))
    assert scores.compute() == {"eval/rows": 5, "eval/samples": 5}
