"""The loss of a classifier: cross-entropy, with smoothed labels, weights of classes, focus, and mixed labels."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from app.config import setting
from app.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

BALANCED = "balanced"


@dataclass
class ClassLoss:
    """The loss of a class for each sample."""

    smoothing: float = setting(0.0, at_least=0)
    """Label smoothing: the share of each label that is spread evenly over all classes."""
    weights: tuple[str, ...] = setting(())
    """Weights of classes in the loss: one number for each class, in the order of the classes; or `balanced`, which
    gives every class the same total weight in the training data. Default: every sample has the same weight."""
    focal: float = setting(0.0, at_least=0)
    """Focal loss: the power of 1 - p with which samples are weakened whose class already has the probability p (Lin et
    al., 2017). 2 is usual. 0: none."""


class Loss:
    """Compute the loss of a micro-batch; the mean over samples, weighted by their classes."""

    def __init__(self, settings: ClassLoss, names: list[str], train_values: np.ndarray):
        """Prepare.

        Args:
            names: of the classes.
            train_values: the class of each training sample.

        Raises:
            UserError: a setting does not work.
        """
        if not settings.smoothing < 1:
            raise UserError(f"--loss.smoothing {settings.smoothing}: must be from 0 to below 1, for example 0.1")
        if not settings.focal < math.inf:
            raise UserError(f"--loss.focal {settings.focal}: give a power, for example 2")
        self.settings, self.of_classes = settings, _of_classes(settings, names, train_values)
        self.weights = None if self.of_classes is None else self.of_classes[train_values]
        """Weight of each training sample, for run.batches; None: all 1."""

    def __call__(self, logits: "Tensor", inputs: dict[str, Any]) -> "Tensor":
        """Return the mean loss.

        Args:
            logits: [samples, classes].
            inputs: `labels` [samples]; where samples are mixed, also `other_labels` and `share`, that of `labels`.
        """
        each = self._each(logits, inputs["labels"])
        if "share" in inputs:
            each = inputs["share"] * each + (1 - inputs["share"]) * self._each(logits, inputs["other_labels"])
        if self.of_classes is None:
            return each.mean()
        weights = logits.new_tensor(self.of_classes)[inputs["labels"]]
        return (weights * each).sum() / weights.sum()

    def _each(self, logits: "Tensor", labels: "Tensor") -> "Tensor":
        from torch.nn.functional import cross_entropy

        each = cross_entropy(logits, labels, reduction="none", label_smoothing=self.settings.smoothing)
        if not self.settings.focal:
            return each
        sure = logits.softmax(1).gather(1, labels[:, None])[:, 0]
        return (1 - sure) ** self.settings.focal * each


def _of_classes(settings: ClassLoss, names: list[str], train_values: np.ndarray) -> np.ndarray | None:
    """Return the weight of each class; None if all are 1."""
    if not settings.weights:
        return None
    counts = np.bincount(train_values, minlength=len(names))
    if settings.weights == (BALANCED,):
        # Their mean over samples is 1, so that the learning rate keeps its meaning.
        return np.divide(counts.sum(), counts * np.count_nonzero(counts), where=counts > 0, out=np.zeros(len(counts)))
    try:
        found = np.array([float(text) for text in settings.weights])
    except ValueError:
        found = np.array([-1.0])
    good = len(found) == len(names) and np.isfinite(found).all() and (found >= 0).all() and (found * counts).any()
    if not good:
        first = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
        raise UserError(
            f"--loss.weights {' '.join(settings.weights)}: give {BALANCED}, or one number for each of the {len(names)} "
            f"classes, in this order: {first}"
        )
    return found


def check_problem(problem: str) -> None:
    """Refuse a problem without one class for each sample, by its name in transformers.

    Raises:
        UserError: it is one.
    """
    if problem != "single_label_classification":
        raise UserError(f"--loss is for one class for each sample, and these labels are a {problem.replace('_', ' ')}")
