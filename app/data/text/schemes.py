"""Schemes of tags that mark entities: IOB2, IOB1 and BIOES; which one tags are in, and what does not fit it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.data.tables.classes import some
from app.data.tables.columns import LabelColumn
from app.errors import UserError

SCHEMES = {"iob2": "BI", "bioes": "BIES"}
"""Marks of the tags of each scheme, next to O."""


def scheme_of(asked: str, names: Sequence[str]) -> str:
    """Return the scheme of tags that mark entities, a key of SCHEMES; none if each token has a tag of its own.

    Raises:
        UserError: tags are not of the scheme that was asked for.
    """
    strange_by_scheme = {
        scheme: [name for name in names if not _fits(name, marks)] for scheme, marks in SCHEMES.items()
    }
    if asked == "auto":
        return next((scheme for scheme, strange in strange_by_scheme.items() if not strange), "")
    if strange := strange_by_scheme.get(asked):
        *others, last = [f"{mark}-name" for mark in SCHEMES[asked]]
        allowed = f"O, {', '.join(others)} or {last}"
        raise UserError(f"--data.scheme {asked}: {some(strange)} are not {allowed}: give --data.scheme plain")
    return asked if asked in SCHEMES else ""


def _fits(name: str, marks: str) -> bool:
    return name == "O" or (name[:1] in marks and name[1:2] == "-" and len(name) > 2)


def from_iob1(columns: Sequence[LabelColumn], asked: str) -> str:
    """Write tags as IOB2 that are IOB1, where I- begins an entity, and B- only one right after another of its name.

    Returns:
        What the user should know of it; nothing if the tags stay as they are.

    Raises:
        UserError: --data.scheme iob1 asks for it, and the tags are no such.
    """
    import pyarrow.compute as pc

    if asked not in ("auto", "iob1"):
        return ""
    tags = {tag for column in columns for tag in pc.unique(column.items).to_pylist()}
    strange = sorted(str(tag) for tag in tags if not _fits(str(tag), SCHEMES["iob2"]))
    if strange and asked == "iob1":
        raise UserError(f"--data.scheme iob1: {some(strange)} are not O, B-name or I-name: give --data.scheme plain")
    if strange:
        return ""
    read = [_Neighbours.of(column) for column in columns]
    begins = [each.is_mark("I") & ~each.goes_on() for each in read]
    parts = all((each.goes_on() | ~each.is_mark("B")).all() for each in read)
    if asked == "auto" and not (parts and any(map(np.any, begins))):
        return ""
    for column, each, first in zip(columns, read, begins, strict=True):
        each.begin(column, first)
    return "tags are read as IOB1, where I- begins an entity and B- parts it from the one before; they become IOB2"


def check_spans(column: LabelColumn, codes: np.ndarray, names: Sequence[str], scheme: str) -> None:
    """Refuse I-name and E-name where no entity of that name goes on; in BIOES also an entity that does not end."""
    outside = len(names)
    kinds = [name[2:] for name in names]
    kind = np.array([*map(kinds.index, kinds), outside])
    goes_on, is_open = (np.array([*(name[0] in marks for name in names), False]) for marks in ("IE", "BI"))
    ends = np.cumsum(column.counts)
    before, after = np.concatenate([[outside], codes[:-1]]), np.concatenate([codes[1:], [outside]])
    before[ends[:-1]] = after[ends - 1] = outside  # of the first and of the last token of each row
    wrong = goes_on[codes] & ~(is_open[before] & (kind[before] == kind[codes]))
    if wrong.any():
        row, tag = column.first(wrong)
        previous = [*names, "the beginning"][before[np.flatnonzero(wrong)[0]]]
        raise UserError(
            f"--data.tags {column.name}: {row} has {tag} after {previous}, but in {scheme.upper()} each entity begins "
            "with B-: correct the tags; or give --data.scheme iob1 if I- may begin one, or plain to learn the tags as "
            "they are"
        )
    wrong = is_open[codes] & ~(goes_on[after] & (kind[after] == kind[codes]))
    if scheme == "bioes" and wrong.any():
        row, tag = column.first(wrong)
        following = [*names, "the end"][after[np.flatnonzero(wrong)[0]]]
        raise UserError(
            f"--data.tags {column.name}: {row} has {following} after {tag}, but in BIOES each entity ends with E-, or "
            "is a single S-: correct the tags, or give --data.scheme plain to learn them as they are"
        )


@dataclass
class _Neighbours:
    """The tags of a column, and the tag before each."""

    names: list[str]
    codes: np.ndarray
    before: np.ndarray
    """-1 for the first token of a row."""

    @classmethod
    def of(cls, column: LabelColumn) -> "_Neighbours":
        texts = column.items.dictionary_encode()
        codes = np.asarray(texts.indices).astype(np.int64)
        before = np.concatenate([[-1], codes[:-1]])[: len(codes)]
        before[np.cumsum(column.counts)[:-1]] = -1
        return cls([str(name) for name in texts.dictionary.to_pylist()], codes, before)

    def is_mark(self, mark: str) -> np.ndarray:
        return np.array([*(name.startswith(f"{mark}-") for name in self.names), False])[self.codes]

    def goes_on(self) -> np.ndarray:
        """Mark the tags of an entity of the same name as the tag before."""
        kinds = [name[2:] for name in self.names]
        kind = np.array([*map(kinds.index, kinds), -1])
        return (kind[self.codes] == kind[self.before]) & (self.before >= 0) & ~np.isin(self.codes, self._outside())

    def _outside(self) -> list[int]:
        return [number for number, name in enumerate(self.names) if name == "O"]

    def begin(self, column: LabelColumn, first: np.ndarray) -> None:
        """Write B- at the marked tags of a column."""
        import pyarrow as pa

        names = [*self.names, *(f"B-{name[2:]}" for name in self.names)]
        codes = np.where(first, self.codes + len(self.names), self.codes)
        column.items = pa.array(names, pa.string()).take(pa.array(codes))
        if column.names:
            wanted = set(column.items.to_pylist())
            column.names = [*column.names, *sorted(wanted - set(column.names))]
