"""Tokens that `tokenize` has written, in the place of texts: what is trained and evaluated on, with which tokenizer."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from app import storage
from app.config.needs import Needs
from app.data.cache import cache_folder, using_cache
from app.data.config import CorpusData
from app.data.corpus.documents import end_of, start_of
from app.data.corpus.token_blocks import TokenBlocks
from app.data.corpus.token_shards import SPLITS, TOKENIZER, find_tokens, splits_at
from app.data.leaks import NOTHING, Place, Taken, Trained
from app.data.loading import Tables, load_tables
from app.data.streams.chunk_cache import UNLIMITED, ChunkCache
from app.data.streams.index import index_of
from app.data.streams.opening import GB
from app.data.streams.shards import is_url, real_place
from app.data.tables.columns import name_of
from app.data.tables.splits import count_of, for_evaluation, named_sets
from app.data.text.encoding import lasting_identity
from app.data.text.tokenizer import with_mask
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN = ("byte", "char", "bpe")  # tokenizers of models from scratch, as records name them


@dataclass
class TokenTables(Tables):
    """Blocks of tokens to train on, and blocks, or tables of texts, to evaluate on."""

    train: Any
    evaluation: Any
    others: dict[str, Any] = field(default_factory=dict)

    def to_evaluate_on(self, rows: str = "") -> str:
        return "held out" if self.held_out else f"{rows} to evaluate on ({_name(self.evaluation)})".lstrip()

    def describe_others(self, amounts: dict[str, str]) -> list[str]:
        return [f"evaluated too, as eval-{n}: {amounts[n]} ({_name(table)})" for n, table in self.others.items()]


def _name(table: Any) -> str:
    return f"the tokens of {table.folder}" if isinstance(table, TokenBlocks) else name_of(table)


def holds_tokens(path: str) -> bool:
    """Tell whether a path or a URL is a folder of tokens, finished or not."""
    path = os.path.expanduser(path)
    return (is_url(path) or os.path.isdir(path)) and bool(splits_at(path))


def are_asked_for(config: CorpusData, needs: Needs) -> bool:
    """Tell whether tokens are to be trained on, or evaluated where nothing is trained.

    Raises:
        UserError: tokens are to be evaluated, and texts trained on.
    """
    if needs.skips_training_rows(config):
        return holds_tokens(config.eval_path)
    if len(config.path) == 1 and holds_tokens(config.path[0]):
        return True
    evaluated = {"--data.eval-path": config.eval_path}
    evaluated |= {f"--data.eval-sets {name}": each.path for name, each in named_sets(config.eval_sets).items()}
    for flag, path in evaluated.items():
        if path and holds_tokens(path):
            raise UserError(
                f"{flag} {path} holds tokens, and --data.path {' '.join(config.path)} does not: tokenize both, or give "
                "texts for both"
            )
    return False


def load(config: CorpusData, columns: Sequence[str], needs: Needs) -> TokenTables:
    """Open the tokens to train on, and what to evaluate on.

    That is --data.eval-path or --data.eval-split where given, else the folder's own validation or test split, else the
    last blocks, a fraction --data.holdout of them, which are then not trained on.

    Args:
        columns: that the flags name, for tables of texts to evaluate on.

    Raises:
        UserError: there are none, they cannot be read, or they would be both trained on and evaluated on.
    """
    with using_cache():
        if needs.skips_training_rows(config):
            evaluation = to_evaluate_on(config, columns, "--data.eval-path", config.eval_path, config.eval_split)
            tables = TokenTables(evaluation, evaluation, has_training_rows=False)
        else:
            tables = to_train_on(config, columns)
        for name, other in named_sets(config.eval_sets).items():
            train = [tables.train] if tables.has_training_rows else []
            tables.others[name] = to_evaluate_on(config, columns, needs.set_flag, *other, train)
        if only := needs.only_set:
            return TokenTables(tables.train, tables.others[only], has_training_rows=tables.has_training_rows)
        return tables


def to_train_on(config: CorpusData, columns: Sequence[str], flag: str = "--data.path") -> TokenTables:
    """Open the tokens to train on, and what to evaluate on; raises as `load`.

    Args:
        flag: names the data in errors.
    """
    path = os.path.expanduser(config.path[0])
    if config.name or config.columns:
        raise UserError(
            f"{flag} {path} holds tokens, which have no configuration (--data.name) and no columns to name "
            "(--data.columns): leave these out"
        )
    of_split = "--data.split" if flag == "--data.path" else f"{flag} {path}, split"
    train = _open(flag, path, _split(of_split, config.split), config)
    meaning = train.record.settings.meaning
    if [*columns] not in (["text"], meaning.columns):
        raise UserError(
            f"{flag} {path} holds tokens of {' and '.join(meaning.columns)}, not of {' and '.join(columns)}: "
            "leave out the flags of columns, or tokenize again"
        )
    as_asked = _streamed(config, path)
    trained = Trained((Taken([Place(real_place(path))], [(config.split, 0, len(train))]),))
    if config.eval_path:
        scored = to_evaluate_on(config, columns, "--data.eval-path", config.eval_path, config.eval_split, [train])
        return TokenTables(as_asked(train), scored, trained=trained)
    own = [split for split in for_evaluation(splits_at(path)) if split != config.split]
    if chosen := config.eval_split or next(iter(own), ""):
        scored = _evaluated("--data.eval-split", path, chosen, config, [train])
        return TokenTables(as_asked(train), scored, trained=trained)
    if len(train) < 2:
        raise UserError(
            f"{flag} {path} has {len(train)} block of {config.block} tokens, too few to hold some out for "
            "evaluation: give more data, --data.eval-path, or a smaller --data.block"
        )
    cut = len(train) - count_of(len(train), config.holdout)
    scored = train.part(cut, len(train))
    return TokenTables(as_asked(train.part(0, cut)), scored, held_out=True, trained=trained)


def are_streamed(config: CorpusData, path: str) -> bool:
    """Tell whether tokens are read in the order of chunks.

    Raises:
        UserError: a flag asks for what tokens have not.
    """
    if config.sort_over > 1:
        raise UserError("--data.sort-over: blocks of tokens are of one length, and not sorted: leave it out")
    if config.skips:
        raise UserError(
            "--data.bad skip: a chunk of tokens cannot be left out: copy its shard again, or tokenize again"
        )
    return config.streams(lambda: is_url(path))


def _streamed(config: CorpusData, path: str) -> Callable[[TokenBlocks], TokenBlocks]:
    """Return a function that brings blocks to train on into the order of streams, if they are to be streamed."""
    return (lambda blocks: blocks.streamed(config.window)) if are_streamed(config, path) else (lambda blocks: blocks)


def _split(flag: str, split: str) -> str:
    if split not in SPLITS:
        raise UserError(f"{flag} {split}: tokens have the splits {', '.join(SPLITS)}, and no slices: name one of them")
    return split


def to_evaluate_on(
    config: CorpusData,
    columns: Sequence[str],
    flag: str,
    path: str,
    split: str = "",
    train: Sequence[TokenBlocks] = (),
    trained: Trained = NOTHING,
) -> Any:
    """Open tokens, or a table of texts, to evaluate on.

    Args:
        train: the tokens that are trained on.
        trained: where the texts that are trained on are read from.

    Raises:
        UserError: they cannot be read, or are trained on.
    """
    path = os.path.expanduser(path)
    if holds_tokens(path):
        split = split or next(iter(for_evaluation(splits_at(path))), "train")
        return _evaluated(flag, path, split, config, train)
    alone = dataclasses.replace(config, path=(), eval_path=path, eval_split=split, eval_sets=())
    return load_tables(alone, columns=columns, needs=Needs(training_rows=False), trained=trained).evaluation


def _evaluated(flag: str, path: str, split: str, config: CorpusData, train: Sequence[TokenBlocks]) -> TokenBlocks:
    """Open tokens to evaluate on.

    Raises:
        UserError: they are trained on.
    """
    blocks = _open(flag, path, _split("--data.eval-split", split), config)
    if any(_digests(blocks) & _digests(each) for each in train):
        raise UserError(
            f"{flag} {split if flag == '--data.eval-split' else path}: these tokens are trained on too (--data.split "
            f"{config.split}); give others, or leave the flag out to have a part held out"
        )
    return blocks


def _digests(blocks: TokenBlocks) -> set[str]:
    return {each.amount.digest for each in blocks.record.whole}


def _open(flag: str, path: str, split: str, config: CorpusData) -> TokenBlocks:
    """Return all blocks of a split.

    Raises:
        UserError: it is not there, not finished, or damaged, or there is nothing to learn.
    """
    record, shards = find_tokens(flag, path, split)
    index = index_of(flag, path, shards, split)
    amounts = [each.amount for each in record.whole]
    rows = np.bincount(index.shard, index.rows, len(amounts)).astype(np.int64).tolist()
    for number, (has, amount) in enumerate(zip(rows, amounts, strict=True)):
        if has != amount.tokens:
            raise UserError(
                f"{flag} {shards.place_of(number)} has {has:,} tokens, and should have {amount.tokens:,}: copy the "
                "shard again, or tokenize again"
            )
    # By the contents, as another folder may have shards of the same names and sizes.
    key = key_of(index.fingerprint, *(amount.digest for amount in amounts))
    # Of blocks in any order, all chunks are read in every epoch.
    limit = int(config.cache_gb * GB) if are_streamed(config, path) else UNLIMITED
    cache = ChunkCache(flag, index, cache_folder() / "streams" / f"tokens-{key}", limit)
    blocks = TokenBlocks(flag, index, cache, record, config.block, config.packing == "documents")
    if not len(blocks):
        raise UserError(f"{flag} {path} has nothing to learn: no token of the split {split} is supervised")
    return blocks


def own_tokenizer(blocks: TokenBlocks, kind: str, block: int) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that lies next to tokens, for a model from scratch.

    Args:
        kind: --scratch.tokenizer.
        block: tokens of the longest text.

    Raises:
        UserError: another kind is asked for, or it cannot be loaded.
    """
    made_with = blocks.record.settings.tokenizer
    if kind != "bpe" and kind != made_with:
        raise UserError(
            f"--scratch.tokenizer {kind}: {blocks.origin} was tokenized with {made_with}: leave the flag out, or "
            "tokenize again"
        )
    tokenizer = _saved(blocks)
    if lasting_identity(tokenizer) != blocks.record.settings.meaning.tokenizer:
        raise UserError(
            f"{blocks.origin}: {TOKENIZER}/tokenizer.json, or a file next to it, is not that of the "
            "tokenizer which the tokens were made with: copy the folder again, or tokenize again"
        )
    tokenizer.model_max_length = block
    return tokenizer


def _saved(blocks: TokenBlocks) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        folder = storage.at(blocks.folder).down(TOKENIZER)
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # tokenizers raises a plain one
        reason = " ".join(str(error).split())
        raise UserError(
            f"{blocks.origin}: {TOKENIZER}/tokenizer.json, or a file next to it, cannot be loaded "
            f"({reason:.200}): copy the folder again, or repeat the command that tokenized"
        ) from error


def check_tokenizer(blocks: TokenBlocks, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Make sure that tokens mean to a model what they meant when they were made.

    Raises:
        UserError: they are of another tokenizer.
    """
    settings = blocks.record.settings
    meaning = settings.meaning
    is_same = lasting_identity(tokenizer) in (meaning.tokenizer, _masking_identity(blocks, tokenizer))
    if not is_same or (start_of(tokenizer), end_of(tokenizer)) != (meaning.start, meaning.end):
        raise UserError(
            f"{blocks.origin} holds tokens of another tokenizer ({settings.tokenizer}) than --model has: "
            "give the model that they were made for, or tokenize again with --tokenizer and this model"
        )


def _masking_identity(blocks: TokenBlocks, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return what identifies the tokenizer of tokens with a mask token added, if that is what a model has."""
    settings = blocks.record.settings
    if settings.tokenizer.partition(" ")[0] not in OWN or len(tokenizer) != settings.meaning.vocabulary + 1:
        return ""
    return lasting_identity(with_mask(_saved(blocks)))
