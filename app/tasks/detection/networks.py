"""Detectors: new ones, pretrained ones of transformers, and what they say as boxes in pixels."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from app.config.needs import EVERYTHING, Needs
from app.errors import UserError
from app.tasks.from_scratch import DetectorScratch
from app.tasks.pretrained import head_of, load_model, load_processor

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import ConditionalDetrConfig, PreTrainedModel

    from app.data.images.processor import ImageProcessor

# Of images for a pretrained model that takes any, in pixels.
SIZE = 640
# By the name of its own loss in transformers: whether a model has a sigmoid for each class.
FOCAL = {
    "ForObjectDetection": False,
    "DeformableDetrForObjectDetection": True,
    "ConditionalDetrForObjectDetection": True,
    "DabDetrForObjectDetection": True,
}


def make_known() -> None:
    """Let transformers load detectors of app.tasks.detection.dense as it loads its own."""
    from transformers import AutoConfig, AutoModelForObjectDetection

    from app.tasks.detection.dense import DenseDetector, DenseDetectorConfig

    AutoConfig.register(DenseDetectorConfig.model_type, DenseDetectorConfig, exist_ok=True)
    AutoModelForObjectDetection.register(DenseDetectorConfig, DenseDetector, exist_ok=True)


def detector_processor(name: str, size: int) -> "ImageProcessor":
    """Load the image processor of the detector that --model names, for images of one size.

    Args:
        size: height and width; 0: the model's own, if it takes images of one size, else SIZE.
    """
    make_known()
    processor = load_processor(name)
    default_size = dict(processor.size)
    processor = load_processor(name, size or (0 if default_size.get("height") and default_size.get("width") else SIZE))
    # Boxes are fractions of the whole image; with a margin they would not be.
    cast(Any, processor).do_pad = False
    return processor


def load_detector(name: str, labels: Sequence[str], needs: Needs = EVERYTHING) -> "PreTrainedModel":
    """Load the detector that --model names, with an output for each of these classes.

    Raises:
        UserError: it cannot be loaded, or its loss cannot be counted over the whole global batch.
    """
    from transformers import AutoModelForObjectDetection

    make_known()
    head = head_of(labels)
    model = load_model(AutoModelForObjectDetection, name, needs=needs, ignore_mismatched_sizes=True, **head)
    return with_loss(model, f"--model {name}")


def new_detector(shape: DetectorScratch, labels: Sequence[str], channels: int) -> "PreTrainedModel":
    """Build a detector of this shape with random weights."""
    import torch
    from transformers import ConditionalDetrForObjectDetection

    from app.tasks.detection.dense import RARE, DenseDetector, DenseDetectorConfig

    head = head_of(labels)
    if shape.network == "detr":
        model = ConditionalDetrForObjectDetection(_detr_config(shape, channels, **head))
        # A decoder begins with zeros for all queries, and the norm after its first attention would multiply gradients
        # by 300, so that clipping leaves nothing of the others.
        torch.nn.init.normal_(model.model.decoder.layers[0].self_attn.o_proj.bias)
        torch.nn.init.constant_(model.class_labels_classifier.bias, math.log(RARE / (1 - RARE)))
        return with_loss(model, "--scratch.network detr")
    config = DenseDetectorConfig(
        channels=channels, width=shape.width, layers=shape.layers, head=4 * shape.width, **head
    )
    return with_loss(DenseDetector(config), "--scratch.network dense")


def _detr_config(shape: DetectorScratch, channels: int, **head: Any) -> "ConditionalDetrConfig":
    from transformers import BitConfig, ConditionalDetrConfig

    width = shape.width
    # A ResNet with GroupNorm. Of a backbone with BatchNorm, transformers freezes the statistics.
    levels: dict[str, Any] = {
        "num_channels": channels,
        "embedding_size": width,
        "hidden_sizes": [2 * width, 4 * width, 8 * width],
        "depths": [shape.layers] * 3,
        "num_groups": 8,
        "out_features": ["stage3"],
    }
    inner = {"layers": 2, "attention_heads": 8, "ffn_dim": 16 * width}
    whole: dict[str, Any] = {
        "backbone_config": BitConfig(**levels),
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "num_channels": channels,
        "d_model": 8 * width,
        "num_queries": shape.queries,
        "dropout": 0.0,
        "auxiliary_loss": True,
        **{f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in inner.items()},
    }
    return ConditionalDetrConfig(**whole, **head)


def with_loss(model: "PreTrainedModel", what: str) -> "PreTrainedModel":
    """Give a detector a loss over the boxes of the global batch, in place of transformers' over a micro-batch.

    Args:
        what: the flag that names the model, for errors.

    Raises:
        UserError: the model's loss is of a kind that is not known here.
    """
    from app.tasks.detection.dense import DenseDetector
    from app.tasks.detection.losses import SetLoss, dense_loss

    if isinstance(model, DenseDetector):
        model.loss_function = dense_loss
        return model
    focal = FOCAL.get(str(model.loss_type))
    if focal is None:
        raise UserError(
            f"{what} is a {type(model).__name__}, whose loss counts boxes by micro-batch: give a DETR, "
            "Conditional DETR, Deformable DETR, DAB-DETR, Table Transformer or YOLOS"
        )
    model.loss_function = SetLoss(focal)
    return model


def too_many_boxes(model: "PreTrainedModel", counts: "np.ndarray", flag: str) -> str:
    """Say how many images have more boxes than a detector can find; empty if none has.

    Args:
        counts: boxes of each training image.
        flag: what gives the detector its queries; empty: nothing does.
    """
    config = model.config
    queries = getattr(config, "num_queries", None) or getattr(config, "num_detection_tokens", None)
    if queries is None or not (more := int((counts > queries).sum())):
        return ""
    fix = f": give a larger {flag}" if flag else ": give a model with more queries"
    return (
        f"{more:,} of {len(counts):,} training images have more boxes, up to {counts.max()}, than the {queries} that "
        f"the model can find in an image{fix}"
    )


def boxes_of(output: Any, processor: "ImageProcessor", size: tuple[int, int]) -> "list[dict[str, Tensor]]":
    """Return what a detector found in each image: `boxes` (left, top, right, bottom), `scores` and `labels`.

    Args:
        size: height and width of the images, in the unit of the boxes.
    """
    return found_in(output, processor, [size] * len(output.logits), 0.0)


def found_in(
    output: Any, processor: "ImageProcessor", sizes: Sequence[tuple[int, int]], threshold: float
) -> "list[dict[str, Tensor]]":
    """Return what a detector found in images of several sizes, as `boxes_of`.

    Args:
        sizes: height and width of each image, in the unit of its boxes.
        threshold: the least score.
    """
    return cast(Any, processor).post_process_object_detection(output, threshold=threshold, target_sizes=list(sizes))


def truth_of(labels: "list[dict[str, Tensor]]", size: tuple[int, int]) -> "list[dict[str, Tensor]]":
    """Return the labels of a micro-batch as `boxes_of` returns what was found."""
    from app.tasks.detection.losses import corners_from

    height, width = size
    return [
        {
            "boxes": corners_from(label["boxes"]) * label["boxes"].new_tensor([width, height, width, height]),
            "labels": label["class_labels"],
        }
        for label in labels
    ]
