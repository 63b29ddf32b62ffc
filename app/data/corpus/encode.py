"""Documents made of a table's rows: written out as text, tokenized once for all runs, and kept on disk."""

import itertools
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from app.data.cache import cache_folder, remember, using_cache
from app.data.config import CorpusData
from app.data.corpus.chat_template import ChatTemplate
from app.data.corpus.conversations import (
    Segments,
    check_conversations,
    columns_of_messages,
    conversation,
    messages_of,
)
from app.data.corpus.documents import Documents, end_of, start_of
from app.data.corpus.messages import TOOLS
from app.data.corpus.token_shards import BEGINS, TOKEN, Tokens
from app.data.tables.columns import check_columns, check_texts, name_of, row_name
from app.data.text.encoding import ROWS_AT_ONCE, encoded_once, identity
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# Part of the cache's key: raise it when the stored columns change.
FORMAT = 3
# Bytes of text for each process that tokenizes: with less, the tokenizer's own threads are faster than processes.
BYTES_PER_PROCESS = 64_000_000
# Bytes of the rows that become tokens together, on average; lists of Python take about ten times as much.
BYTES_AT_ONCE = 16_000_000
CHARACTERS_AT_ONCE = 500_000


def columns_of(config: CorpusData) -> list[str]:
    """Return the columns that the flags name.

    Raises:
        UserError: they name several kinds of texts, or only a half of one.
    """
    if config.messages and (config.prompt or config.completion):
        raise UserError("--data.messages is a whole conversation: leave out --data.prompt and --data.completion")
    if bool(config.prompt) != bool(config.completion):
        raise UserError("--data.prompt and --data.completion belong together: give both, or --data.text alone")
    if config.messages:
        return [config.messages]
    return [config.prompt, config.completion] if config.prompt else [config.text]


def check_table(table: "Dataset", config: CorpusData) -> None:
    """Raise a UserError if a column is missing or has the wrong type."""
    columns = columns_of(config)
    if {TOKEN, BEGINS} <= {*table.column_names}:
        raise UserError(
            f"{name_of(table)} holds tokens without a record of what they mean: copy the whole folder that `tokenize` "
            "wrote, with its tokens.json, and give the folder"
        )
    if columns == [config.text] and config.text not in table.column_names and (chats := columns_of_messages(table)):
        raise UserError(
            f"--data.text {config.text}: {name_of(table)} has no such column, but conversations in {chats[0]}: give "
            f"--data.messages {chats[0]}"
        )
    flags = ["messages"] if config.messages else ["prompt", "completion"] if config.prompt else ["text"]
    for flag, name in zip(flags, columns, strict=True):
        check_columns(table, [name], flag)
        if not config.messages:
            check_texts(table, name, flag)
    if config.messages:
        check_conversations(table, config.messages)


def read_texts(table: "Dataset", config: CorpusData) -> Iterator[str]:
    """Yield the texts of all rows, to train a tokenizer on."""
    check_table(table, config)
    columns = columns_of(config)
    for batch in table.select_columns(columns).iter(ROWS_AT_ONCE):
        for name in columns:
            for value in batch[name]:
                if config.messages:
                    yield from (message["content"] or "" for message in messages_of(value, partial(name_of, table)))
                else:
                    yield str(value)


def tokenize(table: "Dataset", config: CorpusData, tokenizer: "PreTrainedTokenizerBase") -> Documents:
    """Tokenize the documents of a table; each ends with the end-of-text token.

    The result is kept on disk for other processes and runs, under a key made of the table's and tokenizer's content.

    Raises:
        UserError: a column is missing or has the wrong type, or the tokenizer lacks a chat template.
    """
    columns = columns_of(config)
    template = template_of(config, tokenizer)
    kind = (kind_of(config), *(template.identity if config.messages else ()))
    key = key_of(FORMAT, table._fingerprint, *identity(tokenizer), end_of(tokenizer), *kind, *columns)
    file = cache_folder() / f"documents-{key}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with using_cache():
        if file.exists() and not all((file.parent / name).exists() for name in remember(file, dict)["files"]):
            file.unlink(missing_ok=True)
        info = remember(file, lambda: _tokenize(table, config, template, key))
    if not info["tokens"]:
        raise UserError(f"{name_of(table)} has no text to learn: all of it is empty")
    return Documents(info)


def kind_of(config: CorpusData) -> str:
    """Return what is learnt of each row: text, prompt (the completion of one) or messages (the assistant's)."""
    return "messages" if config.messages else "prompt" if config.prompt else "text"


def template_of(config: CorpusData, tokenizer: "PreTrainedTokenizerBase") -> ChatTemplate:
    """Return the chat template of a tokenizer, which no other texts than conversations need.

    Raises:
        UserError: it is needed, and there is none.
    """
    template = ChatTemplate(tokenizer, config.date)
    if config.messages and not template.source:
        raise UserError(
            f"--data.messages {config.messages}: the tokenizer has no chat template to write conversations with; use "
            "a --model whose tokenizer has one, or --data.prompt and --data.completion"
        )
    return template


class Encoded(NamedTuple):
    """Some rows that follow each other, as tokens."""

    tokens: Tokens
    unlearnt: int
    """Conversations of which nothing is learnt."""
    bytes: int
    """Of the text that is learnt."""


def encoded(table: "Dataset", rows: range, config: CorpusData, template: ChatTemplate) -> Iterator[Encoded]:
    """Tokenize rows of a table as `tokenize` does, some at a time. Whether its columns are right is not checked."""
    selected = table.select_columns(_read_columns(table, config))
    waits = False  # a document that begins with a piece without tokens begins with the next one
    row_bytes = selected.data.nbytes / max(selected.data.num_rows, 1)
    at_once = max(1, min(ROWS_AT_ONCE, int(BYTES_AT_ONCE / max(row_bytes, 1))))
    for low in range(rows.start, rows.stop, at_once):
        numbers = range(low, min(low + at_once, rows.stop))
        made = _encode(selected[low : numbers.stop], numbers, config, template, table)
        lengths = np.array([len(ids) for ids in made["input_ids"]])
        ids = np.fromiter(itertools.chain.from_iterable(made["input_ids"]), np.int64, int(lengths.sum()))
        begins, place = np.zeros(len(ids), bool), 0
        for starts, length in zip(made.get("begins", [True] * len(numbers)), lengths.tolist(), strict=True):
            waits = waits or starts
            if length:
                begins[place], waits = waits, False
            place += length
        supervised = made.get("supervised")
        learnt = [any(mask) for mask in supervised] if supervised is not None and config.messages else []
        marks = itertools.chain.from_iterable(supervised or [])
        is_learnt = np.ones(len(ids), bool) if supervised is None else np.fromiter(marks, bool, len(ids))
        yield Encoded(Tokens(ids, begins, is_learnt), learnt.count(False), sum(made["bytes"]))


def _read_columns(table: "Dataset", config: CorpusData) -> list[str]:
    """List the columns of a table that are read, those of a piece of a longer text and of tools included."""
    tools = [TOOLS] if config.messages and TOOLS in table.column_names else []
    return list(dict.fromkeys([*columns_of(config), *_piece_columns(table, config), *tools]))


def _piece_columns(table: "Dataset", config: CorpusData) -> list[str]:
    return ["begins", "ends"] if {"begins", "ends"} <= set(table.column_names) and not config.messages else []


def _tokenize(table: "Dataset", config: CorpusData, template: ChatTemplate, key: str) -> dict:
    import datasets

    check_table(table, config)
    tokenizer = template.tokenizer
    pieces = _piece_columns(table, config)
    small = max(len(tokenizer), *tokenizer.all_special_ids, 0) < 2**16
    supervised = {"supervised": datasets.List(datasets.Value("uint8"))} if config.prompt or config.messages else {}
    begins = {"begins": datasets.Value("bool")} if pieces else {}
    ids = datasets.Value("uint16" if small else "int32")
    processes = min(table.data.nbytes // BYTES_PER_PROCESS, os.cpu_count() or 1)
    features = {"input_ids": datasets.List(ids), **supervised, **begins, "bytes": datasets.Value("int64")}
    done = encoded_once(
        table,
        _read_columns(table, config),
        partial(_encode, config=config, template=template, table=table),
        datasets.Features(features),
        cache_folder() / f"documents-{key}.arrow",
        key,
        processes,
    )
    lists = done.data.column("input_ids").chunks
    starts = done.data.column("begins").to_numpy() if pieces else np.True_
    filled = np.concatenate([np.diff(chunk.offsets.to_numpy()) > 0 for chunk in lists])
    learnt = done.data.column("supervised").chunks if config.messages else []
    return {
        "unlearnt": sum(_count_unlearnt(chunk) for chunk in learnt),
        "date": template.written_date if config.messages else "",
        "files": [Path(part["filename"]).name for part in done.cache_files],
        "documents": int(np.count_nonzero(filled & starts)),
        "tokens": sum(len(chunk.values) for chunk in lists),
        "bytes": int(np.sum(done.data.column("bytes").to_numpy())),
    }


def _count_unlearnt(chunk: "pa.ListArray") -> int:
    """Count the rows of which no token is supervised."""
    ends = np.concatenate([[0], np.cumsum(chunk.values.to_numpy())])[chunk.offsets.to_numpy()]
    return int(np.count_nonzero(np.diff(ends) == 0))


def _encode(rows: dict, indices: Sequence[int], config: CorpusData, template: ChatTemplate, table: "Dataset") -> dict:
    """Return for a batch of rows their token ids, which of them are supervised, and the bytes of supervised text."""
    tokenizer = template.tokenizer
    segments = [_segments(rows, i, row, config, template, table) for i, row in enumerate(indices)]
    texts = [text for row in segments for text, _ in row]
    encoded = _ids(texts, tokenizer)
    begin, end = start_of(tokenizer), end_of(tokenizer)
    ends = rows.get("ends", [not config.messages] * len(indices))
    columns = {"input_ids": [], "bytes": [], **({"begins": rows["begins"]} if "begins" in rows else {})}
    masks = []
    for row, last in zip(segments, ends, strict=True):
        ids, mask = [], []
        for _, supervised in row:
            part = next(encoded)
            ids += part
            mask += [int(supervised)] * len(part)
        if config.messages and ids and ids[0] == begin:  # Blocks put one before every document
            ids, mask = ids[1:], mask[1:]
        if last and ids and end is not None:
            ids.append(end)
            mask.append(1)
        columns["input_ids"].append(ids)
        learnt = [text for text, supervised in row if supervised]
        columns["bytes"].append(sum(len(text.encode("utf-8", "surrogatepass")) for text in learnt))
        masks.append(mask)
    if config.prompt or config.messages:
        columns["supervised"] = masks
    return columns


def _ids(texts: list[str], tokenizer: "PreTrainedTokenizerBase") -> Iterator[list[int]]:
    """Yield the tokens of each text; some texts at a time, because tokenizers keep over 100 bytes for each token."""
    sizes = np.cumsum([len(text) for text in texts])
    groups = np.split(np.arange(len(texts)), np.flatnonzero(np.diff(sizes // CHARACTERS_AT_ONCE)) + 1)
    for group in groups:
        some = [texts[i] for i in group]
        if some:
            yield from tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False)[
                "input_ids"
            ]


def _segments(
    rows: dict, index: int, row: int, config: CorpusData, template: ChatTemplate, table: "Dataset"
) -> Segments:
    """Cut a row's text into segments that are supervised or not."""
    if config.messages:
        where = partial(row_name, table, row)
        row_template = template.with_tools(rows[TOOLS][index], where) if TOOLS in rows else template
        return conversation(rows[config.messages][index], row_template, where)
    if config.prompt:
        return [(str(rows[config.prompt][index]), False), (str(rows[config.completion][index]), True)]
    return [(str(rows[config.text][index]), True)]
