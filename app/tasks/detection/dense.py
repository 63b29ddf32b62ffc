"""A small one-stage detector: each place of a feature map says whose middle is there, and where its box ends.

It is CenterNet's heat map (Zhou et al., 2019) with FCOS's distances to the four sides (Tian et al., 2019), on one level
of a feature pyramid. GroupNorm takes no statistics of a batch, so results do not depend on the layout.

This file imports nothing of Samestep, because it is saved next to the weights: where Samestep is not installed,
`pipeline("object-detection", FOLDER, trust_remote_code=True)` loads it.
"""

import math
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

# Pixels of the image for each place of the heat map.
STRIDE = 4
GROUPS = 8
# Before training, each place has this probability of being the middle of an object.
RARE = 0.01
# What a network says of a place that is no peak; its probability is 0.
NEVER = -1e4


class DenseDetectorConfig(PreTrainedConfig):
    """The shape of a detector.

    Args:
        channels: channels of the images.
        width: channels of the features at half of the images' resolution; deeper levels have 2, 4, 8 and 8 times as
            many.
        layers: residual units of each level.
        head: channels of the features that objects are found in.
    """

    model_type = "samestep-dense-detector"

    channels: int = 3
    width: int = 16
    layers: int = 1
    head: int = 64


@dataclass
class DenseOutput(ModelOutput):
    """What the detector says.

    Args:
        loss: if labels are given.
        logits: [images, places, classes]; of a place that is no peak of its class, NEVER. Only in evaluation mode.
        pred_boxes: [images, places, 4]: x and y of the middle, width and height, in fractions of the image's sides.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    pred_boxes: Tensor | None = None


class Unit(nn.Module):
    """Two convolutions with a residual; the first may halve the resolution."""

    def __init__(self, before: int, after: int, stride: int = 1):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(GROUPS, after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(GROUPS, after)
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, stride, stride=stride)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.relu(self.first_norm(self.first(hidden)))
        return torch.relu(self.second_norm(self.second(inner)) + self.shortcut(hidden))


class DenseDetector(PreTrainedModel):
    """Find objects in images whose sides are multiples of 32."""

    config_class = DenseDetectorConfig
    main_input_name = "pixel_values"
    # FSDP shards these one by one. If it sharded whole units, gradients that meet at a skip would add in another order.
    _no_split_modules = ["Conv2d"]

    def __init__(self, config: DenseDetectorConfig):
        super().__init__(config)
        width, head = config.width, config.head
        self.stem = nn.Conv2d(config.channels, width, 3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.GroupNorm(GROUPS, width)
        widths = [width, 2 * width, 4 * width, 8 * width, 8 * width]
        self.levels = nn.ModuleList(
            nn.Sequential(
                Unit(widths[i], widths[i + 1], stride=2),
                *(Unit(widths[i + 1], widths[i + 1]) for _ in range(config.layers - 1)),
            )
            for i in range(4)
        )
        self.laterals = nn.ModuleList(nn.Conv2d(each, head, 1) for each in widths[1:])
        self.merges = nn.ModuleList(nn.Conv2d(head, head, 3, padding=1, bias=False) for _ in range(3))
        self.merge_norms = nn.ModuleList(nn.GroupNorm(GROUPS, head) for _ in range(3))
        self.heat = nn.Conv2d(head, config.num_labels or 0, 3, padding=1)
        self.sides = nn.Conv2d(head, 4, 3, padding=1)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            if module in (getattr(self, "heat", None), getattr(self, "sides", None)):
                nn.init.normal_(module.weight, 0.0, 0.01)
            if module is getattr(self, "heat", None):
                nn.init.constant_(module.bias, math.log(RARE / (1 - RARE)))

    def forward(self, pixel_values: Tensor, labels: list[dict[str, Tensor]] | None = None, **_: Tensor) -> DenseOutput:
        """Find objects; with labels, compute the loss that `loss_function` has.

        Args:
            pixel_values: [images, channels, height, width].
            labels: for each image, `class_labels` [boxes], `boxes` [boxes, 4], as DenseOutput's, and `weight`.
        """
        hidden = torch.relu(self.stem_norm(self.stem(pixel_values)))
        features = []
        for level, lateral in zip(self.levels, self.laterals, strict=True):
            hidden = level(hidden)
            features.append(lateral(hidden))
        merged = features.pop()
        for merge, norm in zip(self.merges, self.merge_norms, strict=True):
            merged = torch.relu(norm(merge(doubled(merged) + features.pop())))
        # In float32 in any precision of training: exp of bfloat16 has steps of one percent.
        heat, sides = self.heat(merged).float(), self.sides(merged).float()
        corners = corners_of(sides)
        loss = None if labels is None else self.loss_function(heat, corners, labels)
        return DenseOutput(loss) if self.training else DenseOutput(loss, *detected(heat, corners))


def doubled(features: Tensor) -> Tensor:
    """Repeat each place twice along both sides; the gradient of torch's own is not deterministic on a GPU."""
    images, channels, height, width = features.shape
    wide = features[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2)
    return wide.reshape(images, channels, 2 * height, 2 * width)


def corners_of(sides: Tensor) -> Tensor:
    """Return left, top, right and bottom, [images, 4, height, width] in places, of distances to the four sides.

    Args:
        sides: logarithms of the distances from the middle of a place, in units of two places.
    """
    height, width = sides.shape[-2:]
    x = torch.arange(width, device=sides.device) + 0.5
    y = torch.arange(height, device=sides.device) + 0.5
    left, top, right, bottom = (2 * sides.clamp(max=8).exp()).unbind(1)
    return torch.stack([x - left, y[:, None] - top, x + right, y[:, None] + bottom], dim=1)


def detected(heat: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [images, places, classes], NEVER but for peaks, and boxes [images, places, 4]; see DenseOutput."""
    highest = nn.functional.max_pool2d(heat, 3, stride=1, padding=1)
    logits = heat.masked_fill(heat < highest, NEVER).flatten(2).transpose(1, 2).contiguous()
    height, width = heat.shape[-2:]
    scaled = corners / corners.new_tensor([width, height, width, height])[:, None, None]
    low, high = scaled.clamp(0, 1).flatten(2).transpose(1, 2).split(2, dim=-1)
    return logits, torch.cat([(low + high) / 2, high - low], dim=-1)


with suppress(ImportError):  # without it, a pipeline works too, but says at length that it does not know the class
    from transformers.models.auto.modeling_auto import MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES

    MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES.setdefault(DenseDetectorConfig.model_type, "DenseDetector")
DenseDetectorConfig.register_for_auto_class()
DenseDetector.register_for_auto_class("AutoModelForObjectDetection")
