"""Weights that are known when rows are read: the same steps as if they were known before, and rows that are missing."""

import numpy as np
import pytest
import torch

from app.data.rows import MISSING
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan
from app.training.feeding.loader import inputs_of, load
from app.training.feeding.weighing import one

WEIGHTS = np.arange(23) % 4  # some rows weigh nothing
ROWS = [torch.tensor([float(i), float(weight)]) for i, weight in enumerate(WEIGHTS)]
ARGUMENTS = {"samples": 23, "total": 69, "global_batch": 9, "micro_batch": 2, "seed": 3}


def steps(weigh, rank, ranks, data=ROWS, **more):
    plan = BatchPlan(**ARGUMENTS, **more)
    return list(load(plan, range(plan.steps), data, torch.stack, rank, ranks, torch.device("cpu"), weigh=weigh))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_steps_are_those_of_weights_that_are_known_before(ranks):
    for rank in range(ranks):
        known = steps(None, rank, ranks, weights=WEIGHTS)
        read = steps(lambda row: row[1].item(), rank, ranks)
        for before, now in zip(known, read, strict=True):
            assert before.micro_count == now.micro_count
            for turn, other in zip(before.turns, now.turns, strict=True):
                assert (turn.index, turn.weight, turn.idle) == (other.index, other.weight, other.idle)
                if turn.idle:  # it may repeat others: of weight, if there are any
                    assert other.inputs[:, 1].sum() > 0
                else:
                    assert turn.inputs.equal(other.inputs) and turn.ids.tolist() == other.ids.tolist()


class Holes:
    """Rows of which some cannot be read."""

    def __init__(self, missing):
        self.missing = missing

    def __len__(self):
        return len(ROWS)

    def __getitems__(self, ids):
        return [MISSING if i in self.missing else ROWS[i] for i in ids]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("missing", [{4}, {*range(3, 20)}], ids=["one", "most"])
def test_missing_rows_are_left_out_and_counted(ranks, missing):
    whole = [steps(None, rank, ranks) for rank in range(ranks)]
    read = [steps(one, rank, ranks, Holes(missing)) for rank in range(ranks)]
    lost = 0
    for rank in range(ranks):
        for before, now in zip(whole[rank], read[rank], strict=True):
            for turn, other in zip(before.turns, now.turns, strict=True):
                left = [i for i in turn.ids.tolist() if i not in missing]
                lost += other.missing
                if turn.idle or not left:
                    assert other.idle and other.weight == 0 and len(other.inputs)
                    continue
                assert (other.ids.tolist(), other.weight, other.missing) == (left, len(left), len(turn.ids) - len(left))
                assert other.inputs[:, 0].tolist() == left and len(other.epochs) == len(left)
    assert lost == 3 * len(missing)


def test_nothing_can_be_read():
    with pytest.raises(UserError, match="step 1: none of its samples can be read"):
        steps(one, 0, 1, Holes({*range(23)}))


def test_what_a_plan_reads_lacks_missing_rows():
    def draw(row, random):
        return row + random.integers(9)

    alone = [inputs_of(ROWS, torch.stack, draw, [row], [epoch], 7) for row, epoch in ((3, 0), (5, 1))]
    assert inputs_of(Holes({4}), torch.stack, draw, [3, 4, 5], [0, 0, 1], 7).equal(torch.cat(alone))
