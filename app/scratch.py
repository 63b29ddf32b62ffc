"""The shape of a model that is trained from scratch."""

from dataclasses import dataclass
from typing import Literal

from app.errors import UserError


@dataclass
class Scratch:
    """The shape of a model that is trained from scratch."""

    layers: int = 2
    """Transformer layers."""
    width: int = 128
    """Width of the hidden states."""
    heads: int = 2
    """Attention heads; they divide the width."""
    vocab: int = 8192
    """Tokens of the tokenizer, which is trained on the training texts."""
    dropout: float = 0.1
    """Dropout of hidden states and attention."""


@dataclass
class VisionScratch:
    """The shape of an image model that is trained from scratch."""

    kind: Literal["resnet", "vit"] = "resnet"
    """resnet: three stages, each of half the resolution of the one before; vit: a transformer over patches."""
    layers: int = 2
    """Blocks of each stage of a resnet; layers of a vit."""
    width: int = 32
    """Channels of a resnet's first stage (each other has twice those of the one before); hidden states of a vit."""
    norm: Literal["group", "batch"] = "group"
    """Of a resnet. group: GroupNorm, the same on any layout. batch: BatchNorm, whose statistics are of one process's
    micro-batches, or with --run.sync-bn of those that all processes compute at a time."""
    heads: int = 4
    """Attention heads of a vit; they divide the width."""
    patches: int = 8
    """Patches of a vit along each side; they divide the size of the images."""
    dropout: float = 0.0
    """Dropout of a vit's hidden states and attention."""


def check_vision(shape: VisionScratch, size: int) -> None:
    """Refuse numbers that no model of images of this size can have."""
    for name in ("layers", "width", "heads", "patches"):
        if (value := getattr(shape, name)) < 1:
            raise UserError(f"--scratch.{name} {value}: must be at least 1")
    if shape.kind == "resnet" and shape.width % 8:
        raise UserError(f"--scratch.width {shape.width}: must be a multiple of 8 for a resnet")
    if shape.kind == "vit":
        for whole, part in (("width", "heads"), ("size", "patches")):
            number, divisor = size if whole == "size" else shape.width, getattr(shape, part)
            if number % divisor:
                flag = "--data.size" if whole == "size" else "--scratch.width"
                raise UserError(f"--scratch.{part} {divisor} does not divide {flag} {number}: give one that does")
    _check_dropout(shape.dropout)


def _check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise UserError(f"--scratch.dropout {dropout}: must be at least 0 and below 1")


def check_shape(size: Scratch) -> None:
    """Refuse numbers that no model can have; what the vocabulary must hold is known where it is made."""
    for name in ("layers", "width", "heads"):
        if (value := getattr(size, name)) < 1:
            raise UserError(f"--scratch.{name} {value}: must be at least 1")
    if size.width % size.heads:
        raise UserError(
            f"--scratch.heads {size.heads} does not divide --scratch.width {size.width}: give one that does"
        )
    _check_dropout(size.dropout)
