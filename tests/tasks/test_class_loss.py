"""app.tasks.class_loss: torch's losses, and the same sum however samples are cut into micro-batches."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from app import UserError
from app.tasks.class_loss import ClassLoss, ClassLossConfig, check_problem

NAMES = ["a", "b", "c", "d"]
VALUES = np.array([0] * 8 + [1] * 4 + [2] * 2)  # nobody is of class d
LABELS = torch.from_numpy(VALUES)
LOGITS = torch.randn(len(VALUES), 4, generator=torch.Generator().manual_seed(0)) * 2


def loss(**fields) -> ClassLoss:
    return ClassLoss(ClassLossConfig(**fields), NAMES, VALUES)


def test_they_are_torchs():
    for smoothing in (0.0, 0.1):
        found = loss(smoothing=smoothing)(LOGITS, {"labels": LABELS})
        torch.testing.assert_close(found, cross_entropy(LOGITS, LABELS, label_smoothing=smoothing))
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0])
    found = loss(weights=("1", "2", "0.5", "3"))(LOGITS, {"labels": LABELS})
    torch.testing.assert_close(found, cross_entropy(LOGITS, LABELS, weights))


def test_focal_loss():
    sure = LOGITS.softmax(1)[torch.arange(len(LABELS)), LABELS]
    expected = (-((1 - sure) ** 2) * sure.log()).mean()
    torch.testing.assert_close(loss(focal=2)(LOGITS, {"labels": LABELS}), expected)


def test_balanced_classes_have_the_same_total_weight():
    balanced = loss(weights=("balanced",))
    totals = [balanced.weights[i == VALUES].sum() for i in range(3)]
    assert totals == pytest.approx([len(VALUES) / 3] * 3) and balanced.of_classes[3] == 0
    assert loss().weights is None


def test_micro_batches_add_up():
    """By the weights that run.batches gets, the mean of parts is that of the whole."""
    balanced = loss(weights=("balanced",), smoothing=0.1, focal=1)
    whole = balanced(LOGITS, {"labels": LABELS})
    parts = [slice(0, 5), slice(5, 6), slice(6, 14)]
    shares = [balanced.weights[part].sum() / balanced.weights.sum() for part in parts]
    found = sum(s * balanced(LOGITS[part], {"labels": LABELS[part]}) for s, part in zip(shares, parts, strict=True))
    torch.testing.assert_close(found, whole)


def test_mixed_labels():
    other, share = LABELS.flip(0), torch.linspace(0, 1, len(LABELS))
    soft = torch.zeros(len(LABELS), 4).scatter_(1, LABELS[:, None], share[:, None])
    soft = soft.scatter_add(1, other[:, None], (1 - share)[:, None])
    found = loss(smoothing=0.1)(LOGITS, {"labels": LABELS, "other_labels": other, "share": share})
    torch.testing.assert_close(found, cross_entropy(LOGITS, soft, label_smoothing=0.1))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"smoothing": 1.0}, "--loss.smoothing 1.0: must be from 0 to below 1"),
        ({"focal": float("inf")}, "--loss.focal inf: give a power"),
        ({"weights": ("1", "2")}, "one number for each of the 4 classes, in this order: a, b, c, d"),
        ({"weights": ("even",)}, "--loss.weights even: give balanced"),
        ({"weights": ("0", "0", "0", "1")}, "--loss.weights 0 0 0 1"),  # nothing would be learnt
        ({"weights": ("1", "1", "nan", "1")}, "--loss.weights"),
    ],
)
def test_what_does_not_work(fields, said):
    with pytest.raises(UserError, match=said):
        loss(**fields)


def test_labels_that_are_no_classes():
    check_problem("single_label_classification")
    with pytest.raises(UserError, match="these labels are a multi label classification"):
        check_problem("multi_label_classification")


def test_weights_of_mixed_labels():
    """Each label counts with the weight of its own class."""
    weights = np.array([1.0, 2.0, 0.5, 3.0])
    weighted, plain = loss(weights=("1", "2", "0.5", "3")), loss()
    other, share = LABELS.flip(0), torch.full((len(LABELS),), 0.25)
    expected = 0.0
    for i in range(len(LABELS)):
        one, two = (plain(LOGITS[i : i + 1], {"labels": labels[i : i + 1]}) for labels in (LABELS, other))
        expected += 0.25 * weights[LABELS[i]] * one + 0.75 * weights[other[i]] * two
    found = weighted(LOGITS, {"labels": LABELS, "other_labels": other, "share": share})
    torch.testing.assert_close(found, expected.float() / weights[VALUES].sum().astype(np.float32))


@pytest.mark.parametrize("fields", [{"focal": 0.5}, {"weights": ("1", "0", "1", "1")}])
def test_extremes_stay_finite(fields):
    """A sample of which the model is sure, and a micro-batch of a class without weight."""
    logits = torch.tensor([[-100.0, 100.0, 0.0, 0.0]], requires_grad=True)
    found = loss(**fields)(logits, {"labels": torch.tensor([1])})
    found.backward()
    assert found.isfinite() and logits.grad.isfinite().all()
