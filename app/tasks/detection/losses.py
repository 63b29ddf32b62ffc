"""Losses of detectors, as means over the boxes of a micro-batch.

Each is a sum divided by the images' weights, which are their numbers of boxes before augmentation. So with these
weights in `run.batches` the loss of a step is a sum over all boxes of the global batch, divided by their number,
however the batch is cut. transformers' own losses count the boxes of a micro-batch, average that over processes, and
take softmax's class loss as a mean over all queries together.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, l1_loss, logsigmoid

Labels = list[dict[str, Tensor]]

# Of the heat map's loss (Law and Deng, 2018), and of the boxes' share in the sum.
FOCUS, NEAR, BOX_SHARE = 2, 4, 2.0
# How far a box's peak reaches, as TTFNet has it (Liu et al., 2020): its deviation is this share of the box's side, and
# places where it is above REACH learn the box's sides.
SPREAD, REACH = 0.09, 0.2
LEAST_SPREAD = 0.3  # places
# Of the focal loss of queries (Lin et al., 2017).
ALPHA, GAMMA = 0.25, 2


def weight_of(labels: Labels) -> Tensor:
    """Return what the images of a micro-batch count together."""
    return torch.stack([label["weight"] for label in labels]).sum()


def dense_loss(heat: Tensor, corners: Tensor, labels: Labels) -> Tensor:
    """Return the loss of app.tasks.detection.dense: the heat map's, and the generalised IoU of boxes.

    Args:
        heat: logits [images, classes, height, width].
        corners: predicted left, top, right, bottom, [images, 4, height, width] in places.
    """
    boxes, classes, there = padded(labels, heat.shape[1])
    height, width = heat.shape[-2:]
    with torch.no_grad():
        boxes = boxes * boxes.new_tensor([width, height, width, height])
        peaks = _peaks(boxes, there, height, width)
        # Boxes that are not there have a class after the last one.
        truth = heat.new_zeros(len(heat), heat.shape[1] + 1, height, width)
        truth = truth.scatter_reduce(1, classes[:, :, None, None].expand_as(peaks), peaks, "amax")[:, :-1]
        best, owner = peaks.max(1)
        mine = (owner[:, None] == torch.arange(peaks.shape[1], device=heat.device)[:, None, None]) & (best > REACH)[
            :, None
        ]
        shares = peaks * mine
        shares = (shares / shares.sum((2, 3), keepdim=True).clamp(min=1e-9)).sum(1)
        wanted = corners_from(boxes).gather(1, owner.flatten(1)[..., None].expand(-1, -1, 4))
    predicted = corners.flatten(2).transpose(1, 2)
    apart = (1 - generalised_iou(predicted, wanted)) * shares.flatten(1)
    return (_heat_loss(heat, truth) + BOX_SHARE * apart.sum()) / weight_of(labels)


def padded(labels: Labels, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stack the labels of images with different numbers of boxes.

    Returns:
        Boxes [images, most, 4], their classes [images, most], `classes` where there is no box, and where there is one.
    """
    most = max(1, *(len(label["boxes"]) for label in labels))
    first = labels[0]["boxes"]
    boxes = first.new_zeros(len(labels), most, 4)
    numbers = labels[0]["class_labels"].new_full((len(labels), most), classes)
    for index, label in enumerate(labels):
        boxes[index, : len(label["boxes"])] = label["boxes"]
        numbers[index, : len(label["boxes"])] = label["class_labels"]
    return boxes, numbers, numbers < classes


def _peaks(boxes: Tensor, there: Tensor, height: int, width: int) -> Tensor:
    """Draw a bell around the middle of each box, 1 at its middle: [images, boxes, height, width].

    Args:
        boxes: x and y of the middle, width and height, [images, boxes, 4] in places.
    """
    bells = []
    for axis, side in ((0, width), (1, height)):
        places = torch.arange(side, device=boxes.device)
        middle = boxes[..., axis].floor().clamp(0, side - 1)[..., None]
        spread = (SPREAD * boxes[..., 2 + axis]).clamp(min=LEAST_SPREAD)[..., None]
        bells.append(torch.exp(-((places - middle) ** 2) / (2 * spread**2)))
    across, along = bells
    return along[..., :, None] * across[..., None, :] * there[..., None, None]


def _heat_loss(heat: Tensor, truth: Tensor) -> Tensor:
    """Return the focal loss of heat maps: less of it near to a peak."""
    chance = heat.sigmoid()
    right = (1 - chance) ** FOCUS * logsigmoid(heat)
    wrong = (1 - truth) ** NEAR * chance**FOCUS * logsigmoid(-heat)
    return -torch.where(truth == 1, right, wrong).sum()


def corners_from(boxes: Tensor) -> Tensor:
    """Turn x and y of the middle, width and height, [..., 4], into left, top, right and bottom."""
    middle, sides = boxes.split(2, dim=-1)
    return torch.cat([middle - sides / 2, middle + sides / 2], dim=-1)


def generalised_iou(one: Tensor, other: Tensor) -> Tensor:
    """Return the generalised IoU of corners [..., 4], broadcast against each other (Rezatofighi et al., 2019)."""
    low, high = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = ((each[..., 2:] - each[..., :2]).clamp(min=0).prod(-1) for each in (one, other))
    union = sum(areas) - shared
    around = torch.maximum(one[..., 2:], other[..., 2:]) - torch.minimum(one[..., :2], other[..., :2])
    hull = around.clamp(min=0).prod(-1)
    return shared / union.clamp(min=1e-9) - (hull - union) / hull.clamp(min=1e-9)


class SetLoss:
    """The loss of detectors that predict a set (Carion et al., 2020): each box is matched with one query.

    It takes the place of `loss_function` in a model of transformers whose own is for object detection, and has the same
    parts with the same shares. One thing differs: softmax's class loss is a mean over the queries of each image, which
    counts by the image's boxes; transformers takes the mean over the queries of all images in a micro-batch.
    """

    def __init__(self, focal: bool):
        """Prepare.

        Args:
            focal: each class has a sigmoid; else a softmax goes over the classes and `no object`, the last one.
        """
        self.focal = focal

    def __call__(
        self,
        logits: Tensor,
        labels: Labels,
        device: torch.device,
        pred_boxes: Tensor,
        config: Any,
        outputs_class: Tensor | None = None,
        outputs_coord: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, dict[str, Tensor], None]:
        """Return the loss, and nothing that transformers would log besides.

        Args:
            logits: [images, queries, classes].
            pred_boxes: [images, queries, 4]; x and y of the middle, width and height, in fractions.
            outputs_class, outputs_coord: both of each decoder layer, [layers, ...].
        """
        pairs = [(logits, pred_boxes)]
        if config.auxiliary_loss and outputs_class is not None and outputs_coord is not None:
            pairs += list(zip(outputs_class[:-1], outputs_coord[:-1], strict=True))
        total = torch.stack([self._layer(each.float(), boxes.float(), labels, config) for each, boxes in pairs]).sum()
        return total / weight_of(labels), {}, None

    def _layer(self, logits: Tensor, boxes: Tensor, labels: Labels, config: Any) -> Tensor:
        """Return the sum over images of one layer's loss."""
        real, classes, there = padded(labels, logits.shape[-1])
        image, query, target = self._match(logits, boxes, real, classes.where(there, 0), there, config)
        predicted, wanted = boxes[image, query], real[image, target]
        apart = l1_loss(predicted, wanted, reduction="sum")
        overlap = 1 - generalised_iou(corners_from(predicted), corners_from(wanted))
        return (
            self._class_loss(logits, (image, query), classes[image, target], labels, config)
            + config.bbox_loss_coefficient * apart
            + config.giou_loss_coefficient * overlap.sum()
        )

    def _class_loss(
        self, logits: Tensor, place: tuple[Tensor, Tensor], classes: Tensor, labels: Labels, config: Any
    ) -> Tensor:
        """Return the sum over images.

        Args:
            place: image and query of each matched box; `classes` has the boxes' classes.
        """
        if self.focal:
            truth = torch.zeros_like(logits)
            truth[(*place, classes)] = 1
            signed = torch.where(truth == 1, logits, -logits)
            balance = torch.where(truth == 1, config.focal_alpha, 1 - config.focal_alpha)
            return -(balance * (1 - signed.sigmoid()) ** GAMMA * logsigmoid(signed)).sum()
        nothing = logits.shape[-1] - 1
        truth = torch.full_like(logits[..., 0], nothing, dtype=torch.int64)
        truth[place] = classes
        counts = torch.ones_like(logits[0, 0])
        counts[nothing] = config.eos_coefficient
        terms = cross_entropy(logits.transpose(1, 2), truth, counts, reduction="none")
        weights = torch.stack([label["weight"] for label in labels])
        return (weights * terms.sum(1) / counts[truth].sum(1)).sum()

    @torch.no_grad()
    def _match(
        self, logits: Tensor, boxes: Tensor, real: Tensor, classes: Tensor, there: Tensor, config: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Match the boxes of each image with queries, at the least cost. It waits for the device, once.

        Args:
            real, classes, there: as `padded` returns them, but any class where there is no box.

        Returns:
            Of each pair: the image, the query and the box.
        """
        from scipy.optimize import linear_sum_assignment

        if self.focal:
            chance = logits.sigmoid()
            missed = (1 - ALPHA) * chance**GAMMA * -(1 - chance + 1e-8).log()
            kind = ALPHA * (1 - chance) ** GAMMA * -(chance + 1e-8).log() - missed
        else:
            kind = -logits.softmax(-1)
        kind = kind.gather(2, classes[:, None].expand(-1, logits.shape[1], -1))
        apart = torch.cdist(boxes, real, p=1)
        overlap = generalised_iou(corners_from(boxes)[:, :, None], corners_from(real)[:, None])
        cost = config.class_cost * kind + config.bbox_cost * apart - config.giou_cost * overlap
        counts, costs = there.sum(1).tolist(), cost.nan_to_num(1e9).cpu().numpy()
        pairs = [linear_sum_assignment(of_image[:, :count]) for of_image, count in zip(costs, counts, strict=True)]
        images = np.repeat(np.arange(len(pairs)), [len(queries) for queries, _ in pairs])
        columns = (images, *(np.concatenate(each) for each in zip(*pairs, strict=True)))
        return tuple(torch.as_tensor(each, device=logits.device) for each in columns)  # type: ignore[return-value]  # three of them
