"""Documents as a stream of tokens, any part of which is read from disk without copying."""

import itertools
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from app.data.cache import cache_folder, remember
from app.sampling.hashing import hash_of_bytes
from app.sampling.pieces import Pieces

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase


class Documents:
    """The tokens of a table's documents, one after the other, in Arrow files that all processes map into memory."""

    def __init__(self, info: dict):
        """Open the files that `tokenize` wrote; `info` is what it found out about them."""
        import datasets

        self.info = info
        tables = [datasets.Dataset.from_file(str(cache_folder() / name)).data for name in info["files"]]

        def chunks(column: str) -> "list[pa.Array]":
            return [chunk for table in tables if column in table.column_names for chunk in table.column(column).chunks]

        lists = chunks("input_ids")
        self._ids = [chunk.values.to_numpy() for chunk in lists]
        self._offsets = [chunk.offsets.to_numpy() for chunk in lists]
        self._supervised = [chunk.values.to_numpy() for chunk in chunks("supervised")]
        self._begins = chunks("begins")
        self._pieces = Pieces.of([len(ids) for ids in self._ids])

    def __len__(self) -> int:
        """Count the tokens."""
        return self._pieces.rows

    @property
    def all_supervised(self) -> bool:
        """Tell whether every token is supervised."""
        return not self._supervised

    @property
    def bytes(self) -> int:
        """Count the bytes of the supervised text."""
        return self.info["bytes"]

    @property
    def count(self) -> int:
        """Count the documents."""
        return self.info["documents"]

    @property
    def unlearnt(self) -> int:
        """Count the conversations of which nothing is learnt."""
        return self.info["unlearnt"]

    @property
    def date(self) -> str:
        """Return the date that the chat template has written; empty if it writes none."""
        return self.info["date"]

    def tokens(self, low: int, high: int) -> np.ndarray:
        """Return the tokens with numbers from `low` to before `high`."""
        return self._gather(self._ids, low, high)

    def supervised(self, low: int, high: int) -> np.ndarray:
        """Tell which tokens from `low` to before `high` are supervised."""
        if self.all_supervised:
            return np.ones(high - low, bool)
        return self._gather(self._supervised, low, high).astype(bool)

    def begins(self, low: int, high: int) -> np.ndarray:
        """Tell at which tokens from `low` to before `high` a document begins."""
        is_first = np.zeros(high - low, bool)
        for chunk, start, end in self._parts(low, high):
            offsets = self._offsets[chunk]
            first, last = np.searchsorted(offsets, (start, end))
            places = offsets[first:last]
            if self._begins:
                places = places[self._begins[chunk][int(first) : int(last)].to_numpy(zero_copy_only=False)]
            is_first[places + (self._pieces.first[chunk] - low)] = True
        return is_first

    def _gather(self, arrays: list[np.ndarray], low: int, high: int) -> np.ndarray:
        parts = [arrays[chunk][start:end] for chunk, start, end in self._parts(low, high)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _parts(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Cut a span of tokens at the borders of chunks; yield each chunk's number, and start and end inside it."""
        if low >= high:
            return
        first, last = self._pieces.piece_of(np.array([low, high - 1])).tolist()
        for chunk in range(first, last + 1):
            start, end = self._pieces.borders[chunk : chunk + 2].tolist()
            if start < end:
                yield chunk, max(low, start) - start, min(high, end) - start

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of all tokens and of which are supervised, the same wherever and whenever tokenized."""
        file = (cache_folder() / self.info["files"][0]).with_suffix(".hash")
        try:
            return remember(file, self._digest)
        except OSError:  # the cache belongs to another user
            return self._digest()

    def _digest(self) -> str:
        # One hash for each kind, so that where chunks end makes no difference.
        spans = itertools.pairwise(self._pieces.borders.tolist())
        begins = (np.flatnonzero(self.begins(start, end)) + start for start, end in spans)
        tokens = (ids.astype(np.int32) for ids in self._ids)
        return "".join(hash_of_bytes(pieces, bits=64) for pieces in (tokens, begins, self._supervised))

    def __reduce__(self):
        return Documents, (self.info,)


def start_of(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the token before a document: the tokenizer's beginning-of-text or end-of-text token, or BERT's [CLS]."""
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id)
    return next(mark for mark in marks if mark is not None)


def end_of(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the token after a document: the tokenizer's end-of-text token, or BERT's [SEP]; None if it has neither."""
    return tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
