"""The loss of a classifier: cross-entropy, with smoothed labels, weights of classes, focus, and mixed labels."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from app.config import setting
from app.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

BALANCED = "balanced"
MOST = 60  # names of classes in a message


@dataclass
class ClassLossConfig:
    """How the cross-entropy of a classifier's samples is formed."""

    smoothing: float = setting(0.0, at_least=0)
    """Label smoothing: the share of each label that is spread evenly over all classes."""
    weights: tuple[str, ...] = setting(())
    """Weights of classes in the loss: one number for each class, in the order of the classes; or `balanced`, which
    gives every class the same total weight in the training data, if these are not streamed. Default: every sample has
    the same weight."""
    focal: float = setting(0.0, at_least=0)
    """Focal loss (Lin et al., 2017): multiplies a sample's loss by (1 - p) to this power, where p is the probability of
    its class. 2 is usual. 0: none."""


class ClassLoss:
    """Compute the loss of a micro-batch: the mean over samples, weighted by their classes."""

    def __init__(self, settings: ClassLossConfig, names: list[str], train_values: np.ndarray | None):
        """Prepare.

        Args:
            names: of the classes.
            train_values: the class of each training sample; None if it is known only when the sample is read.

        Raises:
            UserError: a setting does not work.
        """
        if not settings.smoothing < 1:
            raise UserError(f"--loss.smoothing {settings.smoothing}: must be from 0 to below 1, for example 0.1")
        if not settings.focal < math.inf:
            raise UserError(f"--loss.focal {settings.focal}: give a power, for example 2")
        self.settings, self.of_classes = settings, _of_classes(settings, names, train_values)
        self.weights: np.ndarray | Callable[[dict[str, Any]], float] | None = None
        """Weight of each training sample, or what weighs one that is read, for run.batches; None: all 1."""
        if self.of_classes is not None:
            self.weights = self._weigh if train_values is None else self.of_classes[train_values]

    def _weigh(self, sample: dict[str, Any]) -> float:
        """Return the weight of a sample as it is read."""
        assert self.of_classes is not None
        return float(self.of_classes[sample["labels"]])

    def __call__(self, logits: "Tensor", inputs: dict[str, Any]) -> "Tensor":
        """Return the mean loss.

        Args:
            logits: [samples, classes].
            inputs: `labels` [samples]; where samples are mixed, also `other_labels` and `share`, that of `labels`.
        """
        import torch

        each, weights = self._weighed(logits, inputs)
        if weights is None:
            return each.mean()
        # No sample may have a weight: there is no loss then.
        return each.sum() / weights.sum().clamp(min=torch.finfo(each.dtype).tiny)

    def by_row(self, logits: "Tensor", inputs: dict[str, Any]) -> "tuple[Tensor, Tensor]":
        """Return the loss of each sample and its weight in the mean, [samples] each; the arguments are the same."""
        import torch

        each, weights = self._weighed(logits, inputs)
        if weights is None:
            return each, torch.ones_like(each)
        return each / weights.clamp(min=torch.finfo(each.dtype).tiny), weights

    def _weighed(self, logits: "Tensor", inputs: dict[str, Any]) -> "tuple[Tensor, Tensor | None]":
        """Return the loss of each sample times its weight, and the weights if they are not all 1."""
        labels, weights = inputs["labels"], None
        if self.of_classes is not None:
            weights = logits.new_tensor(self.of_classes)
        each = self._each(logits, labels, weights)
        if "share" in inputs:
            other = self._each(logits, inputs["other_labels"], weights)
            each = inputs["share"] * each + (1 - inputs["share"]) * other
        return each, None if weights is None else weights[labels]

    def _each(self, logits: "Tensor", labels: "Tensor", weights: "Tensor | None") -> "Tensor":
        """Return the loss of each sample, times the weight of its class."""
        import torch
        from torch.nn.functional import cross_entropy

        each = cross_entropy(logits, labels, reduction="none", label_smoothing=self.settings.smoothing)
        if self.settings.focal:
            sure = logits.softmax(1).gather(1, labels[:, None])[:, 0]
            # A power below 1 has no finite slope at 0.
            each = (1 - sure).clamp(min=torch.finfo(sure.dtype).eps) ** self.settings.focal * each
        return each if weights is None else weights[labels] * each


def plain_loss_by_row(problem: str, logits: "Tensor", inputs: dict[str, Any]) -> "Tensor":
    """Return the plain loss of each sample, [samples], for a problem by its name in transformers.

    Args:
        logits: [samples, outputs].
        inputs: `labels` [samples], or [samples, outputs].
    """
    from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

    logits, labels = logits.float(), inputs["labels"]
    if problem == "single_label_classification":
        return cross_entropy(logits, labels, reduction="none")
    by_output = binary_cross_entropy_with_logits if problem == "multi_label_classification" else mse_loss
    return by_output(logits, labels.float().view_as(logits), reduction="none").mean(1)


def _of_classes(settings: ClassLossConfig, names: list[str], train_values: np.ndarray | None) -> np.ndarray | None:
    """Return the weight of each class; None if all are 1."""
    if not settings.weights:
        return None
    balanced = settings.weights == (BALANCED,)
    if balanced and train_values is None:
        raise UserError(
            f"--loss.weights {BALANCED}: how many samples of streamed data each class has is not known before all are "
            f"read: give one number for each of the {len(names)} classes, in this order: {_first(names)}"
        )
    counts = np.ones(len(names)) if train_values is None else np.bincount(train_values, minlength=len(names))
    if balanced:
        # Their mean over samples is 1, so that the learning rate keeps its meaning.
        return np.divide(counts.sum(), counts * np.count_nonzero(counts), where=counts > 0, out=np.zeros(len(counts)))
    try:
        weights = np.array([float(text) for text in settings.weights])
    except ValueError:
        weights = np.array([-1.0])
    good = (
        len(weights) == len(names) and np.isfinite(weights).all() and (weights >= 0).all() and (weights * counts).any()
    )
    if not good:
        either = "" if train_values is None else f"{BALANCED}, or "
        raise UserError(
            f"--loss.weights {' '.join(settings.weights)}: give {either}one number for each of the {len(names)} "
            f"classes, in this order: {_first(names)}"
        )
    return weights


def _first(names: list[str]) -> str:
    return ", ".join(names[:MOST]) + (" ..." if len(names) > MOST else "")


def check_problem(problem: str) -> None:
    """Refuse a problem without one class for each sample, by its name in transformers.

    Raises:
        UserError: it is one.
    """
    if problem != "single_label_classification":
        raise UserError(f"--loss is for one class for each sample, and these labels are a {problem.replace('_', ' ')}")
