"""Blocks of tokens to train on, cut from documents that follow each other, so that no token is lost or padding.

Each token is predicted exactly once: the first of a document from the beginning-of-text token, any other from the
tokens before it in its document and block.
"""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np
from torch import Tensor
from torch.nn import functional

from app.data.corpus.documents import Documents
from app.data.rows import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from app.data.corpus.token_blocks import TokenBlocks


class Blocks:
    """Blocks of `size` tokens, each read from disk when it is asked for.

    A row is a dict of int64 arrays [size]: `input_ids`; `targets`, the token after each of them, or -100 if that is not
    supervised; and, if documents are kept apart, `position_ids`, which restart at each document.
    """

    def __init__(self, documents: Documents, size: int, start: int, apart: bool):
        """Cut documents into blocks; blocks without a supervised token are left out.

        Args:
            start: the token before a document.
            apart: whether attention stays inside a document.
        """
        self.documents, self.size, self.start, self.apart = documents, size, start, apart
        counts = np.full(-(-len(documents) // size), size, np.int64)
        counts[-1] = len(documents) - size * (len(counts) - 1)
        if not documents.all_supervised:
            counts = self._count(self.documents.supervised)
        self._supervised_blocks = None if counts.all() else np.flatnonzero(counts)
        self.weights = counts if self._supervised_blocks is None else counts[self._supervised_blocks]
        """Supervised tokens of each block."""

    @property
    def tokens(self) -> int:
        """Count the supervised tokens."""
        return int(self.weights.sum())

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of all blocks."""
        return f"{self.documents.fingerprint}-{self.size}-{self.start}-{int(self.apart)}"

    def _count(self, wanted: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """Count tokens of each block, many blocks at a time; `wanted` tells which, from one token to before another."""
        end, stretch = len(self.documents), self.size * max(1, (1 << 22) // self.size)
        counts = []
        for low in range(0, end, stretch):
            marks = wanted(low, min(low + stretch, end))
            counts.append(np.add.reduceat(marks.astype(np.int64), range(0, len(marks), self.size)))
        return np.concatenate(counts)

    def count_known(self) -> np.ndarray:
        """Count in each block the inputs that are supervised tokens: not what stands before a document or the block."""

        def supervised_inputs(low: int, high: int) -> np.ndarray:
            inputs = np.zeros(high - low, bool)
            inputs[1:] = self.documents.supervised(low, high - 1)
            if self.apart:
                inputs &= ~self.documents.begins(low, high)
            inputs[:: self.size] = False
            return inputs

        counts = self._count(supervised_inputs)
        return counts if self._supervised_blocks is None else counts[self._supervised_blocks]

    def filled(self, index: int) -> int:
        """Return how many tokens a block has, before what fills it up."""
        low, high = self._span(index)
        return high - low

    def _span(self, index: int) -> tuple[int, int]:
        """Return the numbers of a block's first token, and of the one after its last."""
        block = index if self._supervised_blocks is None else int(self._supervised_blocks[index])
        return block * self.size, min((block + 1) * self.size, len(self.documents))

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} is not in [0, {len(self)})")
        low, high = self._span(index)
        tokens = self.documents.tokens(max(low - 1, 0), high)
        supervised = None if self.documents.all_supervised else self.documents.supervised(low, high)
        before = int(tokens[0]) if low else self.start
        begins = self.documents.begins(low, high) if self.apart else None
        return row_of(tokens[low > 0 :], self.size, self.start, before, begins, supervised)

    def __reduce__(self):
        return Blocks, (self.documents, self.size, self.start, self.apart)


def row_of(
    tokens: np.ndarray,
    size: int,
    start: int,
    before: int,
    begins: np.ndarray | None,
    supervised: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Return the row of a block, as `Blocks` describes it.

    Args:
        tokens: at most `size`.
        start: the token before a document.
        before: the token before the first one.
        begins: where documents begin, if they are kept apart.
        supervised: which tokens are; default: all.
    """
    count = len(tokens)
    inputs, targets = np.full(size, start, np.int64), np.full(size, IGNORED, np.int64)
    inputs[:1], inputs[1:count] = before, tokens[:-1]
    targets[:count] = tokens
    if supervised is not None:
        targets[:count][~supervised] = IGNORED
    row = {"input_ids": inputs, "targets": targets}
    if begins is not None:
        is_first = np.zeros(size, bool)
        is_first[:count] = begins
        inputs[is_first] = start
        is_first[count : count + 1] = True  # the rest of the last block is a document of its own
        places = np.arange(size)
        row["position_ids"] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return row


def beginning(blocks: "Blocks | TokenBlocks", tokenizer: "PreTrainedTokenizerBase", most: int = 8) -> str:
    """Return how the first document begins, as a prompt: its first tokens; of a conversation, all before the answer."""
    documents = blocks.documents
    count = most
    if not documents.all_supervised:
        count = int(documents.supervised(0, min(len(documents), blocks.size)).argmax()) or most
    return cast(str, tokenizer.decode(documents.tokens(0, min(count, len(documents)))))


def token_loss_by_row(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of each block over its supervised tokens, and their number: [blocks] each.

    Args:
        logits: as of `token_loss`, which returns the mean over all of them.
        targets: [blocks, size].
        smoothing: as of `token_loss`.
    """
    losses = logits
    if logits.ndim > targets.ndim:
        losses = _cross_entropy(logits, targets, smoothing, "none").view_as(targets)
    tokens = (targets != IGNORED).sum(1)
    return losses.sum(1) / tokens.clamp(min=1), tokens


def token_loss(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy over the supervised tokens, or 0 if there are none.

    Args:
        logits: [blocks, size, vocabulary]; or losses of tokens, [blocks, size], with their smoothing.
        targets: [blocks, size].
        smoothing: the share of each target that is spread evenly over the vocabulary.
    """
    total = logits.sum() if logits.ndim == targets.ndim else _cross_entropy(logits, targets, smoothing, "sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


def _cross_entropy(logits: Tensor, targets: Tensor, smoothing: float, reduction: str) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, -2).float(),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction=reduction,
        label_smoothing=smoothing,
    )
