"""Plans over orders of their own: by chunks and mixed, each row once, on any number of ranks, known ahead."""

import itertools

import numpy as np
import pytest

from app.sampling.batch_plan import BatchPlan
from app.sampling.mixture import Part
from app.sampling.orders import ByChunks, Mixed, Shuffled, SourceOrder, seed_of_source

SIZES = np.random.default_rng(0).integers(1, 30, 60)  # ragged chunks
ROWS = int(SIZES.sum())
FIRST = np.cumsum(SIZES) - SIZES
BATCH, MICRO, LANES = 22, 5, 5  # micro-batches of 4 and 5 rows


def by_chunks(lanes=LANES):
    return ByChunks(SIZES, lanes, window=3, seed=1)


def mixed(lanes=LANES):
    """Mix a large source by chunks, a small one by chunks, and one that any rank reads."""
    sizes = [SIZES, np.array([4, 9, 2, 7, 6])]
    parts = [Part(0, (10, 1, 3)), Part(300, (10, 3, 1))]
    orders = [ByChunks(each, lanes, 2, seed_of_source(1, i)) for i, each in enumerate(sizes)]
    sources = [SourceOrder(str(i), each) for i, each in enumerate([*orders, Shuffled(50, 9)])]
    return Mixed(sources, parts, lanes)


ORDERS = {"chunks": by_chunks, "mixed": mixed}


def plan(order, **more):
    return BatchPlan(order.rows, 3 * order.rows, BATCH, MICRO, seed=1, own_order=order, **more)


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_micro_batches_do_not_depend_on_ranks(kind, ranks, weighted):
    order = ORDERS[kind]()
    weights = np.where(np.arange(order.rows) % 3, 2.0, 1.0) if weighted else None
    ours = plan(order, weights=weights)
    for step in (0, 1, 7, ROWS // BATCH, ours.steps - 1):
        whole = ours.micro_batches(step)
        dealt = [ours.step(step, rank, ranks) for rank in range(ranks)]
        turns = {turn.index: turn for each in dealt for turn in each.turns if not turn.idle}
        assert sorted(turns) == list(range(len(whole)))
        for (ids, epochs), turn in zip(whole, (turns[i] for i in range(len(whole))), strict=True):
            assert turn.ids.tolist() == ids.tolist() and turn.epochs.tolist() == epochs.tolist()
            assert turn.weight == (len(ids) if weights is None else weights[ids].sum())
        assert {each.weight for each in dealt} == {sum(turn.weight for turn in turns.values())}


def test_every_row_comes_once_an_epoch():
    order = by_chunks()
    ours = plan(order)
    pairs = [
        pair for step in range(ours.steps) for each in ours.micro_batches(step) for pair in zip(*each, strict=True)
    ]
    wanted = set(itertools.product(range(ROWS), range(3)))
    assert len(pairs) == len(wanted) and {(int(i), int(epoch)) for i, epoch in pairs} == wanted


def chunk_of(ids):
    return np.searchsorted(FIRST, ids, side="right") - 1


def test_a_rank_reads_the_chunks_of_its_lanes_alone():
    """In an epoch, ranks share chunks at the borders of lanes only: also where turns are idle."""
    ours, ranks = plan(by_chunks()), 3
    within = range(ROWS // BATCH)  # steps of one epoch
    read = [
        {int(c) for step in within for turn in ours.step(step, rank, ranks).turns for c in chunk_of(turn.ids)}
        for rank in range(ranks)
    ]
    assert set.union(*read) == set(range(len(SIZES)))
    assert sum(map(len, read)) - len(SIZES) <= 2 * (ranks - 1)


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_read_was_announced_a_while_before(kind, ranks):
    """Every chunk is announced before its first row is read: but for the first step, in an earlier step."""
    order = ORDERS[kind]()
    ours = plan(order)

    def chunks(ids):  # rows that any rank may read count as chunks of their own that nobody has to fetch
        if kind == "chunks":
            return set(chunk_of(ids).tolist())
        of_source, large = order.source_of(ids), ids[order.source_of(ids) == 0]
        small = np.searchsorted([ROWS, ROWS + 4, ROWS + 13, ROWS + 15, ROWS + 22], ids[of_source == 1], side="right")
        return {(0, c) for c in chunk_of(large).tolist()} | {(1, c) for c in small.tolist()}

    for rank in range(ranks):
        told, late, needed = set(), 0, set()
        for step in range(ours.steps):
            here = chunks(np.concatenate([turn.ids for turn in ours.step(step, rank, ranks).turns]))
            late += len(here - told) if step else 0
            needed |= here
            coming = ours.coming(ours.step(step, rank, ranks), step, rank, ranks)
            assert here <= chunks(coming)
            told |= chunks(coming)
        # Lanes are shared by other rules in the run's last steps, and a source's share may begin to grow.
        assert late <= 2
        assert told - needed <= set() if ranks == 1 else len(told - needed) <= 4


def test_an_idle_turn_repeats_rows_of_the_ranks_own_lane():
    ours = plan(by_chunks())
    step = ours.step(2, 2, 3)  # the sixth of five micro-batches
    mine, idle = step.turns
    assert not mine.idle and idle.idle and idle.weight == 0 and idle.ids.tolist() == mine.ids.tolist()


def test_fingerprints_tell_orders_apart():
    prints = {
        plan(order).fingerprint
        for order in (by_chunks(), ByChunks(SIZES, LANES, 4, 1), ByChunks(SIZES[::-1], LANES, 3, 1), mixed())
    }
    assert len(prints) == 4
    assert plan(by_chunks()).fingerprint == plan(by_chunks()).fingerprint
    assert BatchPlan(ROWS, ROWS, BATCH, MICRO).fingerprint not in prints


def test_sources_must_fit_the_mixture():
    with pytest.raises(ValueError, match="do not fit"):
        Mixed([SourceOrder("a", Shuffled(5, 0)), SourceOrder("b", by_chunks(5))], [Part(0, (1, 1))], 4)
    with pytest.raises(ValueError, match="do not fit"):
        Mixed([SourceOrder("a", Shuffled(5, 0))], [Part(0, (1, 1))], 4)


def test_a_mix_that_is_planned_ahead_begins_at_its_step_after_a_short_one():
    """A run of 55 samples in steps of 20, the last one of 15, is made longer by three steps."""
    sources = [SourceOrder("a", Shuffled(60, 0)), SourceOrder("b", Shuffled(60, 1))]
    planned = Mixed(sources, [Part(0, (1, 0)), Part(20, (3, 1)), Part(80, (1, 1)), Part(100, (0, 1))], 1)
    saved = Mixed(sources, [Part(0, (1, 0)), Part(20, (3, 1))], 1)
    order = planned.going_on(saved.parts, 55, short=5)
    assert [part.start for part in order.parts] == [0, 20, 75, 95]
    counts = [order.counts(seen)["b"] for seen in (20, 55, 75, 95, 115)]
    assert [after - before for before, after in itertools.pairwise(counts)] == [9, 5, 10, 20]
