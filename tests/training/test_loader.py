"""loader: the same items from any step, for any workers, in order, with randomness that belongs to samples."""

import random
import time
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch
from transformers import BatchEncoding

from app.errors import UserError
from app.sampling.batch_plan import BatchPlan, EvaluationPlan
from app.training.feeding.loader import load

CPU = torch.device("cpu")
PLAN = BatchPlan(samples=23, total=50, global_batch=9, micro_batch=2, seed=3, lengths=np.arange(23) % 7)
WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Squares:
    """Rows that are the square of their id."""

    def __len__(self):
        return 23

    def __getitem__(self, i):
        return i * i


def collate(rows: list) -> dict:
    return {"x": torch.tensor(rows), "nested": [(torch.tensor(rows[0]), "text")]}


def jitter(row, generator: np.random.Generator) -> float:
    return row + generator.random()


def items(start=0, rank=0, ranks=1, workers=0, data=None, augment=None, plan=PLAN, device=CPU) -> list:
    steps = range(start, plan.steps)
    return list(load(plan, steps, data or Squares(), collate, rank, ranks, device, workers, augment))


def plain(steps: list) -> list:
    """Write items down as values that compare."""
    return [
        (
            step.index,
            step.weight,
            [(t.index, t.idle, t.weight, t.ids.tolist(), t.inputs["x"].tolist()) for t in step.turns],
        )
        for step in steps
    ]


@WORKERS
def test_an_item_is_a_step_of_this_rank(workers):
    for rank in range(2):
        found = items(rank=rank, ranks=2, workers=workers)
        expected = [PLAN.step(step, rank, 2) for step in range(PLAN.steps)]
        assert plain(found) == plain(
            [
                s._replace(turns=[t._replace(inputs=collate([int(i) ** 2 for i in t.ids])) for t in s.turns])
                for s in expected
            ]
        )


@WORKERS
@pytest.mark.parametrize("start", [1, 3, PLAN.steps - 1, PLAN.steps])
def test_starting_late_gives_the_rest_of_a_run_from_the_start(start, workers):
    whole = items(augment=jitter)
    assert plain(items(start, workers=workers, augment=jitter)) == plain(whole)[start:]


class SlowStart(Squares):
    """Rows of the first step take long, so that another worker is ahead."""

    def __getitem__(self, i):
        if i in PLAN.step(0, 0, 1).turns[0].ids and torch.utils.data.get_worker_info().id == 0:
            time.sleep(0.3)
        return i * i


def test_order_is_kept_when_a_worker_is_slow():
    assert plain(items(workers=2, data=SlowStart())) == plain(items())


def numbers_of_samples(**options) -> dict:
    """Give the augmented value of every (epoch, sample) that a rank sees."""
    ranks = options.pop("ranks", 1)
    found = {}
    for rank in range(ranks):
        for step in items(rank=rank, ranks=ranks, augment=jitter, **options):
            for turn in step.turns:
                for epoch, i, x in zip(turn.epochs.tolist(), turn.ids.tolist(), turn.inputs["x"].tolist(), strict=True):
                    assert found.setdefault((epoch, i), x) == x
    return found


@pytest.mark.parametrize("options", [{"workers": 2}, {"ranks": 3}, {"ranks": 2, "workers": 2}])
def test_augmentation_knows_neither_ranks_nor_workers(options):
    assert numbers_of_samples(**options) == numbers_of_samples()


def test_augmentation_knows_no_batch_size_and_does_know_seed_epoch_and_sample():
    one = numbers_of_samples()
    assert numbers_of_samples(plan=BatchPlan(23, 50, 7, 5, seed=3)) == one
    other = numbers_of_samples(plan=BatchPlan(23, 50, 9, 2, seed=4))
    noise = [{key: x - key[1] ** 2 for key, x in found.items()} for found in (one, other)]
    assert len({round(x, 5) for x in noise[0].values()}) == len(noise[0]) == 50
    assert all(x != noise[1][key] for key, x in noise[0].items() if key in noise[1])


class Many(Squares):
    """Rows that are only given many at a time."""

    asked: list = []

    def __getitem__(self, i):
        raise AssertionError("one at a time")

    def __getitems__(self, ids):
        Many.asked.append(ids)
        return [i * i for i in ids]


def test_rows_are_asked_for_together_where_the_data_can():
    Many.asked = []
    assert plain(items(data=Many(), augment=jitter)) == plain(items(augment=jitter))
    assert Many.asked[0] == PLAN.step(0, 0, 1).turns[0].ids.tolist()
    assert all(type(i) is int for ids in Many.asked for i in ids)


class Elsewhere(Squares):
    """Rows that must be fetched."""

    def __init__(self):
        self.told = []

    def prepare(self, samples):
        self.told.append(samples.tolist())

    def close(self):
        pass


@WORKERS
def test_rows_that_are_fetched_are_announced_and_each_step_is_planned_once(workers, monkeypatch):
    """Planned in this process alone: workers are given the steps."""
    planned, plan_step, data = [], BatchPlan.step, Elsewhere()

    def counted(plan, index, rank, ranks):
        assert torch.utils.data.get_worker_info() is None
        planned.append(index)
        return plan_step(plan, index, rank, ranks)

    monkeypatch.setattr(BatchPlan, "step", counted)
    found = items(workers=workers, data=data, rank=1, ranks=2)
    assert planned == [*range(PLAN.steps)]
    monkeypatch.undo()
    assert plain(found) == plain(items(workers=workers, rank=1, ranks=2))
    for step, told in zip(found, data.told, strict=True):
        assert {i for turn in step.turns for i in turn.ids.tolist()} <= {*told}


@WORKERS
def test_ids_stay_numpy_and_inputs_stay_what_collate_made(workers):
    turn = items(workers=workers)[0].turns[0]
    assert isinstance(turn.ids, np.ndarray) and isinstance(turn.epochs, np.ndarray)
    assert isinstance(turn.weight, float) and isinstance(turn.idle, bool)
    ((tensor, text),) = turn.inputs["nested"]
    assert isinstance(tensor, torch.Tensor) and text == "text"


@WORKERS
def test_loading_draws_from_no_global_generator(workers):
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    items(workers=workers, augment=jitter)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1]) and random.getstate() == before[2]


@WORKERS
def test_evaluation_loads_every_sample_once(workers):
    plan = EvaluationPlan(23, 4, np.arange(23))
    seen = []
    for rank in range(3):
        for step in load(plan, range(plan.steps(3)), Squares(), collate, rank, 3, CPU, workers):
            (turn,) = step.turns
            assert turn.inputs["x"].tolist() == [i * i for i in turn.ids.tolist()]
            seen += [] if turn.idle else turn.ids.tolist()
    assert sorted(seen) == list(range(23))


def test_an_abandoned_loop_leaves_no_worker():
    before = set(psutil.Process().children())
    steps = load(PLAN, range(PLAN.steps), Squares(), collate, 0, 1, CPU, 2)
    next(steps)
    workers = set(psutil.Process().children()) - before
    assert len(workers) == 2
    steps.close()
    del steps
    assert not psutil.wait_procs(workers, timeout=10)[1]


class Broken(Squares):
    """Rows of which one is the user's to mend."""

    def __getitem__(self, i):
        if i == 5:
            raise UserError("row 5 has no text")
        return i * i


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_users_keeps_its_words(workers):
    with pytest.raises(UserError) as error:
        items(workers=workers, data=Broken())
    assert str(error.value) == "row 5 has no text"


class Pair(NamedTuple):
    """Model inputs by position."""

    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: {"a": [x, (x, None)], "b": 3},
        lambda x: Pair(x, x),
        lambda x: BatchEncoding({"input_ids": x}),
        lambda x: OrderedDict(a=x),
        lambda x: defaultdict(list, a=x),
    ],
    ids=["tensor", "nested", "namedtuple", "BatchEncoding", "OrderedDict", "defaultdict"],
)
def test_all_tensors_of_the_inputs_reach_the_device(form):
    """Whatever collate functions return; DataCollatorWithPadding returns a BatchEncoding."""
    device = torch.device("meta")
    steps = load(PLAN, range(1), Squares(), lambda rows: form(torch.tensor(rows)), 0, 1, device)
    inputs = next(steps).turns[0].inputs
    assert type(inputs) is type(form(torch.zeros(1)))
    found = []
    collect(inputs, found)
    assert found and all(tensor.device == device for tensor in found)


def collect(value, found: list) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            collect(item, found)
    elif hasattr(value, "values"):
        for item in value.values():
            collect(item, found)
