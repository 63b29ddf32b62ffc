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

from app.data.rows import MISSING
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan, EvaluationPlan
from app.sampling.orders import ByChunks
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


class Texts:
    """Rows of lengths that look random, of which one may be missing. Each reading draws a random number, as some do."""

    def __init__(self, missing=None):
        self.missing, self.drawn = missing, []

    def __len__(self):
        return 203

    def __getitems__(self, ids):
        self.drawn.append(random.random())
        return [MISSING if i == self.missing else [i] * (i * 37 % 50 + 1) for i in ids]


def in_lanes(sort_over: int, total=1000) -> BatchPlan:
    """Plan steps of 46 samples in 8 micro-batches, of which some share a lane; a ramp begins with smaller ones."""
    plan = BatchPlan(203, total, 46, 6, seed=5, ramp=((3, 20),))
    return plan.ordered(ByChunks(np.full(29, 7), 8 // sort_over, 2, 5, sort_over))


def padded(rows: list) -> dict:
    return {"ids": [row[0] for row in rows], "real": sum(map(len, rows)), "size": len(rows) * max(map(len, rows))}


def each_micro_batch(plan, ranks=1, workers=0, data=None, weigh=None) -> dict:
    """Return what is made of each micro-batch: its samples, inputs and weight, by step and number."""
    found = {}
    for rank in range(ranks):
        given = data or Texts()
        loaded = load(plan, range(plan.steps), given, padded, rank, ranks, CPU, workers, weigh=weigh, length=len)
        for step in loaded:
            for turn in step.turns:
                if not turn.idle:
                    found[step.index, turn.index] = turn.ids.tolist(), turn.inputs, turn.weight, turn.missing
    return found


@pytest.mark.parametrize("sort_over", [2, 4, 8])
def test_micro_batches_that_share_a_lane_are_sorted_together_on_any_layout(sort_over):
    """The samples of a step stay, each micro-batch keeps its size, and ranks and workers see the same ones."""
    plan, sizes = in_lanes(sort_over), {}
    whole = each_micro_batch(plan)
    for step in range(plan.steps):
        planned = plan.micro_batches(step)
        mine = [whole[step, index] for index in range(len(planned))]
        for first in range(0, len(planned), sort_over):
            together = mine[first : first + sort_over]
            ids = [i for own, _ in planned[first : first + sort_over] for i in own]
            assert sorted(i for each in together for i in each[0]) == sorted(ids)
            lengths = [int(i) * 37 % 50 for each in together for i in each[0]]
            assert lengths == sorted(lengths, reverse=True)
        assert [len(each[0]) for each in mine] == [len(ids) for ids, _ in planned] == [each[2] for each in mine]
        assert all(each[0] == each[1]["ids"] for each in mine)
    for ranks in (2, 3, 5, 8):
        assert each_micro_batch(plan, ranks) == whole
    assert each_micro_batch(plan, 3, workers=1) == whole
    for name, made in (("sorted", whole), ("not", each_micro_batch(in_lanes(1)))):
        sizes[name] = sum(each[1]["size"] for each in made.values()) / sum(each[1]["real"] for each in made.values())
    assert sizes["sorted"] < (1.4, 1.25, 1.15)[(2, 4, 8).index(sort_over)] < sizes["not"]


def test_what_is_missing_of_sorted_micro_batches_is_counted_once():
    plan = in_lanes(4)
    whole = each_micro_batch(plan, data=Texts(missing=100), weigh=len)
    for ranks in (2, 3, 5):
        assert each_micro_batch(plan, ranks, data=Texts(missing=100), weigh=len) == whole
    times = sum(100 in ids for step in range(plan.steps) for ids, _ in plan.micro_batches(step))
    assert times > 3 and sum(each[3] for each in whole.values()) == times
    assert not any(100 in each[0] for each in whole.values())
    assert all(each[2] == each[1]["real"] for each in whole.values())


def test_reading_what_is_sorted_draws_the_same_random_numbers_on_every_layout():
    drawn = []
    for ranks in (1, 3, 8):
        texts = [Texts() for _ in range(ranks)]
        for rank, each in enumerate(texts):
            list(load(in_lanes(4, 300), range(6), each, padded, rank, ranks, CPU, length=len))
        drawn.append({number for each in texts for number in each.drawn})
    assert drawn[0] and drawn[0] <= drawn[1] and drawn[0] <= drawn[2]  # idle turns of more ranks draw others as well
