"""Average precision of detected boxes, as COCO defines it (cocodataset.org/#detection-eval).

It is computed here, because pycocotools needs a compiler where it has no wheel, and takes every detection of every rank
on one process. Here, each rank matches the boxes of its own images, and what is gathered of a detection is its class,
its score, and at which thresholds it is right.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from app.distributed import collectives
from app.training.scores.base import TRY, Metric

THRESHOLDS = np.linspace(0.5, 0.95, 10)
# Precision is looked up at these recalls.
RECALLS = np.linspace(0, 1, 101)
# Detections of an image and a class that count, the surest ones.
MOST = 100


class AveragePrecision(Metric):
    """Mean average precision over classes that occur, at an IoU of 0.5, and averaged over 0.5 to 0.95; and by class."""

    def __init__(self, names: Sequence[str]):
        """Prepare to score.

        Args:
            names: of the classes.
        """
        super().__init__(3 + len(names))  # images, detections, boxes, boxes by class
        self.names = list(names)
        # Of each detection: class, score, and for each threshold whether it is right, in the order of the images.
        self._classes: list[np.ndarray] = []
        self._scores: list[np.ndarray] = []
        self._right: list[np.ndarray] = []

    def update(self, predicted: list[dict[str, Tensor]], target: list[dict[str, Tensor]]) -> None:  # type: ignore[override]  # boxes differ in number
        """Add images.

        Args:
            predicted: for each, `boxes` [detections, 4] as left, top, right, bottom, `scores` and `labels`.
            target: for each, `boxes` and `labels` of the truth.
        """
        for detected, there in zip(predicted, target, strict=True):
            boxes, scores, labels = (detected[name].cpu().double().numpy() for name in ("boxes", "scores", "labels"))
            real, classes = (there[name].cpu().double().numpy() for name in ("boxes", "labels"))
            counts = np.bincount(classes.astype(int), minlength=len(self.names))
            self.state += torch.tensor(
                [1, len(boxes), len(real), *counts], dtype=torch.float64, device=self.state.device
            )
            for label in np.unique(labels):
                of_class = np.flatnonzero(labels == label)
                of_class = of_class[np.argsort(-scores[of_class], kind="stable")][:MOST]
                self._classes.append(np.full(len(of_class), int(label), np.int32))
                self._scores.append(scores[of_class])
                self._right.append(matched(boxes[of_class], real[classes == label]))

    def scores(self) -> dict[str, float]:
        """Return `map50` and `map`, the latter by class too, such as `map_cat`, and counts of `images` and `boxes`.

        Every rank takes part.
        """
        # Ranks have neighbouring images in their order, so that equal scores come in the same order on any layout.
        none = np.zeros((0, len(THRESHOLDS)), bool)
        detections_of_rank = (
            np.concatenate([np.zeros(0, np.int32), *self._classes]),
            np.concatenate([np.zeros(0), *self._scores]),
            np.packbits(np.concatenate([none, *self._right]), axis=1),
        )
        gathered = collectives.gather(detections_of_rank)
        classes, values, packed = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
        right = np.unpackbits(packed, axis=1, count=len(THRESHOLDS)).astype(bool)
        images, _, boxes, *counts = (int(number) for number in self.total)
        precisions_by_class = dict[str, np.ndarray]()
        for label, (name, count) in enumerate(zip(self.names, counts, strict=True)):
            if count:
                own_rows = classes == label
                precisions_by_class[name] = precisions(values[own_rows], right[own_rows], count)
        each = np.array(list(precisions_by_class.values())).reshape(-1, len(THRESHOLDS))
        means = {"map50": each[:, 0].mean(), "map": each.mean()} if len(each) else {}
        by_class = {f"map_{name}": row.mean() for name, row in zip(precisions_by_class, each, strict=True)}
        shares = {name: float(value) for name, value in {**means, **by_class}.items()}
        return {**shares, "images": images, "boxes": boxes}

    def fault(self) -> str:
        """Say that no box is found, where there are some."""
        _, detections, boxes, *_ = self.total
        return f"no box is found, and there are {int(boxes):,}: {TRY}" if boxes and not detections else ""


def matched(detected: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Match detections of one class in one image, the surest first, each with the free box that it covers best.

    Returns:
        For each detection and threshold whether it is right, bool [detections, thresholds].
    """
    right = np.zeros((len(detected), len(THRESHOLDS)), bool)
    if not len(real):
        return right
    covers = iou(detected, real)
    free = np.ones((len(THRESHOLDS), len(real)), bool)
    rows = np.arange(len(THRESHOLDS))
    for index, each in enumerate(covers):
        fits = free & (each >= np.minimum(THRESHOLDS, 1 - 1e-10)[:, None])
        # The last one of equal ones, as pycocotools.
        best = len(real) - 1 - np.where(fits, each, -1.0)[:, ::-1].argmax(axis=1)
        right[index] = fits.any(axis=1)
        free[rows[right[index]], best[right[index]]] = False
    return right


def iou(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the intersection over union of boxes [n, 4] and [m, 4]: float64 [n, m]."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(-1)
    areas = [np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(-1) for boxes in (one, other)]
    union = areas[0][:, None] + areas[1][None] - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def precisions(scores: np.ndarray, right: np.ndarray, count: int) -> np.ndarray:
    """Return the average precision at each threshold, interpolated at 101 recalls.

    Args:
        scores: of all detections of a class.
        right: bool [detections, thresholds].
        count: boxes of the class.
    """
    ordered = right[np.argsort(-scores, kind="stable")]
    hits = ordered.cumsum(axis=0)
    recall = hits / count
    precision = hits / np.arange(1, len(ordered) + 1)[:, None]
    best = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    by_threshold = np.zeros(len(THRESHOLDS))
    for index in range(len(THRESHOLDS)):
        places = np.searchsorted(recall[:, index], RECALLS, side="left")
        reached = places < len(ordered)
        by_threshold[index] = np.where(
            reached, best[np.minimum(places, len(ordered) - 1), index] if len(ordered) else 0, 0
        ).mean()
    return by_threshold
