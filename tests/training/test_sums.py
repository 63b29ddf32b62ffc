"""app.training.exact.reproducible_sums: the same bits in any order and in any split, and the right value."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from app.training.exact import reproducible_sums

BOUND, COUNT = 2.0**24, 4096


def of(*pieces):
    """Add up pieces as ranks would, each its own, then their parts."""
    found = torch.zeros(reproducible_sums.PARTS, dtype=torch.float64)
    for piece in pieces:
        found += reproducible_sums.order_free([piece], BOUND, COUNT)
    return reproducible_sums.total(found).item()


@pytest.fixture(scope="module")
def values():
    """Give 4,000 squares over 40 orders of magnitude, whose plain sum depends on their order."""
    generator = torch.Generator().manual_seed(0)
    size = torch.empty(4000, dtype=torch.float64).uniform_(-46, 6, generator=generator).exp()
    return (size * torch.randn(4000, generator=generator)).square()


def test_any_order_and_split_has_the_same_bits(values):
    whole = of(values)
    plain = set()
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        mixed = values[torch.randperm(len(values), generator=generator)]
        cuts = sorted(torch.randint(0, len(values), (3,), generator=generator).tolist())
        assert of(*np.split(mixed, cuts)) == whole
        plain.add(sum(piece.sum() for piece in np.split(mixed, cuts)).item())
    assert len(plain) > 1  # the control


def test_the_sum_is_right(values):
    assert of(values) == pytest.approx(math.fsum(values.tolist()), rel=1e-15)
    small = values * 1e-12
    assert of(small) == pytest.approx(math.fsum(small.tolist()), rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 4000, allow_subnormal=False), max_size=60), st.integers(0, 60))
def test_two_ranks_give_what_one_gives(terms, cut):
    tensor = torch.tensor(terms, dtype=torch.float64)
    assert of(tensor[:cut], tensor[cut:]) == of(tensor) == of(tensor.flip(0))
    assert of(tensor) == pytest.approx(math.fsum(terms), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("shape", [(37,), (24, 33), (7, 64), (5, 6, 3, 3), (3, 1)])
def test_a_norm_does_not_depend_on_how_rows_are_split(shape):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3

    def norm(*pieces):
        parameters = [nn.Parameter(torch.zeros_like(piece)) for piece in pieces]
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece
        # As ranks do it, each with the count of all.
        return reproducible_sums.norm(parameters, limit=4096.0).item()

    whole = norm(gradient)
    assert whole == pytest.approx(gradient.double().norm().item(), rel=1e-12)
    for cut in range(1, shape[0]):
        assert norm(gradient[:cut], gradient[cut:]) == whole


def test_no_terms_give_nothing():
    assert reproducible_sums.total(reproducible_sums.order_free([], BOUND, 0)).item() == 0.0
    assert reproducible_sums.norm([], 1.0).item() == 0.0
