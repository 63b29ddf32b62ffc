"""Texts to model: loading them, tokenizing them once for all runs, and cutting them into blocks; or tokens already."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from app.config.needs import EVERYTHING, Needs
from app.data.config import CorpusData, check_date, in_words
from app.data.corpus import mixed_corpora, token_sets
from app.data.corpus.blocks import Blocks
from app.data.corpus.documents import end_of, start_of
from app.data.corpus.encode import columns_of, read_texts, tokenize
from app.data.corpus.joined_blocks import JoinedBlocks, MixedBlocks
from app.data.corpus.messages import TOOLS
from app.data.corpus.mixed_corpora import Corpora
from app.data.corpus.shorter import block_sizes
from app.data.corpus.token_blocks import TokenBlocks
from app.data.loading import Tables, load_tables
from app.data.tables.columns import name_of
from app.data.text.tokenizer import tokenizer_of, with_mask
from app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

AnyBlocks = Blocks | TokenBlocks | JoinedBlocks

__all__ = ["blocks", "describe", "load", "own_tokenizer"]


def load(config: CorpusData, needs: Needs = EVERYTHING) -> Tables:
    """Load the texts to train and to evaluate on.

    Args:
        needs: of the run, `run.needs`.

    Raises:
        UserError: there are none, or the flags contradict each other.
    """
    columns = columns_of(config)
    if config.block < 2:
        raise UserError(f"--data.block {config.block}: must be at least 2")
    block_sizes(config)
    check_date(config.date)
    if config.mix:
        return mixed_corpora.load(config, columns, needs)
    if token_sets.are_asked_for(config, needs):
        return token_sets.load(config, columns, needs)
    tables = load_tables(config, columns=columns, needs=needs)
    mixed_corpora.refuse_streamed_texts(tables, f"--data.path {' '.join(config.path)}")
    if config.messages:  # tools keep more of a conversation in columns of its own, such as its system message
        unused = [name for name in tables.train.column_names if name not in (*columns, TOOLS)]
        said = f"columns that are not read: {', '.join(unused)}" if unused else ""
        tables.note = "; ".join(filter(None, [tables.note, said]))
    return tables


def own_tokenizer(
    table: "Dataset | TokenBlocks | Corpora", config: CorpusData, kind: str, vocab: int, masked: bool = False
) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model from scratch: of tokens, the one that they were made with.

    Args:
        kind: "byte", "char" (the texts' characters) or "bpe".
        masked: whether the model predicts masked tokens; then there is a token for them, in addition to `vocab`.
    """
    if isinstance(table, Corpora):
        table = table.tokens or table.texts(columns_of(config))
    if isinstance(table, TokenBlocks):
        tokenizer = token_sets.own_tokenizer(table, kind, config.block)
    else:
        tokenizer = _own_tokenizer(table, config, kind, vocab)
    return with_mask(tokenizer) if masked else tokenizer


def _own_tokenizer(table: "Dataset", config: CorpusData, kind: str, vocab: int) -> "PreTrainedTokenizerBase":
    key = (table._fingerprint, config.block, *columns_of(config))
    return tokenizer_of(kind, vocab, config.block, key, lambda: read_texts(table, config))


def blocks(
    table: "Dataset | TokenBlocks | Corpora", config: CorpusData, tokenizer: "PreTrainedTokenizerBase"
) -> AnyBlocks:
    """Tokenize a table's texts, and cut them into blocks; of tokens, see that they are those of the tokenizer.

    Raises:
        UserError: the tokenizer has no end-of-text token, or nothing is left to learn; or tokens are of another one.
    """
    if isinstance(table, Corpora):
        corpora = [_of_one(each, config, tokenizer) for each in table.each]
        return MixedBlocks(table.mix, corpora) if table.to_train_on else JoinedBlocks(corpora)
    return _of_one(table, config, tokenizer)


def _of_one(
    table: "Dataset | TokenBlocks", config: CorpusData, tokenizer: "PreTrainedTokenizerBase"
) -> Blocks | TokenBlocks:
    """Return the blocks of one corpus."""
    if isinstance(table, TokenBlocks):
        token_sets.check_tokenizer(table, tokenizer)
        return table
    if end_of(tokenizer) is None:
        raise UserError(
            "--model: its tokenizer has no end-of-text token, which is needed to end documents; name one as eos_token "
            "in its tokenizer_config.json"
        )
    cut = Blocks(tokenize(table, config, tokenizer), config.block, start_of(tokenizer), config.packing == "documents")
    if not len(cut):
        raise UserError(
            f"{name_of(table)} has nothing to learn: "
            + (
                f"no conversation in {config.messages} has a message of the assistant to learn, and only these are"
                if config.messages
                else "all of its texts are empty"
            )
        )
    return cut


def describe(
    tables: Tables,
    train: AnyBlocks,
    eval_sets: Mapping[str, AnyBlocks],
    tokenizer: "PreTrainedTokenizerBase",
) -> str:
    """Describe the data: a line of numbers, one for each further set, and what to know of splits."""
    parts = [
        (f"{_amount(train)} to train on, " if tables.has_training_rows else "")
        + f"{_amount(eval_sets[''])} {tables.to_evaluate_on()}",
        f"{train.documents.bytes / train.tokens:.2f} bytes a token, vocabulary {len(tokenizer):,}",
        f"blocks of {train.size}, " + ("documents apart" if train.apart else "one stream"),
    ]
    if not train.documents.all_supervised:
        parts.append(f"{train.tokens / len(train.documents):.0%} of the tokens are supervised")
    read = (train, *eval_sets.values()) if tables.has_training_rows else eval_sets.values()
    if unlearnt := sum(blocks.documents.unlearnt for blocks in read):
        parts.append(f"nothing is learnt of {unlearnt:,} conversations without a message of the assistant to learn")
    if train.documents.date:
        parts.append(in_words(train.documents.date))
    more = tables.describe_others({name: _amount(blocks) for name, blocks in eval_sets.items()})
    if isinstance(train, MixedBlocks):
        more.append(train.described())
    return "\n".join(["; ".join(parts), *more, *tables.notes()])


def _amount(cut: AnyBlocks) -> str:
    """Count tokens and documents. The end of txt files that is held out may begin inside a document."""
    documents = cut.documents
    count = f"{documents.count:,} document{'s' * (documents.count != 1)}"
    if documents.begins(0, 1)[0]:
        return f"{len(documents):,} tokens of {count}"
    after = f" and {count} after it" if documents.count else ""
    return f"{len(documents):,} tokens, the end of one document{after},"
