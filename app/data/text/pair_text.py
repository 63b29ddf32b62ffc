"""Texts and what a model is to write for each: loading them, and tokenizing both sides once for all runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from app.config.needs import EVERYTHING, Needs
from app.data.cache import cache_folder, using_cache
from app.data.config import PairData
from app.data.loading import Tables, load_tables
from app.data.mixtures.joined import MixedRows, as_one
from app.data.rows import IGNORED, Measures, Rows
from app.data.streams.samples import StreamedSamples
from app.data.tables.columns import check_columns, check_texts, row_name
from app.data.tables.parallel_files import spread
from app.data.text.encoding import (
    check_padding,
    check_room_for_text,
    encoded_once,
    identity,
    read_texts,
    text_features,
    which_were_cut,
)
from app.data.text.tokenizer import train_pair_tokenizer, trained_once
from app.data.text.tokens import PadCollate, TokenTable
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# Part of the cache's key: raise it when the stored columns change.
FORMAT = 1


class PairTable:
    """Tokenized pairs: a row is a dict of `input_ids`, the source, and `labels`, the target, both int32 [tokens]."""

    def __init__(self, sources: TokenTable, targets: TokenTable, texts: "Dataset"):
        """Join both sides.

        Args:
            texts: of the same rows, the columns `source` and `target`.
        """
        self.sources, self.targets, self.texts = sources, targets, texts
        self.lengths = sources.lengths + targets.lengths
        """Tokens of both sides, int32 [rows]."""
        self.weights = targets.lengths.astype(np.int64)
        """Tokens to write, [rows]."""

    @property
    def fingerprint(self) -> str:
        """Return a hash of all rows."""
        return f"{self.sources.fingerprint}-{self.targets.fingerprint}"

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Return the rows with these numbers, in this order."""
        both = zip(self.sources.__getitems__(rows), self.targets.__getitems__(rows), strict=True)
        return [{"input_ids": source["input_ids"], "labels": target["input_ids"]} for source, target in both]


class PairsOnDemand:
    """Pairs of a table, which become tokens when they are read: rows as those of a PairTable."""

    def __init__(self, table: "Dataset", sides: "tuple[_Side, _Side]"):
        """Take the texts; `sides` encode sources and targets."""
        self._table, self._sides = table, sides
        self._texts = table.select_columns([side.column for side in sides])

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Return the rows with these numbers, in this order.

        Raises:
            UserError: a text is empty.
        """
        texts = self._texts[list(rows)]
        encoded = [side(self._table, texts[side.column], rows).column("input_ids") for side in self._sides]
        sources, targets = ([ids.values.to_numpy() for ids in column] for column in encoded)
        return [{"input_ids": ids, "labels": labels} for ids, labels in zip(sources, targets, strict=True)]


def tokens_to_write(row: dict[str, np.ndarray]) -> float:
    """Weigh a pair as it is read."""
    return float(len(row["labels"]))


def length_of(row: dict[str, np.ndarray]) -> int:
    """Count the tokens of both sides of a pair as it is read."""
    return len(row["input_ids"]) + len(row["labels"])


class Evenly:
    """Some rows of a PairTable, from all parts of it."""

    def __init__(self, rows: PairTable, count: int):
        """Choose `count` rows, or all if there are not as many."""
        self.rows = rows
        self.numbers = np.linspace(0, len(rows), min(count, len(rows)), endpoint=False).astype(np.int64)
        """Of the chosen rows."""
        self.lengths = rows.lengths[self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitems__(self, places: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Return the rows at these places among the chosen ones."""
        return self.rows.__getitems__([int(self.numbers[place]) for place in places])

    def texts(self) -> list[dict[str, str]]:
        """Return the `source` and the `target` of each."""
        return [{name: str(text) for name, text in row.items()} for row in self.rows.texts.select(self.numbers)]


class PairCollate:
    """Pad rows of a PairTable: sources as their tokenizer does, and targets by -100 on the right."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", multiple: int = 1):
        """Pad to multiples of `multiple` tokens."""
        self._sources = PadCollate.of(tokenizer, multiple)
        self._targets = PadCollate(IGNORED, multiple=multiple)

    def __call__(self, rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Return input_ids, attention_mask and labels, int64 [rows, length]."""
        batch = self._sources([{"input_ids": row["input_ids"]} for row in rows])
        targets = self._targets([{"input_ids": row["labels"]} for row in rows])
        return {**batch, "labels": targets["input_ids"]}


def load_pairs(config: PairData, needs: Needs = EVERYTHING) -> Tables:
    """Load the pairs to train and to evaluate on.

    Args:
        needs: of the run, `run.needs`.

    Raises:
        UserError: a column is not there, or a text is missing.
    """
    for flag in ("source", "target"):
        check_padding(config.pad_to_multiple_of, getattr(config, f"max_{flag}"), f"--data.max-{flag}")
    if config.source == config.target:
        raise UserError(f"--data.source and --data.target are both {config.source}: name the columns of two texts")
    tables = load_tables(config, columns=(config.source, config.target), needs=needs)
    tables.train, tables.evaluation = spread(tables.train), spread(tables.evaluation)
    tables.others = {name: spread(table) for name, table in tables.others.items()}
    for table in (tables.train, *tables.sets.values()):
        _check_texts(table, config)
    return tables


def _check_texts(table: "Dataset", config: PairData) -> None:
    for flag in ("source", "target"):
        name = getattr(config, flag)
        check_columns(table, [name], flag)
        check_texts(table, name, flag)


def training_rows(
    tables: Tables, config: PairData, tokenizer: "PreTrainedTokenizerBase"
) -> PairTable | StreamedSamples | MixedRows:
    """Return the pairs to train on as tokens; those of streamed data are tokenized when they are read."""
    sides = _Side.of(config, tokenizer, "source"), _Side.of(config, tokenizer, "target")

    def made(table: "Dataset") -> Rows:
        table = spread(table)
        _check_texts(table, config)
        return PairsOnDemand(table, sides)

    identity = [FORMAT, *(side.identity for side in sides)]
    measures = Measures(tokens_to_write, length_of)
    return tables.samples(lambda: tokenize(tables.train, config, tokenizer), made, identity, measures)


def own_tokenizer(table: "Dataset", config: PairData, vocab: int) -> "PreTrainedTokenizerBase":
    """Train a tokenizer on both sides of a table, or load the one that another process or run trained on them."""
    columns = [config.source, config.target]
    key = ("pairs", table._fingerprint, vocab, config.max_source, *columns)
    return trained_once(key, lambda: train_pair_tokenizer(read_texts(table, columns), vocab, config.max_source))


def tokenize(table: "Dataset", config: PairData, tokenizer: "PreTrainedTokenizerBase") -> PairTable:
    """Tokenize both sides of a table; longer texts are cut, and counted.

    The result is kept on disk for other processes and runs, under a key made of the table's and tokenizer's content.

    Raises:
        UserError: a text is empty.
    """
    sources, targets = (_tokenized(table, _Side.of(config, tokenizer, flag)) for flag in ("source", "target"))
    names = {config.source: "source", config.target: "target"}
    texts = table.select_columns(list(names)).rename_columns({old: new for old, new in names.items() if old != new})
    return PairTable(sources, targets, texts)


@dataclass(frozen=True)
class _Side:
    """Turn the texts of one side of pairs into tokens."""

    flag: str
    """source or target."""
    column: str
    tokenizer: "PreTrainedTokenizerBase"
    longest: int
    """In tokens."""
    prefix: str
    """Before each text."""

    @classmethod
    def of(cls, config: PairData, tokenizer: "PreTrainedTokenizerBase", flag: str) -> "_Side":
        """Make it for a side as the flags say.

        Raises:
            UserError: no token of a text would be left.
        """
        column, longest = getattr(config, flag), getattr(config, f"max_{flag}")
        check_room_for_text(tokenizer, longest, flag=f"--data.max-{flag}")
        return cls(flag, column, tokenizer, longest, config.prefix if flag == "source" else "")

    @property
    def identity(self) -> list[object]:
        """Return all that decides the tokens of a text."""
        return [*identity(self.tokenizer), self.longest, self.flag, self.column, self.prefix]

    def __call__(self, table: "Dataset", texts: list, numbers: Sequence[int]) -> "pa.Table":
        """Return an Arrow table of the tokens of texts, which are those of some rows of a table, by their numbers.

        Raises:
            UserError: a text is empty.
        """
        import pyarrow as pa

        for text, row in zip(texts, numbers, strict=True):
            if not str(text).strip():
                raise UserError(
                    f"--data.{self.flag} {self.column}: {row_name(table, row)} is empty; leave such rows out of the "
                    "data"
                )
        # Some tokenizers mark a text to write otherwise.
        kind = "text_target" if self.flag == "target" else "text"
        call: Any = partial(cast(Any, self.tokenizer), **{kind: [f"{self.prefix}{text}" for text in texts]})
        encoded = call(
            truncation=True, max_length=self.longest, return_attention_mask=False, return_token_type_ids=False
        )
        cut = which_were_cut(encoded, self.longest, partial(call, truncation=False, verbose=False))
        ids = pa.array(encoded["input_ids"], pa.list_(pa.int32()))
        return pa.table({"input_ids": ids, "truncated": pa.array(cut)})


def _tokenized(table: "Dataset", side: _Side) -> TokenTable:
    key = key_of(FORMAT, table._fingerprint, *side.identity)
    path = cache_folder() / f"pairs-{key}.arrow"

    def encoded(texts: dict[str, list], numbers: list[int]) -> "pa.Table":
        return side(table, texts[side.column], numbers)

    with using_cache():
        encoded_once(table, [side.column], encoded, text_features(), path, key)
    return TokenTable(path)


def describe(
    tables: Tables,
    train_rows: PairTable | StreamedSamples | MixedRows,
    eval_sets: dict[str, PairTable],
    config: PairData,
) -> str:
    """Describe the data: a line of numbers, one for each further set, and what to know of splits."""
    told, whole = [eval_sets[""]], as_one(train_rows)
    if isinstance(whole, PairTable):
        trained = f"{_amount(whole)} to train on, " if tables.has_training_rows else ""
        told += [whole] if tables.has_training_rows else []
    else:
        trained = f"{len(train_rows):,} pairs{tables.streamed} to train on, "
    parts = [f"{trained}{_amount(eval_sets[''])} {tables.to_evaluate_on()}"]
    for side in ("source", "target"):
        if cut := sum(getattr(rows, f"{side}s").truncated for rows in told):
            longest = getattr(config, f"max_{side}")
            of = "" if isinstance(whole, PairTable) else "evaluation "
            parts.append(f"{cut:,} {of}{side}s are longer than {longest} tokens (--data.max-{side}) and cut")
    more = tables.describe_others({name: _amount(rows) for name, rows in eval_sets.items()})
    return "\n".join(["; ".join(parts), *more, *tables.notes()])


def _amount(rows: PairTable) -> str:
    return f"{len(rows):,} pairs with {rows.weights.sum():,} tokens to write"
