"""Texts with their labels: loaded, and tokenized once for all runs or as they are read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from app.config.needs import EVERYTHING, Needs
from app.data.cache import cache_folder, using_cache
from app.data.config import TextData
from app.data.loading import Tables, load_tables
from app.data.mixtures.joined import MixedRows, as_one
from app.data.rows import Measures, Rows
from app.data.streams.samples import StreamedSamples
from app.data.tables.columns import check_columns, check_texts
from app.data.tables.labels import Labels, only_of_their_class, read_labels, streamed_classes
from app.data.text.encoding import (
    check_padding,
    check_room_for_text,
    encoded_once,
    identity,
    read_texts,
    text_features,
    which_were_cut,
)
from app.data.text.tokenizer import train_tokenizer, trained_once
from app.data.text.tokens import TokenTable, length_of
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# Part of the cache's key: raise it when the stored columns change.
FORMAT = 1


def load_labelled(config: TextData, needs: Needs = EVERYTHING) -> tuple[Tables, Labels]:
    """Load the texts to train and to evaluate on, and their labels.

    Args:
        needs: of the run, `run.needs`.
    """
    check_padding(config.pad_to_multiple_of, config.max_length)
    columns = (*config.text, *config.label)
    needed = partial(only_of_their_class, config=config)
    tables = load_tables(config, needed, columns=columns, needs=needs)
    if tables.streams:
        config = replace(config, classes=streamed_classes(tables.train, config))
    labels = read_labels(tables.train, tables.evaluation, config, tables.others)
    return tables, replace(labels, streamed=tables.streams)


def training_rows(
    tables: Tables, config: TextData, tokenizer: "PreTrainedTokenizerBase", labels: Labels
) -> "TokenTable | StreamedSamples | MixedRows":
    """Return the texts to train on as tokens, with their labels; those of streamed data are tokenized when read."""
    encoder = Encoder.of(config.text, tokenizer, config.max_length)
    known = replace(config, classes=tuple(labels.names))

    def whole() -> TokenTable:
        return tokenize(tables.train, config.text, tokenizer, config.max_length, labels.train_values)

    def made(table: "Dataset") -> Rows:
        check_columns(table, config.text, "text")
        for name in config.text:
            check_texts(table, name)
        return LabelledTexts(table, encoder.columns, read_labels(tables.train, table, known).eval_values)

    identity = [FORMAT, *encoder.identity, config.label, config.problem, labels.names]
    return tables.samples(whole, made, identity, Measures(length=length_of), encoder.rows)


def describe(
    tables: Tables,
    labels: Labels,
    train_rows: "TokenTable | StreamedSamples | MixedRows",
    eval_sets: dict[str, TokenTable],
    max_length: int,
) -> str:
    """Describe the data: a line of numbers, one of classes, one for each further set, and what to know of splits."""
    eval_rows = eval_sets[""]
    trained = f"{len(train_rows):,} training rows{tables.streamed}, " if tables.has_training_rows else ""
    parts = [f"{trained}{len(eval_rows):,} {tables.to_evaluate_on('rows')}"]
    if tables.stayed:
        parts.append(f"{tables.stayed:,} drawn to be held out kept for training, as no other row has the class")
    whole = as_one(train_rows)
    known = isinstance(whole, TokenTable)  # else the training texts are cut when they are read
    cut_in_training = whole.truncated if isinstance(whole, TokenTable) else 0
    if cut_in_training or eval_rows.truncated:
        trained = f"{cut_in_training:,} training and " if tables.has_training_rows and known else ""
        cut = f"{trained}{eval_rows.truncated:,} evaluation texts"
        parts.append(f"{cut} are longer than {max_length} tokens (--data.max-length) and cut")
    more = tables.describe_others({name: f"{len(rows):,} rows" for name, rows in eval_sets.items()})
    return "\n".join(["; ".join(parts), labels.summary(), *more, *tables.notes()])


def tokenize(
    table: "Dataset",
    columns: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    labels: np.ndarray | None = None,
) -> TokenTable:
    """Tokenize the texts, or pairs of texts, of a table; longer ones are cut to max_length tokens, and counted.

    The result is kept on disk for other processes and runs, under a key made of the table's and tokenizer's content.
    """
    check_columns(table, columns, "text")
    encoder = Encoder.of(columns, tokenizer, max_length)
    key = key_of(FORMAT, table._fingerprint, *encoder.identity)
    path = cache_folder() / f"tokens-{key}.arrow"

    def encoded(texts: dict, _: list[int]) -> "pa.Table":
        return encoder(texts)

    with using_cache():
        if not path.exists():
            for name in columns:
                check_texts(table, name)
        encoded_once(table, columns, encoded, text_features(encoder.has_types), path, key)
    return TokenTable(path, labels)


def own_tokenizer(
    table: "Dataset", columns: Sequence[str], vocab_size: int, max_length: int
) -> "PreTrainedTokenizerBase":
    """Train a tokenizer on the texts of a table, or load the one that another process or run trained on them."""
    key = (table._fingerprint, vocab_size, max_length, *columns)
    return trained_once(key, lambda: train_tokenizer(read_texts(table, columns), vocab_size, max_length))


class LabelledText(NamedTuple):
    """A text, or a pair of texts, that is still to be encoded, and its label."""

    texts: tuple[str, ...]
    label: Any


@dataclass(frozen=True)
class Encoder:
    """Turn texts, or pairs of texts, into tokens."""

    columns: tuple[str, ...]
    tokenizer: "PreTrainedTokenizerBase"
    max_length: int
    has_types: bool
    """Type ids are stored if they are not all 0, as for pairs with BERT, and for all texts with XLNet."""

    @classmethod
    def of(cls, columns: Sequence[str], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> "Encoder":
        """Make it for columns of texts.

        Raises:
            UserError: there are more than two, or no token of a text would be left.
        """
        if len(columns) > 2:
            raise UserError(f"--data.text {' '.join(columns)}: a model takes one text or a pair, not {len(columns)}")
        check_room_for_text(tokenizer, max_length, pair=len(columns) > 1)
        probe = tokenizer(*["a"] * len(columns), return_token_type_ids="token_type_ids" in tokenizer.model_input_names)
        return cls(tuple(columns), tokenizer, max_length, any(probe.get("token_type_ids", [])))

    @property
    def identity(self) -> list[object]:
        """Return all that decides the tokens of a text."""
        return [*identity(self.tokenizer), self.has_types, self.max_length, *self.columns]

    def __call__(self, texts: dict) -> "pa.Table":
        """Return an Arrow table of the tokens of a batch of texts."""
        import pyarrow as pa

        inputs = [[str(text) for text in texts[name]] for name in self.columns]
        encoded = self._encoded(inputs)
        data = {"input_ids": pa.array(encoded["input_ids"], pa.list_(pa.int32()))}
        if self.has_types:
            data["token_type_ids"] = pa.array(encoded["token_type_ids"], pa.list_(pa.int8()))
        again = partial(cast(Any, self.tokenizer), *inputs, truncation=False, verbose=False)
        data["truncated"] = pa.array(which_were_cut(encoded, self.max_length, again))
        return pa.table(data)

    def rows(self, labelled: Sequence[LabelledText]) -> list[dict]:
        """Return texts as rows of a TokenTable. Many at a time cost less: a call takes as long as several texts."""
        if not labelled:
            return []
        encoded = self._encoded(
            [[str(text) for text in column] for column in zip(*(each.texts for each in labelled), strict=True)]
        )
        kinds = {"input_ids": np.int32} | ({"token_type_ids": np.int8} if self.has_types else {})
        rows: list[dict] = [{} for _ in labelled]
        for name, kind in kinds.items():
            for row, ids in zip(rows, encoded[name], strict=True):
                row[name] = np.array(ids, kind)
        for row, each in zip(rows, labelled, strict=True):
            row["labels"] = each.label
        return rows

    def _encoded(self, inputs: list[list[str]]) -> Any:
        """Encode texts, or pairs of texts, given as one list or two."""
        return cast(Any, self.tokenizer)(
            *inputs,
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=False,
            return_token_type_ids=self.has_types,
        )


class LabelledTexts:
    """The texts of a table with their labels, which become tokens by `Encoder.rows`."""

    def __init__(self, table: "Dataset", columns: Sequence[str], labels: np.ndarray):
        """Take the texts; `labels` has a value or a vector for each row."""
        self._texts, self._columns, self._labels = table.select_columns(list(columns)), columns, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, row: int) -> LabelledText:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[LabelledText]:
        """Return the rows with these numbers, in this order."""
        texts = self._texts[list(rows)]
        each = zip(*(texts[name] for name in self._columns), strict=True)
        return [LabelledText(*pair) for pair in zip(each, self._labels[list(rows)], strict=True)]
