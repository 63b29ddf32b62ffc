"""Which piece a row is in, against counting one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.sampling.pieces import Pieces

SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any)


@given(SIZES)
def test_every_row_is_in_its_piece(sizes):
    pieces, counted = Pieces.of(sizes), [(piece, place) for piece, size in enumerate(sizes) for place in range(size)]
    assert (len(pieces), pieces.rows) == (len(sizes), len(counted))
    rows = np.arange(pieces.rows)
    assert [*zip(*(column.tolist() for column in pieces.places_of(rows)), strict=True)] == counted
    assert [int(pieces.piece_of(row)) for row in range(pieces.rows)] == [piece for piece, _ in counted]
    assert pieces.first.tolist() == [sum(sizes[:piece]) for piece in range(len(sizes))]
    assert pieces.piece_of(pieces.rows) == len(sizes)


@given(SIZES, st.data())
def test_rows_in_any_order_are_grouped_by_piece(sizes, data):
    pieces = Pieces.of(np.array(sizes, np.int32))
    rows = np.array(data.draw(st.lists(st.integers(0, pieces.rows - 1))), np.int64)
    groups = [*pieces.grouped(rows)]
    numbers = [group.piece for group in groups]
    assert numbers == sorted({*pieces.piece_of(rows).tolist()})
    found = np.full(len(rows), -1)
    for group in groups:
        found[group.here] = pieces.first[group.piece] + group.places
    assert found.tolist() == rows.tolist()
