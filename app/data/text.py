"""Texts as model inputs: tokenized once and kept on disk, read back without copies, padded batch by batch."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from app.data.cache import cache_folder, fingerprint, using_cache
from app.data.columns import check_columns, check_texts
from app.data.config import TextData
from app.data.labels import Labels, read_labels
from app.data.sources import load_table
from app.data.tokenizer import check_tokenizer, train_tokenizer
from app.errors import UserError

__all__ = [
    "Labels",
    "PadCollate",
    "TextData",
    "TokenTable",
    "check_tokenizer",
    "load_table",
    "own_tokenizer",
    "read_labels",
    "read_texts",
    "tokenize",
    "train_tokenizer",
]

# Part of the cache's key: raise it when the stored columns change.
FORMAT = 1
ROWS_AT_ONCE = 1000


class TokenTable:
    """Tokenized texts and their labels, in an Arrow file that all processes of a machine map into memory.

    A row is a dict of `input_ids` (int32), `token_type_ids` (int8; only where they are not all 0) and `labels` (only
    where the table has them). Rows are views of the file. What a DataLoader sends to a worker is the file's path.
    """

    def __init__(self, path: str | Path, labels: np.ndarray | None = None):
        """Open the file that `tokenize` wrote; labels has a value or a vector for each row."""
        import datasets

        self.path, self.labels = Path(path), labels
        data = datasets.Dataset.from_file(str(path)).data
        lists = data.column("input_ids").chunks
        self._ids = [chunk.values.to_numpy() for chunk in lists]
        self._offsets = [chunk.offsets.to_numpy() for chunk in lists]
        self._types = None
        if "token_type_ids" in data.column_names:
            self._types = [chunk.values.to_numpy() for chunk in data.column("token_type_ids").chunks]
        # The row at which each chunk starts, and behind them the number of rows.
        self._starts = np.cumsum([0, *(len(chunk) for chunk in lists)])
        self.lengths = np.concatenate([np.diff(offsets) for offsets in self._offsets]).astype(np.int32)
        """Tokens of each row, as int32."""
        self.truncated = int(np.count_nonzero(data.column("truncated").to_numpy()))
        """How many texts were longer than max_length, and cut."""
        if labels is not None and len(labels) != len(self):
            raise ValueError(f"{len(labels)} labels for {len(self)} rows")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> dict:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict]:
        """Return the rows with these numbers, in this order."""
        rows = np.asarray(rows, np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows {rows.min()} to {rows.max()} are not all in [0, {len(self)})")
        chunks = np.searchsorted(self._starts, rows, side="right") - 1
        items = []
        for chunk, row in zip(chunks.tolist(), (rows - self._starts[chunks]).tolist(), strict=True):
            offsets = self._offsets[chunk]
            span = slice(offsets[row], offsets[row + 1])
            item = {"input_ids": self._ids[chunk][span]}
            if self._types is not None:
                item["token_type_ids"] = self._types[chunk][span]
            items.append(item)
        if self.labels is not None:
            for item, label in zip(items, self.labels[rows], strict=True):
                item["labels"] = label
        return items

    def __reduce__(self):
        return TokenTable, (self.path, self.labels)


class PadCollate:
    """Pad rows of a TokenTable to the longest of them, as tensors that a transformers model takes.

    The labels keep their type: int64 for one class, float32 for several and for regression, as its losses want.
    """

    def __init__(
        self, pad_id: int, *, side: str = "right", types: bool = False, pad_type_id: int = 0, multiple: int = 1
    ):
        self.pad_id, self.side, self.types, self.pad_type_id, self.multiple = pad_id, side, types, pad_type_id, multiple

    @classmethod
    def of(cls, tokenizer, multiple: int = 1) -> "PadCollate":
        """Pad as a tokenizer of transformers does; `multiple` rounds the width up."""
        types = "token_type_ids" in tokenizer.model_input_names
        side, pad_type_id = tokenizer.padding_side, tokenizer.pad_token_type_id
        return cls(tokenizer.pad_token_id, side=side, types=types, pad_type_id=pad_type_id, multiple=multiple)

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """Return input_ids, attention_mask, token_type_ids (where the model has them) and labels (where rows do)."""
        lengths = np.array([len(row["input_ids"]) for row in rows])
        width = -(-int(lengths.max()) // self.multiple) * self.multiple
        places = np.arange(width)
        mask = places >= width - lengths[:, None] if self.side == "left" else places < lengths[:, None]

        def padded(values: list[np.ndarray], fill: int) -> torch.Tensor:
            array = np.full(mask.shape, fill, np.int64)
            array[mask] = np.concatenate(values)
            return torch.from_numpy(array)

        batch = {"input_ids": padded([row["input_ids"] for row in rows], self.pad_id)}
        batch["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
        if self.types and "token_type_ids" in rows[0]:
            batch["token_type_ids"] = padded([row["token_type_ids"] for row in rows], self.pad_type_id)
        elif self.types:
            batch["token_type_ids"] = torch.from_numpy(np.where(mask, 0, self.pad_type_id))
        if "labels" in rows[0]:
            batch["labels"] = torch.from_numpy(np.array([row["labels"] for row in rows]))
        return batch


def tokenize(table, columns: Sequence[str], tokenizer, max_length: int, labels: np.ndarray | None = None) -> TokenTable:
    """Tokenize the texts, or pairs of texts, of a `datasets.Dataset`; longer ones are cut to max_length and counted.

    The result is cached on disk under the content of the table and of the tokenizer, for other processes and runs.
    """
    check_columns(table, columns, "text")
    if len(columns) > 2:
        raise UserError(f"--data.text {' '.join(columns)}: a model takes one text or a pair, not {len(columns)}")
    marks = tokenizer.num_special_tokens_to_add(pair=len(columns) > 1)
    if max_length <= marks:
        raise UserError(f"--data.max-length {max_length} leaves no room for text: {marks} tokens are marks; raise it")
    # Type ids are stored where they say something: of pairs for BERT, of all texts for XLNet.
    probe = tokenizer(*["a"] * len(columns), return_token_type_ids="token_type_ids" in tokenizer.model_input_names)
    has_types = any(probe.get("token_type_ids", []))
    key = fingerprint(FORMAT, table._fingerprint, *_identity(tokenizer), has_types, max_length, *columns)
    path = cache_folder() / f"tokens-{key}.arrow"
    with using_cache():
        if not path.exists():
            for name in columns:
                check_texts(table, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        table.select_columns(list(columns)).map(
            lambda texts: _encode(texts, columns, tokenizer, max_length, has_types),
            batched=True,
            batch_size=ROWS_AT_ONCE,
            remove_columns=list(columns),
            features=_features(has_types),
            cache_file_name=str(path),
            load_from_cache_file=True,
            new_fingerprint=key,
            desc="Tokenizing",
        )
    return TokenTable(path, labels)


def own_tokenizer(table, columns: Sequence[str], vocab_size: int, max_length: int):
    """Train a tokenizer on the texts of a table, or find the one that another process or run trained on them."""
    import tokenizers
    from transformers import AutoTokenizer

    key = fingerprint(FORMAT, table._fingerprint, vocab_size, max_length, tokenizers.__version__, *columns)
    folder = cache_folder() / f"tokenizer-{key}"
    if not folder.exists():
        draft = folder.with_name(f"{folder.name}.{os.getpid()}")
        with using_cache():
            train_tokenizer(read_texts(table, columns), vocab_size, max_length).save_pretrained(draft)
            try:
                draft.rename(folder)
            except OSError:  # another process was first, with the same tokenizer
                shutil.rmtree(draft)
    return AutoTokenizer.from_pretrained(folder)


def read_texts(table, columns: Sequence[str]) -> Iterator[str]:
    """Yield the texts of all rows, to train a tokenizer on."""
    check_columns(table, columns, "text")
    for name in columns:
        check_texts(table, name)
    for batch in table.select_columns(list(columns)).with_format("arrow").iter(ROWS_AT_ONCE):
        for name in columns:
            yield from map(str, batch.column(name).to_pylist())


def _identity(tokenizer) -> list[str]:
    """Return all that decides how a tokenizer cuts a text to ids."""
    import tokenizers
    import transformers

    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # These two are set anew by every call.
        del content["truncation"], content["padding"]
    else:
        content = [sorted(tokenizer.get_vocab().items()), repr(sorted(tokenizer.init_kwargs.items(), key=str))]
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    versions = [transformers.__version__, tokenizers.__version__]
    return [kind, tokenizer.truncation_side, json.dumps(content, sort_keys=True), *versions]


def _features(has_types: bool):
    from datasets import Features, List, Value

    types = {"token_type_ids": List(Value("int8"))} if has_types else {}
    return Features({"input_ids": List(Value("int32")), **types, "truncated": Value("bool")})


def _encode(texts: dict, columns: Sequence[str], tokenizer, max_length: int, has_types: bool):
    """Turn a batch of texts into an Arrow table of their ids."""
    import pyarrow as pa

    inputs = [[str(text) for text in texts[name]] for name in columns]
    encoded = tokenizer(
        *inputs,
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=has_types,
    )
    data = {"input_ids": pa.array(encoded["input_ids"], pa.list_(pa.int32()))}
    if has_types:
        data["token_type_ids"] = pa.array(encoded["token_type_ids"], pa.list_(pa.int8()))
    if encoded.encodings is not None:
        cut = [bool(encoding.overflowing) for encoding in encoded.encodings]
    else:  # a tokenizer written in Python does not tell
        cut = [len(ids) > max_length for ids in tokenizer(*inputs, truncation=False, verbose=False)["input_ids"]]
    data["truncated"] = pa.array(cut)
    return pa.table(data)
