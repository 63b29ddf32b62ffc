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


def check_shape(size: Scratch) -> None:
    """Refuse numbers that no model can have; what the vocabulary must hold is known where it is made."""
    for name in ("layers", "width", "heads"):
        if (value := getattr(size, name)) < 1:
            raise UserError(f"--scratch.{name} {value}: must be at least 1")
    if size.width % size.heads:
        raise UserError(
            f"--scratch.heads {size.heads} does not divide --scratch.width {size.width}: give one that does"
        )
    if not 0 <= size.dropout < 1:
        raise UserError(f"--scratch.dropout {size.dropout}: must be at least 0 and below 1")


@dataclass
class UNetScratch:
    """The shape of a U-Net that is trained from scratch."""

    channels: tuple[int, ...] = (16, 32, 64)
    """Channels of each level, from the top; each level has half the resolution of the one above."""
    units: int = 1
    """Convolutions of each residual unit; 0: one plain convolution a level."""
    norm: Literal["instance", "group", "batch"] = "instance"
    """instance, and group (GroupNorm of one group), are the same on any layout. batch: BatchNorm, whose statistics are
    of one process's micro-batches, or with --run.sync-bn of those that all processes compute at a time."""
    dropout: float = 0.0
    """Dropout behind each convolution."""


def check_unet(shape: UNetScratch, patch: tuple[int, ...]) -> None:
    """Refuse numbers that no U-Net for patches of these sides can have."""
    given = " ".join(map(str, shape.channels))
    if len(shape.channels) < 2 or min(shape.channels) < 1:
        raise UserError(f"--scratch.channels {given}: give two levels or more, each of at least one channel")
    if shape.units < 0:
        raise UserError(f"--scratch.units {shape.units}: must be at least 0")
    if not 0 <= shape.dropout < 1:
        raise UserError(f"--scratch.dropout {shape.dropout}: must be at least 0 and below 1")
    halvings = len(shape.channels) - 1
    factor = 2**halvings
    if odd := [side for side in patch if side % factor]:
        raise UserError(
            f"--data.patch {odd[0]}: {halvings + 1} levels (--scratch.channels) halve it {halvings} times, so it must "
            f"be a multiple of {factor}"
        )
    if shape.norm == "instance" and all(side == factor for side in patch):
        raise UserError(
            f"--data.patch {patch[0]}: the lowest level would have a single voxel, which --scratch.norm instance makes "
            "0: use larger patches or fewer --scratch.channels"
        )
