"""Pieces that follow each other, such as the chunks of a data set: which of them a row is in, and where."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np


class InPiece(NamedTuple):
    """Those of some rows that are in one piece."""

    piece: int
    here: np.ndarray
    """Which of the rows: int64."""
    places: np.ndarray
    """Where they are in the piece: int64, from 0."""


class Pieces:
    """Pieces whose rows (or tokens, or whatever they hold) are numbered from the first piece on through all of them."""

    def __init__(self, borders: np.ndarray):
        """Take the number of the first row of each piece, and at the end that of all rows: int64 [pieces + 1]."""
        self.borders = borders

    @classmethod
    def of(cls, sizes: Sequence[int] | np.ndarray) -> Self:
        """Take the number of rows of each piece."""
        borders = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, dtype=np.int64, out=borders[1:])
        return cls(borders)

    def __len__(self) -> int:
        """Count the pieces."""
        return len(self.borders) - 1

    @property
    def rows(self) -> int:
        """Count the rows of all pieces."""
        return int(self.borders[-1])

    @property
    def first(self) -> np.ndarray:
        """Return the number of the first row of each piece: int64 [pieces]."""
        return self.borders[:-1]

    def piece_of(self, rows: Any) -> Any:
        """Return in which piece rows are, int64; pieces without rows are passed over.

        Args:
            rows: a number, or an array of numbers. That of all rows is in the piece after the last one.
        """
        return np.searchsorted(self.borders[1:], rows, side="right")

    def places_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return in which piece each row is, and where in it: int64."""
        pieces = self.piece_of(rows)
        return pieces, rows - self.borders[pieces]

    def grouped(self, rows: np.ndarray) -> Iterator[InPiece]:
        """Yield, for each piece that has some of these rows, which it has."""
        pieces, places = self.places_of(rows)
        for piece in np.unique(pieces).tolist():
            (here,) = np.nonzero(pieces == piece)
            yield InPiece(piece, here, places[here])
