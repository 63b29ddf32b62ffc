"""batch_plan: every sample once, the same micro-batches for any number of ranks, at a cost that knows no size."""

import dataclasses
import hashlib
import itertools
import math
import re
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import RunConfig
from app.errors import UserError
from app.sampling import permutation
from app.sampling.batch_plan import BatchPlan, EvaluationPlan
from app.sampling.cuts import equal_cost_cuts, even_cuts

properties = settings(derandomize=True, deadline=None, database=None, max_examples=150)


EITHER = st.booleans()


@st.composite
def ramps(draw, final):
    """Draw the parts of a ramp up to `final`."""
    ends = sorted(draw(st.sets(st.integers(1, 12), max_size=3)))
    return tuple((end, draw(st.integers(1, final))) for end in ends)


def sizes_of(ramp, final: int, steps: int) -> list[int]:
    """Give the sizes of the first steps under a ramp, in another way than the plan does."""
    sizes = [final] * steps
    for end, value in reversed(ramp):
        sizes[:end] = [value] * min(end, steps)
    return sizes


@st.composite
def plans(draw, lengths=EITHER, weights=EITHER, least=1):
    """Draw a plan of a few short epochs, samples that weigh at least so much, and a number of ranks that it allows."""
    samples = draw(st.integers(1, 50))
    total = draw(st.integers(1, 3 * samples))
    global_batch, micro_batch = draw(st.integers(1, 40)), draw(st.integers(1, 20))
    columns = np.random.default_rng(draw(st.integers(0, 99)))
    plan = BatchPlan(
        samples,
        total,
        global_batch,
        micro_batch,
        seed=draw(st.integers(0, 9)),
        lengths=columns.integers(0, 60, samples) if draw(lengths) else None,
        weights=columns.integers(least, 9, samples) if draw(weights) else None,
        ramp=draw(ramps(global_batch)),
    )
    return plan, draw(st.integers(1, plan.micro_batches_per_step))


def steps_of_ranks(plan: BatchPlan, ranks: int):
    """Give what every rank does in each step of a plan."""
    for step in range(plan.steps):
        yield step, [plan.step(step, rank, ranks) for rank in range(ranks)]


def real(steps: list) -> list:
    return [turn for step in steps for turn in step.turns if not turn.idle]


@properties
@given(plans())
def test_every_sample_once_an_epoch(drawn):
    """Over all ranks and steps, also where a step spans the end of an epoch or several whole epochs."""
    plan, ranks = drawn
    seen = [turn for _, steps in steps_of_ranks(plan, ranks) for turn in real(steps)]
    ids, epochs = (np.concatenate([getattr(turn, name) for turn in seen]) for name in ("ids", "epochs"))
    assert len(ids) == plan.total
    for epoch in range(-(-plan.total // plan.samples)):
        here = np.sort(ids[epochs == epoch])
        left = min(plan.samples, plan.total - epoch * plan.samples)
        assert len(here) == left and len(np.unique(here)) == left
        assert here[0] >= 0 and here[-1] < plan.samples


@properties
@given(plans())
def test_a_step_is_its_place_in_the_stream(drawn):
    """Global batches are cut from the epochs one after another, in the ramp's sizes; only the last one is short."""
    plan, ranks = drawn
    ends = [0, *np.cumsum(sizes_of(plan.ramp, plan.global_batch, plan.steps))]
    for step, steps in steps_of_ranks(plan, ranks):
        places = np.arange(ends[step], min(ends[step + 1], plan.total))
        epochs = np.concatenate([turn.epochs for turn in real(steps)])
        assert np.array_equal(np.sort(epochs), places // plan.samples)
        assert (plan.seen(step), plan.seen(step + 1)) == (places[0], places[-1] + 1)
        assert plan.epoch_ends(step) == bool(np.any((places + 1) % plan.samples == 0))
    assert plan.seen(plan.steps) == plan.total


@properties
@given(plans())
def test_ranks_share_the_micro_batches_of_a_step_in_contiguous_blocks(drawn):
    """Micro-batch k is turn k mod A of rank k div A, and is the same one for any number of ranks."""
    plan, ranks = drawn
    for step, steps in steps_of_ranks(plan, ranks):
        alone = plan.step(step, 0, 1).turns
        turns = -(-len(alone) // ranks)
        assert turns <= plan.accumulation(ranks)
        assert [len(own.turns) for own in steps] == [turns] * ranks
        for rank, own in enumerate(steps):
            assert [turn.index for turn in own.turns] == list(range(rank * turns, (rank + 1) * turns))
            assert [turn.idle for turn in own.turns] == [turn.index >= len(alone) for turn in own.turns]
        shared = real(steps)
        assert len(shared) == len(alone) == -(-sum(len(turn.ids) for turn in alone) // plan.micro_batch)
        for turn, expected in zip(shared, alone, strict=True):
            assert turn.index == expected.index and turn.weight == expected.weight
            assert np.array_equal(turn.ids, expected.ids) and np.array_equal(turn.epochs, expected.epochs)


@properties
@given(plans())
def test_idle_turns_weigh_nothing_and_hold_a_real_micro_batch(drawn):
    """All of its rows: BatchNorm and losses over the batch may fail on fewer."""
    plan, ranks = drawn
    for _, steps in steps_of_ranks(plan, ranks):
        micros = {(tuple(turn.ids), tuple(turn.epochs)) for turn in real(steps)}
        for turn in (turn for step in steps for turn in step.turns if turn.idle):
            assert turn.weight == 0 and (tuple(turn.ids), tuple(turn.epochs)) in micros


@properties
@given(plans(weights=st.just(True), least=0))
def test_micro_batches_without_weight_are_idle_turns(drawn):
    """A weighted mean over one would be 0 / 0. Samples without weight beside others stay where they are."""
    plan, ranks = drawn
    for step, steps in steps_of_ranks(plan, ranks):
        weights = [plan.weights[ids].sum() for ids, _ in plan.micro_batches(step)]
        assert sorted(turn.index for turn in real(steps)) == [i for i, weight in enumerate(weights) if weight]
        for turn in real(steps):
            assert np.array_equal(turn.ids, plan.micro_batches(step)[turn.index][0])
        idle = [turn for one in steps for turn in one.turns if turn.idle]
        assert all(plan.weights[turn.ids].sum() > 0 or not sum(weights) for turn in idle)
        assert {one.weight for one in steps} == {sum(weights)}


@properties
@given(plans())
def test_every_rank_knows_the_weight_of_the_global_batch(drawn):
    """Samples, or what the recipe weighs them by; turns add up to it."""
    plan, ranks = drawn
    for _, steps in steps_of_ranks(plan, ranks):
        for turn in real(steps):
            assert turn.weight == (len(turn.ids) if plan.weights is None else plan.weights[turn.ids].sum())
        assert {step.weight for step in steps} == {sum(turn.weight for turn in real(steps))}


@properties
@given(plans(lengths=st.just(False)))
def test_rows_are_spread_nearly_evenly_and_never_above_the_micro_batch(drawn):
    plan, _ = drawn
    for step in range(plan.steps):
        rows = [len(ids) for ids, _ in plan.micro_batches(step)]
        assert max(rows) <= plan.micro_batch and max(rows) - min(rows) <= 1 and rows == sorted(rows, reverse=True)


@properties
@given(plans(lengths=st.just(True)))
def test_lengths_sort_within_the_global_batch_and_change_no_sample(drawn):
    plan, _ = drawn
    plain = dataclasses.replace(plan, lengths=None, weights=None)
    for step in range(plan.steps):
        rows, micros = plain.micro_batches(step), plan.micro_batches(step)
        pairs = [sorted((e, i) for ids, es in cut for i, e in zip(ids, es, strict=True)) for cut in (rows, micros)]
        assert pairs[0] == pairs[1]
        lengths = plan.lengths[np.concatenate([ids for ids, _ in micros])]
        assert np.all(np.diff(lengths) <= 0)
        assert len(micros) == len(rows) and all(len(ids) for ids, _ in micros)
        even = np.split(lengths, even_cuts(len(lengths), len(micros)))
        assert max(cost(plan.lengths[ids]) for ids, _ in micros) <= max(cost(piece) for piece in even)


def cost(lengths: np.ndarray) -> int:
    """Padded tokens of a micro-batch."""
    return len(lengths) * max(1, int(lengths.max()))


@properties
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_cuts_are_as_good_as_any(lengths, data):
    lengths = np.array(sorted(lengths, reverse=True))
    pieces = data.draw(st.integers(1, len(lengths)))
    cuts = equal_cost_cuts(lengths, pieces)
    assert len(cuts) == pieces - 1 and np.all(np.diff([0, *cuts, len(lengths)]) > 0)
    best = min(
        max(cost(piece) for piece in np.split(lengths, list(edges)))
        for edges in itertools.combinations(range(1, len(lengths)), pieces - 1)
    )
    assert max(cost(piece) for piece in np.split(lengths, cuts)) == best


def slow_cuts(lengths, pieces):
    """Cut as the first version did: its cuts decide what runs that were begun with it go on with."""
    rows, longest = len(lengths), np.maximum(lengths, 1).tolist()

    def starts(limit):
        found, position = [], 0
        while position < rows and len(found) <= pieces:
            found.append(position)
            position += max(1, limit // longest[position])
        return found

    low, high = longest[0], longest[0] * rows
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(starts(middle)) <= pieces else (middle + 1, high)
    found = starts(low)
    while len(found) < pieces:
        edges = [*found, rows]
        sizes = [b - a for a, b in itertools.pairwise(edges)]
        fullest = max(range(len(sizes)), key=lambda i: (sizes[i] > 1) * sizes[i] * longest[found[i]])
        found.insert(fullest + 1, found[fullest] + (sizes[fullest] + 1) // 2)
    return found[1:]


@settings(properties, max_examples=600)
@given(
    lengths=st.lists(
        st.one_of(st.integers(0, 9), st.integers(0, 300), st.integers(0, 10**9), st.just(10**15)),
        min_size=1,
        max_size=120,
    ),
    micro=st.integers(1, 20),
)
def test_cuts_are_those_of_the_slow_search(lengths, micro):
    lengths, pieces = np.sort(np.array(lengths))[::-1], -(-len(lengths) // micro)
    assert equal_cost_cuts(lengths, pieces).tolist() == slow_cuts(lengths, pieces)


def test_an_outlier_among_many_samples_costs_little():
    """With as many as 16,384 samples a step, the first version took 1.8 s for this."""
    lengths = np.random.default_rng(0).integers(5, 200, 16_384)
    lengths[0] = 10**6
    lengths = np.sort(lengths)[::-1]
    began = time.perf_counter()
    cuts = equal_cost_cuts(lengths, 1024)
    assert time.perf_counter() - began < 0.25 and len(cuts) == 1023


def test_a_fingerprint_copies_no_lengths_and_keeps_its_value():
    """It is in every checkpoint's record."""
    lengths = np.random.default_rng(0).integers(1, 500, 3 * 2**16 + 7, dtype=np.int32)
    plan = BatchPlan(len(lengths), 10, 4, 2, lengths=lengths[::-1], weights=lengths / 3)
    tracemalloc.start()
    found = plan.fingerprint
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    whole = [array.astype("<f8").tobytes() for array in (lengths[::-1], lengths / 3)]
    expected = hashlib.blake2b(b"".join([str(len(lengths)).encode(), *whole]), digest_size=8)
    assert found == expected.hexdigest() and peak < 2**20
    assert BatchPlan(7, 10, 4, 2).fingerprint == hashlib.blake2b(b"7||", digest_size=8).hexdigest()


@pytest.mark.parametrize(("rows", "pieces", "sizes"), [(11, 3, [4, 4, 3]), (4, 4, [1, 1, 1, 1]), (7, 1, [7])])
def test_even_cuts(rows, pieces, sizes):
    assert [len(piece) for piece in np.split(np.arange(rows), even_cuts(rows, pieces))] == sizes


@pytest.mark.parametrize("lengths", [None, np.arange(18)])
def test_last_step_with_fewer_micro_batches_than_ranks(lengths):
    plan = BatchPlan(samples=18, total=18, global_batch=16, micro_batch=4, lengths=lengths)
    last = [plan.step(1, rank, 4) for rank in range(4)]
    assert [len(step.turns) for step in last] == [1, 1, 1, 1]
    assert [step.turns[0].idle for step in last] == [False, True, True, True]
    assert [len(step.turns[0].ids) for step in last] == [2, 2, 2, 2]
    assert {step.weight for step in last} == {2}


def test_a_ramp_is_declared_ahead_and_refused_where_it_says_nothing():
    """Smaller batches come first, and the run is longer for them; each mistake names its flag."""
    config = RunConfig(epochs=1, global_batch=8, micro_batch=4, batch_ramp=("2:2", "5:4"))
    plan = BatchPlan.of_run(config, 40)
    assert str(plan.sizes) == "8 (2 until step 2, 4 until step 5)"
    assert plan.steps == 8 and [plan.seen(i) for i in range(9)] == [0, 2, 4, 8, 12, 16, 24, 32, 40]
    assert BatchPlan.of_run(dataclasses.replace(config, steps=7), 40).total == 32
    assert [plan.idle_until(ranks) for ranks in (1, 2)] == [0, 5]
    for words, message in {
        ("2-2",): r"--run\.batch-ramp 2-2: give STEP:SAMPLES, in steps and not in %, for example 100:4",
        ("2:9",): r"--run\.batch-ramp 2:9: 9 must be at least 1 and at most --run\.global-batch 8",
        ("2:0",): "0 must be at least 1",
        ("5:2", "5:4"): "each step must be later than the one before it",
        ("0:2",): "and not 0",
    }.items():
        with pytest.raises(UserError, match=message):
            BatchPlan.of_run(dataclasses.replace(config, batch_ramp=words), 40)


@properties
@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_accumulation_has_room_for_all_micro_batches_and_wastes_no_turn(global_batch, micro_batch, data):
    plan = BatchPlan(100, 100, global_batch, micro_batch)
    ranks = data.draw(st.integers(1, plan.micro_batches_per_step))
    turns = plan.accumulation(ranks)
    assert turns * ranks >= plan.micro_batches_per_step > (turns - 1) * ranks


def test_more_ranks_than_micro_batches_are_refused_with_the_numbers():
    plan = BatchPlan(100, 100, 32, 8)
    assert plan.accumulation(4) == 1
    with pytest.raises(UserError) as refusal:
        plan.accumulation(8)
    assert str(refusal.value) == (
        "8 processes for 4 micro-batches (global batch 32 = 4 x 8): at most 4 can work; "
        "use --run.micro-batch 4 or a larger --run.global-batch"
    )


NO_ROOM = (2, 1, 8)


@pytest.mark.parametrize(("global_batch", "micro_batch", "ranks"), [(32, 8, 8), (10, 4, 4), (7, 7, 5), NO_ROOM])
def test_the_advice_of_the_refusal_works(global_batch, micro_batch, ranks):
    """A named micro-batch makes room for all ranks; where none can, none is named."""
    with pytest.raises(UserError) as refusal:
        BatchPlan(100, 100, global_batch, micro_batch).accumulation(ranks)
    named = re.search(r"--run\.micro-batch (\d+)", str(refusal.value))
    assert bool(named) == (ranks <= global_batch)
    if named:
        BatchPlan(100, 100, global_batch, int(named[1])).accumulation(ranks)


def test_length_of_a_run():
    settings = RunConfig(global_batch=8, epochs=2.5)
    plan = BatchPlan.of_run(settings, 10)
    assert (plan.total, plan.steps) == (25, 4)
    plan = BatchPlan.of_run(RunConfig(global_batch=8, epochs=2.5, steps=7, seed=3, micro_batch=2), 10)
    assert (plan.total, plan.steps, plan.seed, plan.micro_batches_per_step) == (56, 7, 3, 4)


@pytest.mark.parametrize(
    ("samples", "fields", "words"),
    [
        (0, {}, "empty"),
        (10, {"epochs": 0.01}, r"--run\.epochs 0\.01 of 10 samples"),
    ],
)
def test_of_run_refuses_what_cannot_be_run(samples, fields, words):
    with pytest.raises(UserError, match=words):
        BatchPlan.of_run(RunConfig(**fields), samples)


def test_a_stop_that_is_not_reached_is_refused():
    """A run that is made longer has a step more than one that was long from the start."""
    once, twice = (RunConfig(epochs=epochs, global_batch=12, stop_at=8) for epochs in (1, 2))
    with pytest.raises(UserError, match=r"--run\.stop-at 8: the run has 4 steps"):
        BatchPlan.of_run(once, 40).check_stop(once)
    plan = BatchPlan.of_run(twice, 40)
    assert plan.steps == 7 and plan.going_on(twice, 4, 40).steps == 8
    plan.going_on(twice, 4, 40).check_stop(twice)


@properties
@given(
    samples=st.integers(1, 90),
    batch=st.integers(1, 20),
    launches=st.lists(st.tuples(st.booleans(), st.integers(1, 70)), min_size=1, max_size=5),
    data=st.data(),
)
def test_the_plan_of_a_run_that_has_ended_or_gone_on_is_valid_from_its_first_step(samples, batch, launches, data):
    """Its steps are the ones that were made; where not just the last was short, as many and of as many samples."""
    made, ramp = [0], data.draw(ramps(batch))  # samples seen before each step
    words = tuple(f"{end}:{value}" for end, value in ramp)
    sizes = sizes_of(ramp, batch, 500)
    for by_steps, more in launches:
        step, seen = len(made) - 1, made[-1]
        length = {"steps": step + more} if by_steps else {"epochs": (seen + more) / samples}
        config = RunConfig(global_batch=batch, micro_batch=4, batch_ramp=words, **length)
        plan = BatchPlan.of_run(config, samples).going_on(config, step, seen)
        following = [plan.seen(i) for i in range(step, plan.steps + 1)]
        expected = seen + np.concatenate([[0], np.cumsum(sizes[step : step + len(following) - 1])])
        assert following == np.minimum(expected, plan.total).tolist()
        made += following[1:]
        ended = BatchPlan.of_run(config, samples).going_on(config, plan.steps, plan.total)
        for known in (plan, ended):
            places = [known.seen(i) for i in range(known.steps + 1)]
            assert places[0] == 0 and places[-1] == plan.total and 0 < min(np.diff(places)) <= batch
            assert all(len(known.micro_batches(i)) for i in {0, step // 2, known.steps - 1})
        if all(np.diff(made)[:-1] == sizes[: len(made) - 2]):
            assert [ended.seen(i) for i in range(ended.steps + 1)] == made


def test_a_late_step_of_a_huge_run_costs_what_the_first_one_costs():
    plan = BatchPlan(samples=10**12, total=3 * 10**12, global_batch=512, micro_batch=16)

    def peak(step: int) -> int:
        tracemalloc.start()
        plan.step(step, 3, 8)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    def seconds(step: int) -> float:
        start = time.perf_counter()
        plan.step(step, 3, 8)
        return time.perf_counter() - start

    peak(1000)
    assert peak(10**9) < 1.5 * peak(0) < 10**6
    apart = range(0, 100, 20)  # steps that share no stretch of the order, which would be remembered
    assert min(seconds(10**9 + i) for i in apart) < 20 * min(seconds(i) for i in apart)


def test_ten_thousand_ranks_share_a_trillion_samples():
    plan = BatchPlan(samples=10**12, total=2 * 10**12, global_batch=40_000, micro_batch=2)
    ranks = 10_000
    assert plan.accumulation(ranks) == 2
    for step in (0, 123_456_789 // 7, plan.steps - 1):
        micros = plan.micro_batches(step)
        ids = np.concatenate([ids for ids, _ in micros])
        assert len(micros) == 20_000 and len(np.unique(ids)) == 40_000
        assert ids.min() >= 0 and ids.max() < 10**12
        for rank in (0, 1, 4_999, ranks - 1):
            own = plan.step(step, rank, ranks)
            assert [turn.ids.tolist() for turn in own.turns] == [micros[2 * rank + i][0].tolist() for i in (0, 1)]
            assert [turn.weight for turn in own.turns] == [2, 2] and own.weight == 40_000


def place_of(ids: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Undo order.permute: go through its rounds from the last to the first, and walk on where it walked."""
    keys = permutation._random_words(n, seed, epoch, "<u4", 2 * permutation.ROUNDS).reshape(permutation.ROUNDS, 2)
    bits, word = np.uint64((n - 1).bit_length() // 2), np.uint64(32)
    mask, rows = (np.uint64(1) << bits) - np.uint64(1), (np.uint64(n - 1) >> bits) + np.uint64(1)
    places, walking = ids.astype(np.uint64), np.arange(len(ids))
    while walking.size:
        row, column = places[walking] >> bits, places[walking] & mask
        for i, (first, second) in reversed(list(enumerate(keys))):
            if i % 2:
                column = (column - permutation._mix(row, first, second)) & mask
            else:
                row = (row + rows - ((permutation._mix(column, first, second) * rows) >> word)) % rows
        places[walking] = (row << bits) | column
        walking = walking[places[walking] >= n]
    return places.view(np.int64)


@pytest.mark.long
def test_a_million_steps_of_a_trillion_samples_on_ten_thousand_ranks():
    """Any sample is in one step of the epoch, at one place of one rank; no two ranks share one; all have as many."""
    samples, ranks, each, epoch = 10**12, 10_000, 4, 1
    plan = BatchPlan(samples, 2 * samples, ranks * each, each, seed=3)
    random = np.random.default_rng(0)
    wanted = np.unique(random.integers(0, samples, 1_000_000))
    positions = epoch * samples + place_of(wanted, samples, plan.seed, epoch)
    assert np.array_equal(permutation.stream(positions, samples, plan.seed)[0], wanted)  # coverage
    steps = np.unique(random.integers(samples // plan.global_batch, plan.steps, 1_000_000))
    drawn = steps * plan.global_batch + random.integers(0, plan.global_batch, len(steps))
    ids, epochs = permutation.stream(drawn, samples, plan.seed)
    assert len(np.unique(ids)) == len(ids) > 970_000 and set(epochs.tolist()) == {epoch}  # disjointness
    # That a sample's rank is its place in the step, divided by the share, is what the planner says in whole steps.
    shares = np.bincount(positions % plan.global_batch // each, minlength=ranks)
    assert abs(shares - shares.mean()).max() < 7 * shares.mean() ** 0.5
    for step in (int(positions[0]) // plan.global_batch, int(steps[-1])):
        micros = [ids for ids, _ in plan.micro_batches(step)]
        assert [len(ids) for ids in micros] == [each] * ranks
        places = np.arange(plan.seen(step), plan.seen(step + 1))
        assert np.array_equal(np.concatenate(micros), permutation.stream(places, samples, plan.seed)[0])
        for rank in (0, 1, ranks // 2, ranks - 1):
            (turn,) = plan.step(step, rank, ranks).turns
            assert turn.weight == each and np.array_equal(turn.ids, micros[rank])


def evaluate(samples: int, ranks: int, lengths: np.ndarray | None) -> list:
    plan = EvaluationPlan(samples, 4, lengths)
    return [plan.step(step, rank, ranks).turns for rank in range(ranks) for step in range(plan.steps(ranks))]


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("samples", [1, 7, 101, 1043])
def test_evaluation_sees_every_sample_once_on_any_number_of_ranks(samples, ranks, by_length):
    lengths = np.random.default_rng(0).integers(1, 50, samples) if by_length else None
    turns = evaluate(samples, ranks, lengths)
    assert len(turns) == ranks * math.ceil(math.ceil(samples / 4) / ranks) and all(len(own) == 1 for own in turns)
    real = [turn for (turn,) in turns if not turn.idle]
    assert sorted(i for turn in real for i in turn.ids.tolist()) == list(range(samples))
    assert all(turn.weight == len(turn.ids) <= 4 for turn in real)
    for idle in (turn for (turn,) in turns if turn.idle):
        assert idle.weight == 0 and idle.ids.tolist() in [turn.ids.tolist() for turn in real]
    alone = evaluate(samples, 1, lengths)
    assert [turn.ids.tolist() for turn in real] == [turn.ids.tolist() for (turn,) in alone]
    if by_length:
        assert np.all(np.diff(lengths[np.concatenate([turn.ids for turn in real])]) <= 0)


def test_a_turn_of_evaluation_costs_the_same_in_a_large_data_set():
    def peak(samples: int) -> int:
        plan = EvaluationPlan(samples, 16, np.arange(samples) % 97)
        plan.step(0, 0, 1)  # whatever is done once may grow
        tracemalloc.start()
        plan.step(1, 0, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak(300_000) < 10 * peak(1_000)
