"""Blocks of tokens that `tokenize` has written: read by chunks, through a cache, however many there are.

Blocks end where chunks do, so that reading one never fetches two chunks. The first token of a block is predicted from
the one before it in its chunk; the first of a chunk from the beginning-of-text token, as that of a document is, also
where a long document goes on from the chunk before.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from app.data.cache import cache_folder
from app.data.corpus.blocks import row_of
from app.data.corpus.token_shards import Tokens, TokensRecord, tokens_of
from app.data.streams.chunk_cache import ChunkCache, ReadByChunks
from app.data.streams.index import Index
from app.sampling.batch_plan import BatchPlan
from app.sampling.hashing import key_of
from app.sampling.orders import ByChunks
from app.sampling.pieces import Pieces
from app.storage.drafts import write


class TokenBlocks:
    """Blocks of at most `size` tokens, numbered through all chunks: block b of chunk c is `first[c] + b`.

    A row is as those of `blocks.Blocks`. Blocks without a supervised token are left out.
    """

    digested: Sequence[int] = ()
    """No row is read to tell whether data are the same: the fingerprint says it."""

    def __init__(
        self,
        flag: str,
        index: Index,
        cache: ChunkCache,
        record: TokensRecord,
        size: int,
        apart: bool,
        span: tuple[int, int] | None = None,
    ):
        """Cut the chunks of an index into blocks.

        Args:
            flag: names the data in errors.
            cache: of the index.
            record: of the shards of the index.
            apart: whether attention stays inside a document.
            span: the first block, and the one after the last, of a part of all blocks; default: all.
        """
        self._index, self._cache, self.record, self.size, self.apart = index, cache, record, size, apart
        self._cut_of = flag, index, cache, record, size, apart
        self.folder = index.shards.folder
        """Folder or URL of the shards."""
        self.origin = f"{flag} {self.folder}"
        """The words by which errors name them."""
        self.start = record.settings.meaning.start
        # The blocks of each chunk, those without a supervised token included; and its tokens.
        self._blocks, self._tokens = Pieces.of(-(-index.rows.astype(np.int64) // size)), Pieces.of(index.rows)
        self._supervised_blocks: np.ndarray | None = None
        self._counts: np.ndarray | None = None
        if not record.settings.meaning.all_supervised:
            per_block = self._count("supervised", lambda tokens: tokens.supervised)
            self._supervised_blocks = np.flatnonzero(per_block)
            self._counts = per_block[self._supervised_blocks]
        known = self._blocks.rows if self._supervised_blocks is None else len(self._supervised_blocks)
        self._low, self._high = span or (0, known)
        self._all = known
        self.weights = BlockWeights(self)
        """Supervised tokens of each block."""

    def streamed(self, window: int) -> "StreamedBlocks":
        """Return the same blocks for a run that goes through them chunk by chunk; for `window` see StreamOrder."""
        return StreamedBlocks(self, window)

    def part(self, low: int, high: int) -> "TokenBlocks":
        """Return the blocks with numbers from `low` to before `high`, as data of their own."""
        return TokenBlocks(*self._cut_of, span=(self._low + low, self._low + high))

    def __len__(self) -> int:
        return self._high - self._low

    # Where blocks are

    @cached_property
    def sizes(self) -> np.ndarray:
        """Count the blocks of each chunk, int64 [chunks]."""
        if self._supervised_blocks is not None:
            chunks = self._blocks.piece_of(self._supervised_blocks[self._low : self._high])
            return np.bincount(chunks, minlength=len(self._blocks)).astype(np.int64)
        return np.diff(np.clip(self._blocks.borders, self._low, self._high))

    @cached_property
    def first(self) -> np.ndarray:
        """Return the number of each chunk's first block, int64 [chunks]."""
        return Pieces.of(self.sizes).first

    def chunks_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the chunk that each block is in.

        Raises:
            IndexError: there is no such block.
        """
        return self._blocks.piece_of(self._places(ids))

    def prepare(self, ids: np.ndarray) -> None:
        """Begin to fetch the chunks of blocks, the first ones first."""
        self._cache.prepare(dict.fromkeys(self.chunks_of(ids).tolist()))

    def close(self) -> None:
        """Fetch nothing ahead any more."""
        self._cache.close()

    def _places(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of blocks among all, those without a supervised token included."""
        ids = np.asarray(ids, np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < len(self)):
            raise IndexError(f"there are {len(self)} blocks")
        return self._low + ids if self._supervised_blocks is None else self._supervised_blocks[self._low + ids]

    def _in_chunk(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return of blocks the chunk, the first token in it, and the one after the last."""
        chunks, blocks = self._blocks.places_of(places)
        low = blocks * self.size
        return chunks, low, np.minimum(low + self.size, self._index.rows[chunks])

    # Rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[dict[str, np.ndarray]]:
        chunks, lows, highs = self._in_chunk(self._places(np.asarray(ids)))
        rows: dict[int, dict[str, np.ndarray]] = {}
        for chunk in dict.fromkeys(chunks.tolist()):
            table = self._cache.table(chunk)
            for here in np.flatnonzero(chunks == chunk).tolist():
                rows[here] = self._row(tokens_of(table, max(int(lows[here]) - 1, 0), int(highs[here])), lows[here] > 0)
        return [rows[here] for here in range(len(ids))]

    def _row(self, tokens: Tokens, has_one_before: bool) -> dict[str, np.ndarray]:
        """Return a row, given the tokens of a block and, if it is in the same chunk, the one before them."""
        before = int(tokens.ids[0]) if has_one_before else self.start
        own = tokens.part(int(has_one_before))
        supervised = None if self._supervised_blocks is None else own.supervised
        return row_of(own.ids, self.size, self.start, before, own.begins if self.apart else None, supervised)

    def filled(self, index: int) -> int:
        """Return how many tokens a block has, before what fills it up."""
        _, low, high = self._in_chunk(self._places(np.array([index])))
        return int(high[0] - low[0])

    # Amounts

    @property
    def tokens(self) -> int:
        """Count the supervised tokens."""
        if self._counts is not None:
            return int(self._counts[self._low : self._high].sum())
        return len(self.documents)

    def supervised(self, ids: np.ndarray) -> np.ndarray:
        """Count the supervised tokens of blocks, int64.

        Raises:
            IndexError: there is no such block.
        """
        places = self._places(ids)
        if self._counts is not None:
            return np.asarray(self._counts[self._low + ids], np.int64)
        _, low, high = self._in_chunk(places)
        return high - low

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of all blocks, wherever the shards lie."""
        digests = [each.amount.digest for each in self.record.whole]
        cut = self._index.rows.astype("<i4").tobytes(), self.size, self.start, self.apart, self._low, self._high
        return key_of(*digests, *cut)

    def shard_hashes(self) -> dict[str, str]:
        """Hash what is in each shard, by its name."""
        return self._index.shard_hashes()

    def _count(self, name: str, marks: Callable[[Tokens], np.ndarray]) -> np.ndarray:
        """Count tokens in each of all blocks; `marks` tells which of a chunk's. It is done once, and kept."""
        digests = [each.amount.digest for each in self.record.whole]
        key = key_of("token-blocks", name, *digests, self._index.rows.astype("<i4").tobytes(), self.size)
        file = cache_folder() / "token-blocks" / f"{key}.npy"
        try:
            return np.load(file, mmap_mode="r")
        except (OSError, ValueError):
            counts, content = self._counted(marks), io.BytesIO()
            np.save(content, counts)
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file, content.getvalue())
            return counts

    def _counted(self, marks: Callable[[Tokens], np.ndarray]) -> np.ndarray:
        counts = []
        for chunk in range(len(self._blocks)):
            wanted = marks(tokens_of(self._cache.table(chunk))).astype(np.int64)
            counts.append(np.add.reduceat(wanted, range(0, len(wanted), self.size)))
        return np.concatenate(counts)

    def count_known(self) -> np.ndarray:
        """Count in each block the inputs that are supervised tokens: not what stands before a document or the block."""

        def supervised_inputs(tokens: Tokens) -> np.ndarray:
            inputs = np.zeros(len(tokens), bool)
            inputs[1:] = tokens.supervised[:-1]
            if self.apart:
                inputs &= ~tokens.begins
            inputs[:: self.size] = False
            return inputs

        counts = self._count(f"known, {self.apart}", supervised_inputs)
        return counts[self._places(np.arange(len(self)))]

    @cached_property
    def documents(self) -> "TokenDocuments":
        """Return the documents that the blocks are cut from, as far as these are in them."""
        ends = [self._token_of(place) for place in (self._low, self._high)]
        return TokenDocuments(self._index, self._cache, self.record, *ends)

    def _token_of(self, block: int) -> int:
        """Return the number of the first token, among all, that is not before a block of all supervised ones."""
        if block in (0, self._all):
            return self._tokens.rows if block else 0
        place = block if self._supervised_blocks is None else int(self._supervised_blocks[block])
        (chunk,), (low,), _ = self._in_chunk(np.array([place]))
        return int(self._tokens.first[chunk] + low)


class StreamedBlocks(TokenBlocks):
    """Blocks in an order of their own, which reads chunk after chunk."""

    def __init__(self, blocks: TokenBlocks, window: int):
        """Take blocks; `window` is that of StreamOrder."""
        super().__init__(*blocks._cut_of, span=(blocks._low, blocks._high))
        self._window = window

    def order(self, plan: BatchPlan) -> ByChunks:
        """Return the order in which a run reads the blocks."""
        return ByChunks(self.sizes, plan.micro_batches_per_step, self._window, plan.seed)

    def read_by_chunks(self) -> list[ReadByChunks | None]:
        """Say how a run reads the blocks."""
        return [self._cache.read_by(self._window)]


class BlockWeights:
    """How many supervised tokens blocks have, by their numbers. Where all are supervised, none of it is in memory."""

    def __init__(self, blocks: TokenBlocks):
        """Count those of some blocks."""
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, ids: Any) -> Any:
        """Return the weights of blocks, int64; `ids` is a number, an array of numbers, or a slice."""
        numbers = np.arange(*ids.indices(len(self))) if isinstance(ids, slice) else np.asarray(ids)
        return self._blocks.supervised(numbers)

    def fingerprint_of(self, samples: int) -> str:
        """Hash those of the first blocks; only all are asked for."""
        return key_of("weights", self._blocks.fingerprint, samples)


class TokenDocuments:
    """The tokens of shards, one after the other, or those in a stretch of them, as `documents.Documents` has them.

    In a shard that the stretch cuts, its bytes of text count by the share of the shard's tokens.
    """

    def __init__(self, index: Index, cache: ChunkCache, record: TokensRecord, low: int, high: int):
        """Take the tokens with numbers from `low` to before `high`."""
        self._index, self._cache, self._record, self._low, self._high = index, cache, record, low, high
        self._chunks = Pieces.of(index.rows)
        amounts = [each.amount for each in record.whole]
        self._shards = Pieces.of([each.tokens for each in amounts])
        self.date = record.settings.date
        """The date that the chat template has written; empty if it has written none."""
        self.all_supervised = record.settings.meaning.all_supervised
        # Where they are is not kept: those of a part of all are counted with its beginning.
        self.unlearnt = 0 if low else sum(each.unlearnt for each in amounts)
        """Conversations of which nothing is learnt."""

    def __len__(self) -> int:
        return self._high - self._low

    @cached_property
    def count(self) -> int:
        """Count the documents that begin here."""
        return self._begun_before(self._high) - self._begun_before(self._low)

    @cached_property
    def bytes(self) -> int:
        """Count the bytes of the supervised text."""
        return max(self._bytes_before(self._high) - self._bytes_before(self._low), 1)

    def _begun_before(self, token: int) -> int:
        shard, start = self._shard_of(token)
        whole = sum(each.amount.documents for each in self._record.whole[:shard])
        return whole + sum(int(np.count_nonzero(part.begins)) for part in self._parts(start, token))

    def _bytes_before(self, token: int) -> int:
        shard, start = self._shard_of(token)
        whole = sum(each.amount.bytes for each in self._record.whole[:shard])
        if token == start:
            return whole
        amount = self._record.whole[shard].amount
        return whole + round(amount.bytes * (token - start) / amount.tokens)

    def _shard_of(self, token: int) -> tuple[int, int]:
        """Return the number of the shard with a token, and of its first one; of the last token's end, of no shard."""
        shard = int(self._shards.piece_of(token))
        return shard, int(self._shards.borders[shard])

    def tokens(self, low: int, high: int) -> np.ndarray:
        """Return the tokens with numbers from `low` to before `high`."""
        return self._joined(low, high).ids

    def supervised(self, low: int, high: int) -> np.ndarray:
        """Tell which tokens from `low` to before `high` are supervised."""
        return self._joined(low, high).supervised

    def begins(self, low: int, high: int) -> np.ndarray:
        """Tell at which tokens from `low` to before `high` a document begins."""
        return self._joined(low, high).begins

    def _joined(self, low: int, high: int) -> Tokens:
        """Return the tokens from one number to before another: at least one."""
        return Tokens.joined([*self._parts(self._low + low, self._low + high)])

    def _parts(self, low: int, high: int) -> Iterator[Tokens]:
        """Yield the tokens from one number to before another, among those of all shards, chunk by chunk."""
        if low >= high:
            return
        first, last = self._chunks.piece_of(np.array([low, high - 1])).tolist()
        borders = [low, *self._chunks.borders[first + 1 : last + 1].tolist(), high]
        for chunk, (start, end) in enumerate(pairwise(borders), first):
            offset = int(self._chunks.borders[chunk])
            yield tokens_of(self._cache.table(chunk), start - offset, end - offset)
