"""Prompts with two answers each: loading and checking them, and cutting them into tokens once for all runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from app.config.needs import EVERYTHING, Needs
from app.data.cache import cache_folder, using_cache
from app.data.config import PreferenceData, check_date, in_words
from app.data.corpus.chat_template import ChatTemplate
from app.data.corpus.documents import end_of
from app.data.corpus.messages import TOOLS
from app.data.loading import Tables, load_tables
from app.data.rows import MISSING, Measures, Missing, Rows
from app.data.tables.columns import ANSWERS, check_columns, check_texts, is_list, is_mixed, is_text, name_of, row_name
from app.data.text.encoding import ROWS_AT_ONCE, check_padding, encoded_once, identity, text_features
from app.data.text.preference_rows import shared_beginning, texts_of
from app.data.text.preference_table import CHOSEN, PROMPT, REJECTED, PreferenceTable, TrainingPairs, alike, length_of
from app.data.text.tokenizer import tokenizer_of
from app.data.text.tokens import TokenTable
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# Part of the cache's key: raise it when the stored columns change.
FORMAT = 3
# Of how many pairs a prompt is looked for, where no column holds it.
LOOKED_AT = 1000


def load_preferences(config: PreferenceData, needs: Needs = EVERYTHING) -> Tables:
    """Load the pairs to train and to evaluate on.

    Args:
        needs: of the run, `run.needs`.

    Raises:
        UserError: a column is missing, or holds neither texts nor conversations.
    """
    check_padding(config.pad_to_multiple_of, config.max_length)
    check_date(config.date)
    if config.max_length < 2:
        raise UserError(f"--data.max-length {config.max_length}: must be at least 2")
    optional = config.prompt, TOOLS
    tables = load_tables(config, columns=(config.chosen, config.rejected), needs=needs, optional=optional)
    for table in (tables.train, *tables.sets.values()):
        _check_prompts(table, config, columns_of(table, config))
    return tables


def columns_of(table: "Dataset", config: PreferenceData) -> dict[str, str]:
    """Return the columns by what they are: prompt (if there is one), chosen and rejected; check what they hold."""
    column_by_part = {flag: getattr(config, flag) for flag in ("prompt", *ANSWERS)}
    if not config.prompt or (config.prompt == PreferenceData.prompt and config.prompt not in table.column_names):
        del column_by_part["prompt"]
    if config.chosen == config.rejected:
        raise UserError(f"--data.chosen and --data.rejected both name {config.chosen}: give two columns")
    for flag, name in column_by_part.items():
        check_columns(table, [name], flag)
        if not _is_chat(table, name):
            check_texts(table, name, flag)
    first, second = (_is_chat(table, column_by_part[flag]) for flag in ANSWERS)
    if first != second:
        raise UserError(
            f"--data.chosen {config.chosen}, --data.rejected {config.rejected}: in {name_of(table)} one column holds "
            "texts and the other one conversations: give both in the same form"
        )
    return column_by_part


def _without_prompt(table: "Dataset", config: PreferenceData) -> bool:
    """Tell whether answers hold the prompts, because there is no column of them and nobody said so."""
    return bool(config.prompt) and config.prompt not in table.column_names


def _unused(table: "Dataset", columns: dict[str, str]) -> list[str]:
    return [name for name in table.column_names if name not in (*columns.values(), TOOLS)]


def _check_prompts(table: "Dataset", config: PreferenceData, columns: dict[str, str]) -> None:
    """Refuse pairs of texts that share no beginning, where a column with another name may hold their prompts."""
    kinds = table.data.schema
    texts = [name for name in _unused(table, columns) if is_text(kinds.field(name).type)]
    if not texts or not _without_prompt(table, config) or _is_chat(table, config.chosen):
        return
    rows = table.select_columns([config.chosen, config.rejected])[:LOOKED_AT]
    pairs = list(zip(rows[config.chosen], rows[config.rejected], strict=True))
    bare = sum(not shared_beginning(str(chosen), str(rejected)).strip() for chosen, rejected in pairs)
    if 2 * bare > len(pairs):
        raise UserError(
            f"--data.prompt {config.prompt}: no such column in {name_of(table)}, and {bare:,} of the first "
            f"{len(pairs):,} pairs do not begin with the same words, so these have no prompt; name its column, such as "
            f"--data.prompt {texts[0]} (not used are {', '.join(texts)}), or give --data.prompt= if there is none"
        )


def _is_chat(table: "Dataset", name: str) -> bool:
    """Tell whether a column holds messages or lists of them. Those of several types may be extension types of Arrow."""
    import pyarrow

    kind = table.data.schema.field(name).type
    return is_list(kind) or pyarrow.types.is_struct(kind) or is_mixed(kind)


def own_tokenizer(table: "Dataset", config: PreferenceData, kind: str, vocab: int) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model from scratch, of a kind that `tokenizer_of` knows."""
    columns = list(dict.fromkeys(columns_of(table, config).values()))

    def texts() -> Iterator[str]:
        for batch in table.select_columns(columns).iter(ROWS_AT_ONCE):
            for name in columns:
                yield from map(str, batch[name])

    _check_template(table, config, "")
    return tokenizer_of(
        kind, vocab, config.max_length, ("pairs", table._fingerprint, config.max_length, *columns), texts
    )


def _check_template(table: "Dataset", config: PreferenceData, template: str) -> None:
    chats = [name for name in columns_of(table, config).values() if _is_chat(table, name)]
    if chats and not template:
        raise UserError(
            f"--data.chosen {config.chosen}: {name_of(table)} holds conversations in {', '.join(chats)}, and the "
            "tokenizer has no chat template to write them with: use a --model whose tokenizer has one, or columns of "
            "texts"
        )


def training_pairs(tables: Tables, config: PreferenceData, tokenizer: "PreTrainedTokenizerBase") -> TrainingPairs:
    """Return the pairs to train on as tokens; those of streamed data are tokenized when they are read."""
    cut = _Cut.of(tables.train, config, tokenizer)

    def made(table: "Dataset") -> Rows:
        columns_of(table, config)  # for its errors
        return PreferencesOnDemand(table, cut)

    measures = Measures(alike, length_of)
    rows = tables.samples(lambda: tokenize(tables.train, config, tokenizer), made, cut.identity, measures)
    return TrainingPairs(rows, cut.chats, cut.written_date, tokenizer.pad_token_id, config.pad_to_multiple_of)


def tokenize(table: "Dataset", config: PreferenceData, tokenizer: "PreTrainedTokenizerBase") -> PreferenceTable:
    """Cut the prompts and answers of a table into tokens.

    The result is kept on disk for other processes and runs, under a key made of the table's and tokenizer's content.

    Raises:
        UserError: a row has no answer, two equal ones, or no prompt that they share; or no row is short enough.
    """
    cut = _Cut.of(table, config, tokenizer)
    path = cache_folder() / f"preferences-{(key := key_of(FORMAT, table._fingerprint, *cut.identity))}.arrow"

    def encoded(rows: dict[str, list], numbers: list[int]) -> "pa.Table":
        return _in_columns(cut(table, rows, numbers))

    with using_cache():
        encoded_once(table, cut.read, encoded, text_features(has_labels=True), path, key)
    tokens = TokenTable(path)
    pairs = PreferenceTable(tokens, tokenizer.pad_token_id, config.pad_to_multiple_of, cut.chats, cut.written_date)
    if not len(pairs):
        raise UserError(
            f"--data.max-length {config.max_length}: all answers of {name_of(table)} are longer: give a larger one"
        )
    return pairs


class _Pair(NamedTuple):
    """A pair as tokens; without any if it is too long."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    truncated: bool
    """Whether the prompt has lost its beginning."""


@dataclass(frozen=True)
class _Cut:
    """Turn rows into pairs of tokens.

    A text gets the tokenizer's mark before it, if it has one, and the end mark after it; a chat template writes both.
    """

    columns: dict[str, str]
    """By what they are."""
    tools: bool
    """There is a column of tools too."""
    chats: bool
    template: ChatTemplate
    tokenizer: "PreTrainedTokenizerBase"
    longest: int
    """Prompt and answer together, in tokens."""

    @classmethod
    def of(cls, table: "Dataset", config: PreferenceData, tokenizer: "PreTrainedTokenizerBase") -> "_Cut":
        """Make it for the columns of a table.

        Raises:
            UserError: a column cannot be used, or the tokenizer lacks something.
        """
        template = ChatTemplate(tokenizer, config.date)
        columns = columns_of(table, config)
        _check_template(table, config, template.source)
        if end_of(tokenizer) is None:
            raise UserError(
                "--model: its tokenizer has no end-of-text token, which ends answers; name one as eos_token"
            )
        chats = any(_is_chat(table, name) for name in columns.values())
        return cls(columns, chats and TOOLS in table.column_names, chats, template, tokenizer, config.max_length)

    @property
    def read(self) -> list[str]:
        """Return the names of the columns that are read."""
        return list(dict.fromkeys([*self.columns.values(), *([TOOLS] if self.tools else [])]))

    @property
    def written_date(self) -> str:
        """Return the date that the chat template writes; empty if it writes none."""
        return self.template.written_date if self.chats else ""

    @property
    def identity(self) -> list[object]:
        """Return all that decides the tokens of a row."""
        marks = self.tokenizer.bos_token_id, end_of(self.tokenizer)
        template = self.template.identity if self.chats else ()
        return [*identity(self.tokenizer), *template, *marks, self.longest, *self.columns.items()]

    def __call__(self, table: "Dataset", rows: dict[str, list], numbers: Sequence[int]) -> list[_Pair]:
        """Return pairs of some rows of a table, by their numbers.

        Raises:
            UserError: a row has no answer, two equal ones, or no prompt that they share.
        """
        texts: list[str] = []
        for i, number in enumerate(numbers):
            values = {flag: rows[name][i] for flag, name in self.columns.items()}
            where = partial(row_name, table, number)
            template = self.template.with_tools(rows[TOOLS][i], where) if self.tools else self.template
            texts += texts_of(values, template, where)
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids = iter(encoded["input_ids"])
        return [self._pair(*row) for row in zip(ids, ids, ids, strict=True)]

    def _pair(self, prompt: list[int], chosen: list[int], rejected: list[int]) -> _Pair:
        begin, end = self.tokenizer.bos_token_id, end_of(self.tokenizer)
        assert end is not None  # checked by `of`
        if not self.chats:
            prompt = prompt if begin is None else [begin, *prompt]
            chosen, rejected = [*chosen, end], [*rejected, end]
        prompt = prompt or [end]
        room = self.longest - max(len(chosen), len(rejected))
        return _Pair(prompt[-room:], chosen, rejected, room < len(prompt)) if room > 0 else _Pair([], [], [], False)


def _in_columns(pairs: list[_Pair]) -> "pa.Table":
    """Return prompt, chosen and rejected tokens one after the other, as a TokenTable of pairs reads them."""
    import pyarrow as pa

    columns: dict[str, list] = {"input_ids": [], "labels": [], "truncated": []}
    for *parts, truncated in pairs:
        columns["input_ids"].append([token for part in parts for token in part])
        columns["labels"].append([k for k, part in zip((PROMPT, CHOSEN, REJECTED), parts, strict=True) for _ in part])
        columns["truncated"].append(truncated)
    kinds = {"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int16()), "truncated": pa.bool_()}
    return pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()})


class PreferencesOnDemand:
    """Pairs of a table, which become tokens when they are read: as those of TrainingPairs."""

    def __init__(self, table: "Dataset", cut: _Cut):
        """Take the texts."""
        self._table, self._texts, self._cut = table, table.select_columns(cut.read), cut

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, row: int) -> dict[str, np.ndarray] | Missing:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, np.ndarray] | Missing]:
        """Return the pairs with these numbers, in this order; errors as of _Cut."""
        pairs = self._cut(self._table, self._texts[list(rows)], rows)
        return [
            {name: np.array(getattr(pair, name), np.int32) for name in ("prompt", "chosen", "rejected")}
            if pair.chosen
            else MISSING
            for pair in pairs
        ]


def describe(
    tables: Tables, train: TrainingPairs, eval_sets: dict[str, PreferenceTable], config: PreferenceData
) -> str:
    """Describe the data: a line of numbers, one for each further set, and what to know of splits."""
    longest, of = config.max_length, "evaluation " if train.table is None else ""
    trained = f"{_amount(train.rows)}{tables.streamed} to train on, " if tables.has_training_rows else ""
    parts = [f"{trained}{_amount(eval_sets[''])} {tables.to_evaluate_on()}"]
    both = [eval_sets[""]]
    if train.table is not None and tables.has_training_rows:
        both.append(train.table)
    if cut := sum(pairs.tokens.truncated for pairs in both):
        parts.append(f"{cut:,} {of}prompts lose their beginning, to fit {longest} tokens (--data.max-length)")
    if out := sum(pairs.left_out for pairs in both):
        parts.append(f"{out:,} {of}pairs left out, whose answers leave no room for a prompt in {longest} tokens")
    if _without_prompt(tables.train, config):
        unused = ", ".join(_unused(tables.train, columns_of(tables.train, config)))
        parts.append(
            f"no column {config.prompt}, so a prompt is what both answers begin with"
            + (f" (--data.prompt names another; not used are {unused})" if unused else "")
        )
    if train.date:
        parts.append(in_words(train.date))
    more = tables.describe_others({name: _amount(pairs) for name, pairs in eval_sets.items()})
    return "\n".join(["; ".join(parts), *more, *tables.notes()])


def _amount(pairs: Rows) -> str:
    return f"{len(pairs):,} pairs"
