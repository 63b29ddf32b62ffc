"""The shape of a transformer that is trained from scratch."""

from dataclasses import dataclass

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
