"""Collectives of Python objects on three ranks: what each rank gets, and that a mistake of one rank reaches all."""

import json

import pytest
from support.launching import ROOT, launch

from app import RunConfig, UserError
from app.run import Run
from laws import exchanging


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Return what each of three ranks got, by case."""
    folder = tmp_path_factory.mktemp("objects")
    result = launch("ddp_cpu", 3, ROOT / "tests" / "laws" / "exchanging.py", folder)
    assert result.status == 0, result.output[-3000:]
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(3)]
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def test_values_reach_every_rank(told):
    assert told["who"] == [[0, 3], [1, 3], [2, 3]]
    assert told["broadcast"] == [["a", None, 1.5]] * 3 and told["from the last"] == ["of 2"] * 3
    assert told["none"] == [[None, [None] * 3, None]] * 3
    assert told["sizes"] == [[10, 1000, 100000]] * 3
    assert told["arrays"] == [[], [0], [0, 1, 2, 3, 4]]
    assert told["an array"] == [5, 6, 7] and told["a generator"] == [10, 11, 12]


def test_groups_have_ranks_of_their_own(told):
    """Number of the rank, size, what is gathered and what the last one sends."""
    assert told["groups"] == [[0, 2, [0, 2], 2], [0, 1, [1], 1], [1, 2, [0, 2], 2]]
    assert told["groups of a group"] == [[0], [1], [2]]
    assert told["scatter in a group"] == ["0.0", "1.0", "0.1"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("unpicklable, broadcast", "broadcast: the value of rank 0 cannot be pickled (TypeError: cannot pickle"),
        ("unpicklable, gather", "gather: the value of rank 1 cannot be pickled"),
        ("unpicklable, scatter", "scatter: the value of rank 0 cannot be pickled"),
        ("too few", "scatter: the value of rank 0 is 2 values: give a list of 3, one for each rank"),
        ("no list", "scatter: the value of rank 0 is None: give a list of 3"),
        ("one number", "scatter: the value of rank 0 is int: give a list of 3"),
        ("a generator that fails", "scatter: the value of rank 0 cannot be listed (ZeroDivisionError: "),
        ("no such rank", "source 3: there are 3 ranks, from 0 to 2"),
        ("user alone", "UserError: rank 1: row 3 is empty"),
    ],
)
def test_a_mistake_on_one_rank_is_every_ranks(told, case, said):
    assert len(set(told[case])) == 1 and said in told[case][0] and told[case][0].startswith("UserError")


def test_a_fault_keeps_its_own_error_on_its_rank(told):
    other = "RuntimeError: rank 1: ZeroDivisionError: by zero"
    assert told["fails alone"] == [other, "ZeroDivisionError: by zero", other]
    assert told["all well"] == ["went on"] * 3 and told["unpicklable, broadcast of another"] == [7] * 3


def test_one_process_is_a_group_of_one(tmp_path):
    config = exchanging.Config(RunConfig(dir=str(tmp_path), trackers=(), quiet=True))
    with pytest.raises(UserError, match="the run is not open"):
        Run(config).collectives.gather(1)
    with Run(config) as run:
        both = run.collectives
        assert [both.broadcast(5), both.gather("a"), both.scatter([7]), both.split("x").gather(1)] == [5, ["a"], 7, [1]]
        with pytest.raises(ZeroDivisionError), both.together():
            raise ZeroDivisionError
