"""Pairs of answers as model inputs: both answers of a prompt in one batch, chosen ones first."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from app.data.mixtures.joined import MixedRows, as_one
from app.data.streams.samples import StreamedSamples
from app.data.text.tokens import TokenTable
from app.sampling.hashing import key_of

PROMPT, CHOSEN, REJECTED = range(3)
"""What a token of a row belongs to: the labels of a TokenTable of pairs."""


class PreferenceTable:
    """Prompts and answers as tokens, in an Arrow file that all processes of a machine map into memory.

    A row is a dict of `prompt`, `chosen` and `rejected` (int32) and its number. Pairs without tokens were too long.
    """

    def __init__(self, tokens: TokenTable, pad_id: int, multiple: int = 1, chats: bool = False, date: str = ""):
        """Open the file that `tokenize` wrote.

        Args:
            pad_id: the token that fills up rows of a batch.
            multiple: batches are as wide as a multiple of this.
            chats: whether they are conversations.
            date: the one that the chat template has written; empty if it writes none.
        """
        self.tokens, self.pad_id, self.multiple, self.chats, self.date = tokens, pad_id, multiple, chats, date
        self._rows = np.flatnonzero(tokens.lengths)
        kinds = (PROMPT, CHOSEN, REJECTED)
        self._counts = [tokens.count(functools.partial(operator.eq, kind))[self._rows] for kind in kinds]
        prompt, chosen, rejected = self._counts
        self.lengths = (prompt + np.maximum(chosen, rejected)).astype(np.int32)
        """Tokens of each prompt with the longer answer."""
        self.reference: np.ndarray | None = None
        """Log-probabilities of both answers in a reference model, float64 [rows, 2]; None: it is not used."""
        self.reference_key = ""
        """What names that model's contents."""
        self.models: dict[str, str] = {}
        """What names the contents of the models that a run over these pairs needs, by what they are."""
        self.weights = None
        """All pairs weigh the same."""

    @property
    def left_out(self) -> int:
        """Count the pairs that were too long."""
        return len(self.tokens) - len(self)

    def kept_before(self, row: int) -> int:
        """Count the pairs of the rows before one of the table that they were made of: of those, some were too long."""
        return int(np.searchsorted(self._rows, row))

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of all rows, and of the reference model: the same on any machine."""
        return key_of(self.tokens.fingerprint, self.reference_key) if self.reference_key else self.tokens.fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict]:
        """Return the rows with these numbers, in this order."""
        items = []
        for row, item in zip(
            rows, self.tokens.__getitems__(self._rows[np.asarray(rows, np.int64)].tolist()), strict=True
        ):
            prompt, chosen, _ = (int(count[row]) for count in self._counts)
            parts = np.split(item["input_ids"], [prompt, prompt + chosen])
            items.append(dict(zip(("prompt", "chosen", "rejected"), parts, strict=True)) | {"row": row})
        return items

    def collate(self, rows: list[dict]) -> dict[str, torch.Tensor | int]:
        """Stack pairs of `rows`, as the function `stacked`.

        Returns:
            Also `reference`: log-probabilities of the answers, [2 x pairs], float64, if they are known.
        """
        batch = stacked(rows, self.pad_id, self.multiple)
        if self.reference is not None:
            log_probabilities = self.reference[[row["row"] for row in rows]]
            batch["reference"] = torch.from_numpy(log_probabilities.T.reshape(-1).copy())
        return batch


@dataclass(frozen=True)
class TrainingPairs:
    """Pairs to train on, and how batches are made of them.

    Rows that are streamed, or mixed with such, are as those of a PreferenceTable without numbers; those that are too
    long are MISSING, so batches lack them, on every layout alike.
    """

    rows: PreferenceTable | StreamedSamples | MixedRows
    chats: bool
    """Whether they are conversations."""
    date: str
    """The one that the chat template writes; empty if it writes none."""
    pad_id: int
    multiple: int
    """As of a PreferenceTable."""

    @property
    def table(self) -> PreferenceTable | None:
        """Return all of them, of a mixture those of all sources; None if they are read while training goes on."""
        whole = as_one(self.rows)
        return whole if isinstance(whole, PreferenceTable) else None

    @property
    def models(self) -> dict[str, str]:
        """Return what names the contents of the models that a run over these pairs needs, by what they are."""
        return self.rows.models

    def collate(self, rows: list[dict]) -> dict[str, torch.Tensor | int]:
        """Stack pairs, as the function `stacked`; with log-probabilities in the reference model, if they are known."""
        return stacked(rows, self.pad_id, self.multiple) if self.table is None else self.table.collate(rows)


def length_of(pair: dict) -> int:
    """Count the tokens of a pair's prompt with the longer answer, as it is read."""
    return len(pair["prompt"]) + max(len(pair["chosen"]), len(pair["rejected"]))


def alike(pair: dict) -> float:
    """Weigh a pair that is not too long."""
    return 1.0


def stacked(rows: list[dict], pad_id: int, multiple: int) -> dict[str, torch.Tensor | int]:
    """Stack pairs of `rows` to 2 x pairs sequences, chosen answers first, padded on the right.

    Returns:
        input_ids: [2 x pairs, width], int64, without the last token of the longest sequence, which predicts none.
        logits_to_keep: for how many of the last places logits are needed: from the first answer on.
        places: where answers are predicted, in the flattened [2 x pairs, logits_to_keep].
        targets: the answers' tokens, in the same order.
        tokens: how many each answer has, [2 x pairs], float64.
        chosen_tokens: how many the chosen answers have together.
    """
    answers = [row[kind] for kind in ("chosen", "rejected") for row in rows]
    starts = np.array([len(row["prompt"]) for row in rows] * 2)
    counts = np.array([len(answer) for answer in answers])
    longest = -(-int((starts + counts).max() - 1) // multiple) * multiple
    ids = np.full((len(answers), longest + 1), pad_id, np.int64)
    for line, row, answer in zip(ids, rows * 2, answers, strict=True):
        line[: len(row["prompt"])] = row["prompt"]
        line[len(row["prompt"]) : len(row["prompt"]) + len(answer)] = answer
    first = (int(starts.min()) - 1) // multiple * multiple
    keep = longest - first
    places = [
        i * keep + start - 1 - first + np.arange(n) for i, (start, n) in enumerate(zip(starts, counts, strict=True))
    ]
    return {
        "input_ids": torch.from_numpy(ids[:, :-1].copy()),
        "logits_to_keep": keep,
        "places": torch.from_numpy(np.concatenate(places)),
        "targets": torch.from_numpy(np.concatenate(answers).astype(np.int64)),
        "tokens": torch.from_numpy(counts.astype(np.float64)),
        "chosen_tokens": int(counts[: len(rows)].sum()),
    }
