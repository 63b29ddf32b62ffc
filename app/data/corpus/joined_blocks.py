"""Blocks of several corpora: mixed by weights to train on, or one after the other to evaluate on."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from app.data.corpus.blocks import Blocks
from app.data.corpus.token_blocks import TokenBlocks
from app.data.mixtures.joined import JoinedRows, mixed_order
from app.data.mixtures.mix_file import Mix
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan
from app.sampling.hashing import key_of
from app.sampling.orders import Mixed

Corpus = Blocks | TokenBlocks


class JoinedBlocks(JoinedRows):
    """The blocks of several corpora, as `Blocks` has those of one."""

    def __init__(self, corpora: Sequence[Corpus]):
        """Join them; all have blocks of one size."""
        super().__init__(corpora)
        self.corpora = tuple(corpora)
        self.size, self.start, self.apart = corpora[0].size, corpora[0].start, corpora[0].apart
        self.documents = JoinedDocuments([each.documents for each in corpora])

    @property
    def tokens(self) -> int:
        """Count the supervised tokens."""
        return sum(each.tokens for each in self.corpora)

    @property
    def fingerprint(self) -> str:
        """Return a hash of all blocks."""
        return key_of(*(each.fingerprint for each in self.corpora))

    def filled(self, index: int) -> int:
        """Return how many tokens a block has, before what fills it up."""
        ((corpus, _, numbers),) = self.by_source(np.array([index]))
        return corpus.filled(int(numbers[0]))

    def count_known(self) -> np.ndarray:
        """Count in each block the inputs that are supervised tokens; see `Blocks.count_known`."""
        return np.concatenate([each.count_known() for each in self.corpora])


class MixedBlocks(JoinedBlocks):
    """The blocks of a mixture's sources."""

    def __init__(self, mix: Mix, corpora: Sequence[Corpus]):
        """Mix them."""
        super().__init__(corpora)
        self.mix = mix

    @property
    def fingerprint(self) -> str:
        """Return nothing: each source is compared by itself, as a run may go on with further ones."""
        return ""

    def order(self, plan: BatchPlan) -> Mixed:
        """Return the order in which a run mixes the blocks; raises as `mixed_order`."""
        return mixed_order(self.mix, self.corpora, plan)

    def described(self) -> str:
        """Say what each source has, and its weight."""
        return self.mix.described(f"{corpus.tokens:,} tokens" for corpus in self.corpora)

    def count_known(self) -> np.ndarray:
        """Refuse to choose blocks, which would be mixed no more.

        Raises:
            UserError: always.
        """
        raise UserError("--mask.rate: blocks of a mixture cannot be masked yet: give one source, with --data.path")


class JoinedDocuments:
    """The documents of several corpora, as far as they are counted or shown."""

    def __init__(self, each: Sequence[Any]):
        self._each = tuple(each)
        self.date = next((documents.date for documents in each if documents.date), "")
        self.all_supervised = all(documents.all_supervised for documents in each)
        self.unlearnt = sum(documents.unlearnt for documents in each)

    def __len__(self) -> int:
        return sum(map(len, self._each))

    @cached_property
    def count(self) -> int:
        """Count the documents."""
        return sum(documents.count for documents in self._each)

    @cached_property
    def bytes(self) -> int:
        """Count the bytes of the supervised text."""
        return sum(documents.bytes for documents in self._each)

    def tokens(self, low: int, high: int) -> np.ndarray:
        """Return tokens of the first corpus, from one number to before another."""
        return self._each[0].tokens(low, min(high, len(self._each[0])))

    def supervised(self, low: int, high: int) -> np.ndarray:
        """Tell which tokens of the first corpus are supervised."""
        return self._each[0].supervised(low, min(high, len(self._each[0])))

    def begins(self, low: int, high: int) -> np.ndarray:
        """Tell at which tokens of the first corpus a document begins."""
        return self._each[0].begins(low, min(high, len(self._each[0])))
