"""Which rows of a data set are trained on, and which are for evaluation."""

import re
from collections.abc import Callable, Collection

import numpy as np

from app.data.tables.columns import name_of
from app.errors import UserError
from app.sampling.hashing import key_of
from app.sampling.permutation import permute

# Splits that are for evaluation, the best first. Hub sets keep the labels of some test splits to themselves.
EVAL_SPLITS = ("validation", "valid", "val", "dev", "test")
# The permutation of this epoch chooses the held-out rows; training never comes so far.
HOLDOUT_EPOCH = 2**63


Rows = tuple[str, int, int]
"""The name of a split, and its rows from the first number to before the second."""


def rows_of(split: str, sizes: dict[str, int], flag: str, path: str) -> list[Rows]:
    """Return the rows that a split such as train[:10%]+dev stands for.

    Args:
        sizes: rows of each split that the data has.
        flag: the one that names the split; with the path, for errors.
    """
    import datasets

    for name in re.sub(r"\[[^\]]*\]|\([^)]*\)", "", split).split("+"):
        if name.strip() not in sizes:
            raise UserError(f"{flag} {split}: {path} has no split {name.strip()}; there are {', '.join(sizes)}")
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise UserError(f"{flag} {split}: {error}; slices are written as train[:1000] or train[10%:20%]") from None
    ranges = [(part.splitname, part.from_, part.to) for part in parts if part.from_ < part.to]
    if not ranges:
        raise UserError(f"{flag} {split} has no rows: {path} has {', '.join(f'{n} of {sizes[n]}' for n in sizes)}")
    return ranges


def own_eval_split(names: Collection[str], trained: list[Rows]) -> str:
    """Return the split to evaluate on that the data themselves have, none of which is trained on; or nothing."""
    used = {name for name, _, _ in trained}
    return next((name for name in EVAL_SPLITS if name in names and name not in used), "")


def overlap(trained: list[Rows], scored: list[Rows]) -> str:
    """Name rows to evaluate on that are trained on, both of one data set; nothing where there are none."""
    for name, start, end in scored:
        for other, first, last in trained:
            low, high = max(start, first), min(end, last)
            if name == other and low < high:
                return f"rows {low} to {high - 1} of {name}"
    return ""


def hold_out_end(table, fraction: float):
    """Split off the end of a table, a fraction and at least a row: of texts that go on from row to row."""
    _check_rows(table)
    cut = len(table) - count_of(len(table), fraction)

    def part(rows: range, kind: str):
        return table.select(rows, new_fingerprint=key_of(table._fingerprint, "hold_out_end", kind, cut))

    return part(range(cut), "train"), part(range(cut, len(table)), "evaluation")


def _check_rows(table) -> None:
    if len(table) < 2:
        raise UserError(
            f"{name_of(table)} has {len(table)} rows, which cannot be split into training and evaluation: give more "
            "data or --data.eval-path"
        )


def count_of(rows: int, fraction: float) -> int:
    """Count the rows to hold out, of two or more: at least one, and not all."""
    if not 0 < fraction < 1:
        raise UserError(f"--data.holdout {fraction} must be between 0 and 1: it is a fraction of the training split")
    return min(max(1, round(rows * fraction)), rows - 1)


def drawn(rows: int, fraction: float, seed: int = 0) -> np.ndarray:
    """Draw the rows to hold out, of two or more, as a mask."""
    out = np.zeros(rows, bool)
    out[permute(np.arange(count_of(rows, fraction)), rows, seed, HOLDOUT_EPOCH)] = True
    return out


def hold_out(table, fraction: float, seed: int, needed: Callable[..., np.ndarray] | None = None):
    """Split off a random fraction of a table, at least a row; both parts keep the table's order.

    Returns what to train on, what to evaluate on, and how many of the rows drawn for that stay in training.

    Args:
        needed: takes the table and a mask of the rows to hold out, and marks those of them that training cannot do
            without; they stay there.
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
