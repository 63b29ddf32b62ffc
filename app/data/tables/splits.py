"""Which rows of a data set are trained on, and which are for evaluation."""

import re
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from app.data.tables.columns import name_of
from app.errors import UserError
from app.sampling.hashing import key_of
from app.sampling.permutation import permute

if TYPE_CHECKING:
    from datasets import Dataset

SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words that mean each split, as data sets of the Hub have them: the only list of them."""
TRAIN_SPLITS = SPLIT_WORDS["train"]
# Names of splits for evaluation, the preferred one first: data sets of the Hub withhold the labels of some test splits.
EVAL_SPLITS = (*SPLIT_WORDS["validation"], *SPLIT_WORDS["test"])
SPLITS = (*TRAIN_SPLITS, *EVAL_SPLITS)
EVAL_KINDS = tuple(kind for kind in SPLIT_WORDS if kind != "train")
# The permutation of this epoch chooses the held-out rows; training never reaches it.
HOLDOUT_EPOCH = 2**63


Rows = tuple[str, int, int]
"""The name of a split, and its rows from the first number to before the second."""


def split_of(word: str) -> str:
    """Return the split that a word means, in upper or lower case: train, one of EVAL_SPLITS, or nothing."""
    word = word.strip().lower()
    return "train" if word in TRAIN_SPLITS else word if word in EVAL_SPLITS else ""


def kind_of(word: str) -> str:
    """Return which of train, validation and test a word in lower case means; nothing if it means none."""
    return next((kind for kind, words in SPLIT_WORDS.items() if word in words), "")


def for_evaluation(splits: Container[str]) -> list[str]:
    """Return those of some splits that are for evaluation: the first one is evaluated on unless the user says which."""
    return [split for split in EVAL_SPLITS if split in splits]


def names_in(split: str) -> list[str]:
    """Return the names of the splits in words such as train[:10%]+dev."""
    return [name.strip() for name in re.sub(r"\[[^\]]*\]|\([^)]*\)", "", split).split("+")]


def rows_of(split: str, sizes: dict[str, int], flag: str, path: str) -> list[Rows]:
    """Return the rows that a split such as train[:10%]+dev stands for.

    Args:
        sizes: rows of each split that the data has.
        flag: the flag that names the split, for errors, as is `path`.
    """
    import datasets

    for name in names_in(split):
        if name not in sizes:
            raise UserError(f"{flag} {split}: {path} has no split {name}; there are {', '.join(sizes)}")
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise UserError(f"{flag} {split}: {error}; slices are written as train[:1000] or train[10%:20%]") from None
    ranges = [(part.splitname, part.from_, part.to) for part in parts if part.from_ < part.to]
    if not ranges:
        raise UserError(f"{flag} {split} has no rows: {path} has {', '.join(f'{n} of {sizes[n]}' for n in sizes)}")
    return ranges


class NamedSet(NamedTuple):
    """A further set to evaluate on."""

    path: str
    split: str = ""
    """The split, or a slice of one; empty: the validation or test split, or the only one."""


def named_sets(words: Sequence[str]) -> dict[str, NamedSet]:
    """Read --data.eval-sets, words such as hard=hard.csv or hard=FOLDER::test, by the names of the sets.

    Raises:
        UserError: a word has no name or no path, or two have the same name.
    """
    place_by_name: dict[str, NamedSet] = {}
    for word in words:
        name, _, place = word.partition("=")
        path, _, split = place.partition("::")
        if not re.fullmatch(r"\w[\w.-]*", name) or not path:
            raise UserError(
                f"--data.eval-sets {word}: give NAME=PATH, for example hard=hard.csv; names are of letters, digits, "
                "_, . and -"
            )
        if name == "train":
            raise UserError(f"--data.eval-sets {word}: `train` is the training set's name: give another one")
        if name in place_by_name:
            raise UserError(f"--data.eval-sets names two sets {name}: give each a name of its own")
        place_by_name[name] = NamedSet(path, split)
    return place_by_name


def own_eval_splits(tables: "dict[str, Dataset]", trained: list[Rows], columns: Sequence[str]) -> tuple[str, str]:
    """Choose among the data's own splits one to evaluate on, with these columns, of which no row is trained on.

    Returns:
        Its name, or nothing if there is none; and what the user should know of the choice, or nothing.
    """
    used = {name for name, _, _ in trained}
    unused = [name for name in for_evaluation(tables) if name not in used]
    lacking = {name: [column for column in columns if column not in tables[name].column_names] for name in unused}
    fit = [name for name in unused if not lacking[name]]
    notes = chosen_of(fit, "--data.eval-split")
    notes += [f"{name} has no {' or '.join(lack)} and is left out" for name, lack in lacking.items() if lack]
    return fit[0] if fit else "", "; ".join(notes)


def chosen_of(splits: Sequence[str], flag: str) -> list[str]:
    """Say which of several splits is evaluated on, the first one, and which flag chooses; nothing of a single one."""
    return [f"evaluated on {splits[0]}, not on {' or '.join(splits[1:])} ({flag} chooses)"] if splits[1:] else []


def overlap(trained: list[Rows], scored: list[Rows]) -> str:
    """Name rows that are in both lists, which are of one data set; return nothing if there are none."""
    for name, start, end in scored:
        for other, first, last in trained:
            low, high = max(start, first), min(end, last)
            if name == other and low < high:
                return f"rows {low} to {high - 1} of {name}"
    return ""


def hold_out_end(table: "Dataset", fraction: float) -> "tuple[Dataset, Dataset]":
    """Split off the end of a table whose texts go on from row to row: a fraction of its rows, and at least one."""
    _check_rows(table)
    cut = len(table) - count_of(len(table), fraction)

    def part(rows: range, kind: str):
        return table.select(rows, new_fingerprint=key_of(table._fingerprint, "hold_out_end", kind, cut))

    return part(range(cut), "train"), part(range(cut, len(table)), "evaluation")


def _check_rows(table: "Dataset") -> None:
    if len(table) < 2:
        has = f"{name_of(table)} has {len(table)} {'row' if len(table) else 'rows'}"
        raise UserError(f"{has}, too few to hold some out for evaluation: give more data or --data.eval-path")


def count_of(rows: int, fraction: float) -> int:
    """Count the rows to hold out of `rows`, which are two or more: at least one, and not all."""
    if not 0 < fraction < 1:
        raise UserError(f"--data.holdout {fraction} must be between 0 and 1: it is a fraction of the training split")
    return min(max(1, round(rows * fraction)), rows - 1)


def drawn(rows: int, fraction: float, seed: int = 0) -> np.ndarray:
    """Draw the rows to hold out of `rows`, which are two or more, as a mask."""
    out = np.zeros(rows, bool)
    out[permute(np.arange(count_of(rows, fraction)), rows, seed, HOLDOUT_EPOCH)] = True
    return out


def hold_out(
    table: "Dataset", fraction: float, seed: int, needed: Callable[..., np.ndarray] | None = None
) -> "tuple[Dataset, Dataset, int]":
    """Split off a random fraction of a table, at least one row; both parts keep the table's order.

    Returns the rows to train on, the rows to evaluate on, and how many rows were drawn but stay in training.

    Args:
        needed: takes the table and a mask of the drawn rows, and marks those that training cannot do without.
    """
    _check_rows(table)
    rows = len(table)
    out = drawn(rows, fraction, seed)
    count = int(np.count_nonzero(out))
    stay = np.zeros(rows, bool) if needed is None else needed(table, out)
    out &= ~stay
    if not out.any():
        raise UserError(
            f"--data.holdout {fraction} leaves nothing to evaluate on: {count} of {rows} rows would be held out, and "
            "each is the only one of its class; give more data or --data.eval-path"
        )

    def part(keep: np.ndarray, kind: str):
        key = key_of(table._fingerprint, "hold_out", kind, count, seed, *np.flatnonzero(stay))
        return table.select(np.flatnonzero(keep), new_fingerprint=key)

    return part(~out, "train"), part(out, "evaluation"), int(np.count_nonzero(stay))
