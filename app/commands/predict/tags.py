"""Tags of tokens: a line for each row of the data, or for each token, in the order of the data."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

WORDS = re.compile(r"\w+|[^\w\s]")
"""What a token is in a text that has not been cut into tokens: words and signs, one by one."""
LONGEST = 512
"""Sub-words in one forward pass, for a model that does not say how many it takes."""


class Tagged(NamedTuple):
    """Tokens and what the model says of them."""

    tokens: list[str]
    shares: np.ndarray
    """Probability of each tag, float32 [tokens, tags]; NaN for a token that the tokenizer leaves out."""


def sentences(rows: "Dataset", column: str) -> Iterator[list[str]]:
    """Yield the tokens of each row; texts are cut into words and signs.

    Raises:
        UserError: the column holds something else, or a token is missing.
    """
    from app.data.tables.columns import check_texts, held, is_list, is_text, row_name

    kind = rows.data.schema.field(column).type
    if not is_list(kind):
        check_texts(rows, column)
        yield from (WORDS.findall(str(row[column])) for row in rows.select_columns([column]))
        return
    if not is_text(kind.value_type):
        raise UserError(f"--text {column} of {held(rows, column)}: give a column of lists of tokens, or of texts")
    for number, row in enumerate(rows.select_columns([column])):
        if row[column] is None or None in row[column]:
            raise UserError(f"--text {column}: {row_name(rows, number)} lacks a token: fill it, or leave the row out")
        yield row[column]


class Tagger:
    """A finished model that gives tags to tokens."""

    def __init__(self, name: str):
        """Load model and tokenizer.

        Raises:
            UserError: one of them cannot be loaded, or the tokenizer cannot tell which token a sub-word is from.
        """
        import torch
        from transformers import AutoModelForTokenClassification, AutoTokenizer

        from app.data.text.tokenizer import check_tokenizer
        from app.data.text.tokens import PadCollate
        from app.tasks.pretrained import load_model, loading, longest_input
        from app.tasks.vocabulary import check_vocabulary

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_model(AutoModelForTokenClassification, name).eval().to(self.device)
        with loading(name, "tokenizer"):
            self.tokenizer = AutoTokenizer.from_pretrained(name, add_prefix_space=True, trust_remote_code=False)
        if not self.tokenizer.is_fast:
            raise UserError(f"{name}: its tokenizer does not say which token a sub-word is from (no tokenizer.json)")
        said = min(self.tokenizer.model_max_length, longest_input(self.model.config) or self.tokenizer.model_max_length)
        self.longest = said if said < 10**6 else LONGEST
        check_tokenizer(self.tokenizer, self.longest)
        check_vocabulary(name, self.model.config, self.tokenizer)
        self._collate = PadCollate.of(self.tokenizer)
        self.tags = [name for _, name in sorted(self.model.config.id2label.items())]

    def tag(self, rows: Iterator[list[str]], batch: int) -> Iterator[Tagged]:
        """Yield what the model says of each row, in order, reading `batch` rows at a time."""
        while next_rows := list(islice(rows, batch)):
            yield from self._tagged(next_rows, batch)

    def _tagged(self, rows: list[list[str]], batch: int) -> list[Tagged]:
        """Tag rows. A long one is cut into windows; a token's tag is from where most of the row is around it."""
        import torch

        stride = self.longest // 4
        encoded = self.tokenizer(
            rows, is_split_into_words=True, truncation=True, max_length=self.longest, stride=stride,
            return_overflowing_tokens=True, return_attention_mask=False,
        )  # fmt: skip
        tagged_rows = [Tagged(row, np.full((len(row), len(self.tags)), np.nan, np.float32)) for row in rows]
        nearest = [np.full(len(row), -1) for row in rows]  # how far each token is from its window's ends
        pieces = [np.array(ids, np.int32) for ids in encoded["input_ids"]]
        for low in range(0, len(pieces), batch):
            inputs = self._collate([{"input_ids": ids} for ids in pieces[low : low + batch]])
            with torch.inference_mode():
                logits = self.model(**{name: tensor.to(self.device) for name, tensor in inputs.items()}).logits
            shares = logits.float().softmax(-1).cpu().numpy()
            left = self.tokenizer.padding_side == "left"
            for window, window_shares in enumerate(shares, low):
                row, length = encoded["overflow_to_sample_mapping"][window], len(pieces[window])
                window_shares = window_shares[-length:] if left else window_shares[:length]
                words = np.array([-1 if word is None else word for word in encoded.word_ids(window)])
                places = np.flatnonzero((words >= 0) & (np.diff(words, prepend=-1) != 0))
                inside = np.minimum(places, length - 1 - places)
                better = inside > nearest[row][words[places]]
                nearest[row][words[places[better]]] = inside[better]
                tagged_rows[row].shares[words[places[better]]] = window_shares[places[better]]
        return tagged_rows


def lines(tags: list[str], tagged: Tagged, each: str) -> list[dict[str, Any]]:
    """Return the lines of a table for a row: one with lists, or one for each token (`each`)."""
    has_tag = ~np.isnan(tagged.shares[:, 0])
    best = np.where(has_tag, np.nan_to_num(tagged.shares).argmax(-1), -1)
    chosen = [tags[i] if i >= 0 else None for i in best]
    sure = [float(share[i]) if i >= 0 else None for share, i in zip(tagged.shares, best, strict=True)]
    if each == "row":
        return [{"tokens": tagged.tokens, "prediction": chosen, "probability": sure}]
    token_lines = []
    for place, token in enumerate(tagged.tokens):
        shares = [float(share) if has_tag[place] else None for share in tagged.shares[place]]
        about = {"place": place, "token": token, "prediction": chosen[place], "probability": sure[place]}
        token_lines.append({**about, **{f"p/{tag}": share for tag, share in zip(tags, shares, strict=True)}})
    return token_lines
