"""The tokenizer of a language model from scratch, trained on its texts once for all runs."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from app.data.text.labeled_text import trained_once
from app.data.text.tokenizer import byte_tokenizer, character_tokenizer, train_lm_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_of(
    kind: str, vocab: int, longest: int, key: Sequence[object], texts: Callable[[], Iterable[str]]
) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model from scratch.

    Args:
        kind: "byte", "char" (the texts' characters) or "bpe".
        vocab: tokens of bpe.
        longest: tokens of the longest text.
        key: what decides about the texts.
        texts: gives them.
    """
    if kind == "byte":
        return byte_tokenizer(longest)
    if kind == "char":
        return trained_once(("char", *key), lambda: character_tokenizer(texts(), longest))
    return trained_once(("lm", vocab, *key), lambda: train_lm_tokenizer(texts(), vocab, longest))
