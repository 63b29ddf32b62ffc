"""Where sorted rows are cut into pieces: of equal size, or of equal cost when padded."""

import heapq
import itertools

import numpy as np


def even_start(rows: int, pieces: int, piece: int) -> int:
    """Return the first row of a piece when rows are cut into pieces of nearly equal size, larger ones first."""
    return piece * (rows // pieces) + min(piece, rows % pieces)


def even_cuts(rows: int, pieces: int) -> list[int]:
    """Return the first row of each piece but the first when rows are cut into pieces of nearly equal size."""
    return [even_start(rows, pieces, piece) for piece in range(1, pieces)]


def equal_cost_cuts(lengths: np.ndarray, pieces: int) -> np.ndarray:
    """Cut rows, sorted from long to short, so that the largest padded piece (rows x longest) is as small as possible.

    Returns:
        The first row of each piece but the first, int64.
    """
    rows = len(lengths)
    longest = np.maximum(lengths, 1).tolist()

    def starts(limit: int) -> list[int]:  # of pieces that cost at most `limit`, which no single row exceeds
        first_rows: list[int] = []
        position = 0
        while position < rows and len(first_rows) <= pieces:
            first_rows.append(position)
            position += limit // longest[position]
        return first_rows

    # Lower bound: the longest row, and the mean cost without padding. Upper bound: the cost of cuts of equal size.
    low = max(longest[0], -(-sum(longest) // pieces))
    edges = [0, *even_cuts(rows, pieces), rows]
    high = max(longest[a] * (b - a) for a, b in itertools.pairwise(edges) if b > a)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(starts(middle)) <= pieces else (middle + 1, high)
    first_rows = starts(low)
    return np.array(_halved(first_rows, longest, pieces)[1:], dtype=np.int64)


def _halved(first_rows: list[int], longest: list[int], pieces: int) -> list[int]:
    """Halve the most expensive piece until there are `pieces`, so that every rank has work.

    Args:
        first_rows: the first row of each piece.
    """
    by_cost: list[tuple[int, int, int]] = []

    def add(start: int, size: int) -> None:
        if size > 1:  # pieces of equal cost: the first one first
            heapq.heappush(by_cost, (-size * longest[start], start, size))

    if len(first_rows) < pieces:
        for a, b in itertools.pairwise([*first_rows, len(longest)]):
            add(a, b - a)
    for _ in range(pieces - len(first_rows)):
        _, start, size = heapq.heappop(by_cost)
        half = (size + 1) // 2
        first_rows.append(start + half)
        add(start, half)
        add(start + half, size - half)
    return sorted(first_rows)
