"""Texts of a table, read and encoded once for all runs: what recipes of all kinds of texts share."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.data.tables.columns import check_columns, check_texts
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from transformers import PreTrainedTokenizerBase

ROWS_AT_ONCE = 1000


def check_padding(multiple: int, longest: int, flag: str = "--data.max-length") -> None:
    """Raise a UserError if texts of the greatest length would be padded beyond it; `flag` gives that length."""
    if multiple < 1 or longest % multiple:
        raise UserError(
            f"--data.pad-to-multiple-of {multiple}: must divide {flag} {longest}, or else the longest texts "
            "would be padded beyond it"
        )


def check_room_for_text(
    tokenizer: "PreTrainedTokenizerBase", max_length: int, pair: bool = False, flag: str = "--data.max-length"
) -> None:
    """Raise a UserError if the tokens that mark a text, or a pair, are as many as it may have; `flag` says how many."""
    marks = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_length <= marks:
        raise UserError(f"{flag} {max_length} leaves no room for text, because {marks} tokens are marks: raise it")


def read_texts(table: "Dataset", columns: Sequence[str]) -> Iterator[str]:
    """Yield the texts of all rows, to train a tokenizer on."""
    check_columns(table, columns, "text")
    for name in columns:
        check_texts(table, name)
    for batch in table.select_columns(list(columns)).with_format("arrow").iter(ROWS_AT_ONCE):
        for name in columns:
            yield from map(str, batch.column(name).to_pylist())


def encoded_once(
    table: "Dataset",
    columns: Sequence[str],
    encode: Callable[[dict, list[int]], Any],
    features: "Features",
    path: Path,
    key: str,
    processes: int = 1,
) -> "Dataset":
    """Encode a table, many rows at a time, or load what another process or run has encoded under the same key.

    Args:
        columns: what `encode` gets of the rows, besides their numbers.
        features: of the columns that it returns.
        path: the Arrow file for them.
        processes: how many encode.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return table.select_columns(list(columns)).map(
        encode,
        batched=True,
        with_indices=True,
        batch_size=ROWS_AT_ONCE,
        remove_columns=list(columns),
        features=features,
        cache_file_name=str(path),
        load_from_cache_file=True,
        new_fingerprint=key,
        num_proc=processes if processes > 1 else None,
        desc="Tokenizing",
    )


def identity(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return everything that decides how a tokenizer turns a text into ids."""
    import tokenizers
    import transformers

    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # Every call sets these two again.
        del content["truncation"], content["padding"]
    else:
        content = [sorted(tokenizer.get_vocab().items()), repr(sorted(tokenizer.init_kwargs.items(), key=str))]
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    versions = [transformers.__version__, tokenizers.__version__]
    return [kind, tokenizer.truncation_side, json.dumps(content, sort_keys=True), *versions]


def lasting_identity(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hash what decides how a tokenizer turns a text into ids, for what is kept longer than versions of libraries.

    Of tokenizers of the library tokenizers, it does not depend on the class of transformers that has them.
    """
    kind, _, content, *_ = identity(tokenizer)
    return key_of(content, "" if getattr(tokenizer, "backend_tokenizer", None) is not None else kind)


def text_features(has_types: bool = False, has_labels: bool = False) -> "Features":
    """Return the features of encoded texts, as TokenTable reads them, with a type or a label for each token or not."""
    from datasets import Features, List, Value

    types = {"token_type_ids": List(Value("int8"))} if has_types else {}
    labels = {"labels": List(Value("int16"))} if has_labels else {}
    return Features({"input_ids": List(Value("int32")), **types, **labels, "truncated": Value("bool")})


def which_were_cut(encoded: Any, max_length: int, again: Callable[[], Any]) -> list[bool]:
    """Tell of each text that a tokenizer has encoded whether it was longer; `again` encodes them without a limit."""
    if encoded.encodings is not None:
        return [bool(encoding.overflowing) for encoding in encoded.encodings]
    return [len(ids) > max_length for ids in again()["input_ids"]]  # a tokenizer written in Python does not say it
