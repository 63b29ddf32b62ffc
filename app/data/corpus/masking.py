"""Masked language modelling: tokens of blocks are hidden, to be found from the tokens on both sides of them.

How many tokens of a block are masked follows from the block alone, so the weights of a step are known before its masks
are drawn. Masks are drawn by (seed, epoch, block) in training, and in evaluation are always the same.

Sources: BERT (Devlin et al., 2019) and SpanBERT (Joshi et al., 2020).
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from app.data.config import Masking
from app.data.corpus.blocks import Blocks
from app.data.corpus.joined_blocks import JoinedBlocks
from app.data.corpus.token_blocks import StreamedBlocks, TokenBlocks
from app.data.rows import IGNORED
from app.data.text.token_dropout import check_dropout, ordinary
from app.errors import UserError
from app.sampling.seeding import EVALUATION, sample_generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST = 10  # tokens of a span


class Masker:
    """Mask the tokens of a block's row; pass it to `run.batches` as `augment`, with MaskedBlocks."""

    def __init__(self, settings: Masking, tokenizer: "PreTrainedTokenizerBase"):
        """Prepare to mask.

        Raises:
            UserError: the tokenizer has no mask token.
        """
        if tokenizer.mask_token_id is None:
            raise UserError(
                f"--mask.rate {settings.rate:g}: the tokenizer of --model {tokenizer.name_or_path} has no mask token; "
                "give a model that has one, such as bert-base-cased, or leave out --mask.rate to predict the next token"
            )
        self.settings, self.mask, self.ordinary = settings, tokenizer.mask_token_id, ordinary(tokenizer)
        self.up_to = np.cumsum(lengths_of(settings.span))

    @classmethod
    def of(cls, settings: Masking, tokenizer: "PreTrainedTokenizerBase") -> "Masker | None":
        """Return what --mask asks for; None if that is nothing."""
        return cls(settings, tokenizer) if settings.rate else None

    def count(self, maskable: np.ndarray) -> np.ndarray:
        """Return how many tokens of a block are masked, if so many can be: at least one."""
        return np.maximum(np.rint(self.settings.rate * maskable), np.minimum(maskable, 1)).astype(np.int64)

    def __call__(self, row: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        """Return a row whose `targets` are the tokens that were masked in `input_ids`, and -100 elsewhere.

        A span that is longer than what is left of its document goes on in the next one, as a span of its own.
        """
        is_maskable = row["position_ids"] > 0
        is_maskable[1:] &= row["targets"][:-1] != IGNORED
        places = np.flatnonzero(is_maskable)
        count = int(self.count(np.array(len(places))))
        lengths = 1 + np.searchsorted(self.up_to[:-1], random.random(count), side="right")
        ends = np.cumsum(lengths)
        spans = 1 + int(np.searchsorted(ends, count))
        lengths, ends = lengths[:spans], np.minimum(ends[:spans], count)
        lengths[-1] = ends[-1] - (ends[-2] if spans > 1 else 0)
        # Each span takes one of the places that there are if every span counts as one; so no two of them overlap.
        begins = np.sort(random.choice(len(places) - count + spans, spans, replace=False)) - np.arange(spans)
        chosen = places[np.repeat(begins, lengths) + np.arange(count)]
        kinds = np.repeat(random.random(spans), lengths)
        others = self.ordinary[random.integers(len(self.ordinary), size=count)]
        inputs, targets = row["input_ids"].copy(), np.full_like(row["targets"], IGNORED)
        targets[chosen] = inputs[chosen]
        is_unchanged, replaced = kinds < self.settings.keep, kinds < self.settings.keep + self.settings.random
        inputs[chosen] = np.where(is_unchanged, targets[chosen], np.where(replaced, others, self.mask))
        return {**row, "input_ids": inputs, "targets": targets}


class MaskedBlocks:
    """Blocks to be masked: those with a token that can be, with `position_ids` in every row.

    Can be masked: supervised tokens, but not the first input of a block, and nothing that marks a document's begin.
    """

    def __init__(self, blocks: Blocks | TokenBlocks | JoinedBlocks, masker: Masker, seed: int | None = None):
        """Choose the blocks.

        Args:
            seed: if given, rows are masked, always in the same way, for evaluation.

        Raises:
            UserError: there are none.
        """
        if isinstance(blocks, StreamedBlocks):
            raise UserError(
                "--mask.rate: of streamed tokens, nobody knows which blocks can be masked: give --data.stream false "
                "and a folder of this machine"
            )
        self.blocks, self.masker, self.seed = blocks, masker, seed
        maskable = blocks.count_known()
        self._maskable_blocks = np.flatnonzero(maskable)
        if not len(self._maskable_blocks):
            raise UserError("--mask.rate: there is nothing to mask; give more texts, or a larger --data.block")
        self.weights = masker.count(maskable[self._maskable_blocks])
        """Masked tokens of each block."""

    def filled(self, index: int) -> int:
        """Return how many tokens a block has, before what fills it up."""
        return self.blocks.filled(int(self._maskable_blocks[index]))

    @property
    def tokens(self) -> int:
        """Count the masked tokens."""
        return int(self.weights.sum())

    @property
    def fingerprint(self) -> str:
        """Return a hash of all blocks."""
        return f"{self.blocks.fingerprint}-masked"

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        block = int(self._maskable_blocks[index])
        row, filled = self.blocks[block], self.blocks.filled(block)
        if "position_ids" not in row:  # one stream: only what fills up the last block is apart
            places = np.arange(self.blocks.size)
            row["position_ids"] = np.where(places < filled, places, places - filled)
        return row if self.seed is None else self.masker(row, sample_generator(self.seed, EVALUATION, index))


def lengths_of(mean: float) -> np.ndarray:
    """Return the probabilities of spans of 1, 2, ... LONGEST tokens: geometric, with this mean."""
    lengths = np.arange(LONGEST)
    low, high = 0.0, 1.0  # what a length's probability is multiplied by for the next one
    for _ in range(60):
        middle = (low + high) / 2
        weights = middle**lengths
        low, high = (middle, high) if (weights @ lengths) / weights.sum() + 1 < mean else (low, middle)
    return low**lengths / (low**lengths).sum()


def check_masking(settings: Masking, dropout: float, sample: str) -> None:
    """Check the settings of masking, and that nothing else is asked for that does not go with it.

    Args:
        dropout: --token-dropout.
        sample: --sample.

    Raises:
        UserError: they are out of range, or contradict each other.
    """
    for name, most in (("rate", "below 1"), ("keep", "at most 1"), ("random", "at most 1")):
        value = getattr(settings, name)
        if not 0 <= value <= 1 or (name == "rate" and value == 1):
            raise UserError(f"--mask.{name} {value:g}: must be at least 0 and {most}, for example 0.15")
    if not 1 <= settings.span <= LONGEST / 2:
        raise UserError(f"--mask.span {settings.span:g}: must be from 1 (single tokens) to {LONGEST // 2}")
    if settings.keep + settings.random > 1:
        raise UserError(
            f"--mask.keep {settings.keep:g} and --mask.random {settings.random:g} are more than all masked tokens: "
            "together they may be at most 1"
        )
    check_dropout(dropout)
    changed = [f.name for f in dataclasses.fields(settings) if getattr(settings, f.name) != f.default]
    if changed and not settings.rate:
        raise UserError(f"--mask.{changed[0]} does nothing without --mask.rate, for example --mask.rate 0.15")
    if settings.rate and dropout:
        raise UserError(
            f"--token-dropout {dropout:g} is for models that predict the next token, as --mask.rate replaces tokens "
            "already: give one of the two"
        )
    if settings.rate and sample:
        raise UserError(f"--sample {sample!r} is for models that predict the next token: leave it out with --mask.rate")
