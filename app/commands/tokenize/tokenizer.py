"""The tokenizer: of a model, made for a model from scratch, or the one that OUT has already."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app import storage
from app.commands.tokenize.sources import Source
from app.data.config import CorpusData
from app.data.corpus.encode import columns_of
from app.data.corpus.token_shards import TokensRecord
from app.data.streams.shards import is_url
from app.data.text.tokenizer import check_tokenizer, tokenizer_of
from app.errors import UserError
from app.tasks.pretrained import PARTS, loading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from app.commands.tokenize.command import Scratch


class Named(NamedTuple):
    """A tokenizer, and how records call it."""

    tokenizer: "PreTrainedTokenizerBase"
    name: str


@contextmanager
def naming_tokenizer() -> Iterator[None]:
    """Have errors name --tokenizer where recipes have --model."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--model", "--tokenizer")) from error


def chosen_tokenizer(
    model: str,
    scratch: "Scratch",
    others: Mapping[str, TokensRecord],
    folder: Callable[[], str],
    source: Source,
    config: CorpusData,
) -> Named:
    """Return the tokenizer that flags name; for a further split, that of OUT, if they name no other one.

    Args:
        model: --tokenizer.
        others: records of the other splits in OUT.
        folder: returns where the tokenizer of OUT is.

    Raises:
        UserError: none or two are asked for, or it cannot be loaded.
    """
    kind, vocab = scratch.tokenizer.replace("none", ""), scratch.vocab
    if model and kind:
        raise UserError(f"--tokenizer {model} and --scratch.tokenizer {kind}: give one of the two")
    if model:
        return Named(loaded(model), model)
    name = f"bpe {vocab}" if kind == "bpe" else kind
    names = [record.settings.tokenizer for record in others.values()]
    if names and name in ("", names[0]):
        return Named(loaded(folder()), names[0])
    if not kind:
        raise UserError("--tokenizer: give a model whose tokenizer to take, or --scratch.tokenizer bpe, char or byte")
    longest = int(1e30)  # of any length, as transformers has it; a model has its own
    key = (source.fingerprint, *columns_of(config))
    return Named(tokenizer_of(kind, vocab, longest, key, source.texts), name)


def loaded(name: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model, or of a folder or URL that holds nothing else.

    Raises:
        UserError: there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    place = str(storage.at(name).down()) if is_url(name) else os.path.expanduser(name)
    folder = Path(place)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in PARTS["tokenizer"]):
        raise UserError(f"--tokenizer {name}: this folder has no tokenizer, as tokenizer.save_pretrained writes it")
    with loading(place, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    return check_tokenizer(tokenizer, tokenizer.model_max_length, "--tokenizer")
