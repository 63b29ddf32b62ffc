"""Sentences whose tokens have tags: loading them, and cutting tokens into the model's sub-words once for all runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from app.config.needs import EVERYTHING, Needs
from app.data.cache import cache_folder, using_cache
from app.data.config import TagData
from app.data.loading import Tables, load_tables
from app.data.rows import IGNORED
from app.data.tables.classes import coded, some
from app.data.tables.columns import LabelColumn, check_columns, held, is_list, is_text, row_name
from app.data.text.encoding import (
    ROWS_AT_ONCE,
    check_padding,
    check_room_for_text,
    encoded_once,
    identity,
    text_features,
)
from app.data.text.schemes import check_spans, from_iob1, scheme_of
from app.data.text.tokenizer import PIECES, train_tokenizer, trained_once
from app.data.text.tokens import TokenTable
from app.errors import UserError
from app.sampling.hashing import hash_of_bytes, key_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# Part of the cache's key: raise it when the stored columns change.
FORMAT = 1


@dataclass
class Tags:
    """The tags of all tables."""

    names: list[str]
    """In the order of the model's outputs."""
    spans: bool
    """Tags mark entities, as B-name, I-name and O do; else each token has a tag of its own."""
    sets: dict[str, tuple[np.ndarray, np.ndarray]]
    """Of each table, by name: the positions of all tags among the names, int64 [tokens], and tokens a row, [rows]."""
    note: str = ""
    """What the user should know of how they were read."""

    def summary(self) -> str:
        """Say in a few words what is predicted."""
        if not self.spans:
            return f"{len(self.names):,} tags: {some(self.names)}"
        kinds = list(dict.fromkeys(name[2:] for name in self.names if name != "O"))
        return f"{len(self.names):,} tags of {len(kinds):,} kinds of entities: {some(kinds)}"


def load_tagged(config: TagData, needs: Needs = EVERYTHING) -> tuple[Tables, Tags]:
    """Load the sentences to train and to evaluate on, and their tags; the training table has the name `train`.

    Args:
        needs: of the run, `run.needs`.

    Raises:
        UserError: a row has more or fewer tags than tokens, or tags do not fit each other, or there is only one.
    """
    check_padding(config.pad_to_multiple_of, config.max_length)
    tables = load_tables(config, columns=(config.tokens, config.tags), needs=needs)
    named = {"train": tables.train, **tables.sets}
    columns = {name: _tags_of(table, config) for name, table in named.items()}
    note = from_iob1(list(columns.values()), config.scheme)
    names, _, codes_by_table = coded(list(columns.values()), config.classes)
    codes = dict(zip(columns, codes_by_table, strict=True))
    if tables.has_training_rows and len(np.unique(codes["train"])) < 2:
        raise UserError(
            f"--data.tags {config.tags}: all {len(codes['train']):,} tokens to train on have the tag "
            f"{names[codes['train'][0]]}: give data with two tags or more"
        )
    spans = scheme_of("iob2" if config.scheme == "iob1" else config.scheme, names)
    for name, column in columns.items() if spans else ():
        check_spans(column, codes[name], names, spans)
    return tables, Tags(names, bool(spans), {name: (codes[name], columns[name].counts) for name in named}, note)


def _tags_of(table: "Dataset", config: TagData) -> LabelColumn:
    """Read the column of tags, and check that each token has one."""
    import pyarrow.compute as pc

    check_columns(table, (config.tokens,), "tokens")
    check_columns(table, (config.tags,), "tags")
    for flag, name in (("tokens", config.tokens), ("tags", config.tags)):
        kind = table.data.schema.field(name).type
        if not is_list(kind) or (flag == "tokens" and not is_text(kind.value_type)):
            raise UserError(
                f"--data.{flag} {name} of {held(table, name)}: give a column of lists, one {flag[:-1]} for "
                "each word; .conll and .txt files of a word and a tag in each line are read as such"
            )
    tags = LabelColumn(table, config.tags, "tags")
    words = table.select_columns([config.tokens]).with_format("arrow")[:].column(0)
    counts = np.asarray(pc.list_value_length(words).fill_null(0), np.int64)
    if (wrong := (counts != tags.counts) | (counts == 0)).any():
        row = int(np.flatnonzero(wrong)[0])
        raise UserError(
            f"--data.tags {config.tags}: {row_name(table, row)} has {tags.counts[row]} tags for {counts[row]} tokens: "
            "give each token one, and leave out rows without tokens"
        )
    return tags


def own_tokenizer(table: "Dataset", column: str, vocab: int, max_length: int) -> "PreTrainedTokenizerBase":
    """Train a tokenizer on the tokens of a table, or load the one that another process or run trained on them."""

    def texts() -> Iterator[str]:
        for batch in table.select_columns([column]).with_format("arrow").iter(ROWS_AT_ONCE):
            yield from map("\n".join, batch.column(0).to_pylist())

    key = ("tags", table._fingerprint, vocab, max_length, column)
    return trained_once(key, lambda: train_tokenizer(texts(), vocab, max_length, PIECES))


def tokenize(
    table: "Dataset",
    column: str,
    tags: tuple[np.ndarray, np.ndarray],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
) -> TokenTable:
    """Cut the tokens of a table into sub-words, of which each token's first one has its tag and the others -100.

    Args:
        tags: of the table, as in Tags.sets.

    Raises:
        UserError: the tokenizer cannot tell which token a sub-word is from.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"--model {tokenizer.name_or_path}: its tokenizer does not say which word a sub-word is from; use a model "
            "with a tokenizer.json"
        )
    codes, counts = tags
    starts = np.cumsum([0, *counts])
    check_room_for_text(tokenizer, max_length)
    key = key_of(FORMAT, table._fingerprint, *identity(tokenizer), max_length, column, hash_of_bytes([codes]))
    path = cache_folder() / f"tags-{key}.arrow"

    def encoded(rows: dict[str, list], numbers: list[int]) -> "pa.Table":
        tags_by_row = [codes[starts[row] : starts[row + 1]] for row in numbers]
        return _encode(rows[column], tags_by_row, tokenizer, max_length)

    with using_cache():
        encoded_once(table, [column], encoded, text_features(has_labels=True), path, key)
    return TokenTable(path)


def _encode(
    sentences: list[list[str]], tags: list[np.ndarray], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> "pa.Table":
    import pyarrow as pa

    encoded = tokenizer(
        sentences, is_split_into_words=True, truncation=True, max_length=max_length, return_attention_mask=False
    )
    labels = []
    for i, tags_of_tokens in enumerate(tags):
        words = np.array([-1 if word is None else word for word in encoded.word_ids(i)])
        first = (words >= 0) & (np.diff(words, prepend=-1) != 0)
        labels.append(np.where(first, tags_of_tokens[words], IGNORED).astype(np.int16))
    return pa.table(
        {
            "input_ids": pa.array(encoded["input_ids"], pa.list_(pa.int32())),
            "labels": pa.array(labels, pa.list_(pa.int16())),
            "truncated": pa.array([bool(encoding.overflowing) for encoding in encoded.encodings]),
        }
    )


def describe(tables: Tables, tags: Tags, train_rows: TokenTable, eval_sets: dict[str, TokenTable], longest: int) -> str:
    """Describe the data: a line of numbers, one of tags, one for each further set, and what to know of splits."""
    trained = f"{_amount(tags, 'train')} to train on, " if tables.has_training_rows else ""
    parts = [f"{trained}{_amount(tags, '')} {tables.to_evaluate_on()}"]
    if cut := train_rows.truncated + eval_sets[""].truncated:
        parts.append(f"{cut:,} longer than {longest} sub-words (--data.max-length) and cut")
    more = tables.describe_others({name: _amount(tags, name) for name in eval_sets})
    return "\n".join(["; ".join(parts), tags.summary(), *more, *filter(None, [tags.note, tables.note])])


def _amount(tags: Tags, name: str) -> str:
    codes, counts = tags.sets[name]
    return f"{len(counts):,} sentences of {len(codes):,} tokens"
