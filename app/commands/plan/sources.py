"""What a run takes of each source of its data, and what machines fetch of those that are read by chunks."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from app.commands.plan.described import Chunks, Fetching, Source
from app.data.rows import Rows, Streamed
from app.data.streams.chunk_cache import UNLIMITED, ReadByChunks
from app.launching.profiles import Profile
from app.sampling.batch_plan import BatchPlan, ranks_by_machine
from app.sampling.orders import ByChunks, Mixed


class Read(NamedTuple):
    """A source that is read by chunks."""

    name: str
    """Empty for data that are no mixture."""
    order: ByChunks
    by_chunks: ReadByChunks


def read_by_chunks(data: Rows) -> "list[ReadByChunks | None]":
    """Say how each source of some data is read: None for one that is not read by chunks."""
    return data.read_by_chunks() if isinstance(data, Streamed) else [None]


def described(plan: BatchPlan, sources: "Sequence[ReadByChunks | None]") -> list[Source]:
    """Describe the sources of a mixture, or data that are read by chunks; of other data, nothing."""
    order = plan.order
    rows = [each.order.rows for each in order.sources] if isinstance(order, Mixed) else [order.rows]
    counts = order.counts(plan.total) or {"": plan.total}
    if sources == [None] and not isinstance(order, Mixed):
        return []
    return [
        Source(name, own_rows, samples, samples / own_rows, None if read is None else _chunks(plan, read))
        for (name, samples), own_rows, read in zip(counts.items(), rows, sources, strict=True)
    ]


def _chunks(plan: BatchPlan, read: ReadByChunks) -> Chunks:
    index, lanes = read.index, plan.order.lanes
    in_use = min(lanes * read.lane_window, len(index.rows))
    return Chunks(
        chunks=len(index.rows),
        stored=int(index.size.sum()),
        largest=int(index.size.max()),
        lanes=lanes,
        window=read.window,
        sort_over=read.sort_over,
        in_use=in_use,
        cache=read.limit if read.limit < UNLIMITED else None,
    )


def fetched(plan: BatchPlan, sources: "Sequence[ReadByChunks | None]", profile: Profile) -> list[Fetching]:
    """Say what the machine that fetches most has to fetch of each source that is read by chunks.

    Raises:
        UserError: a cache is too small for it; the run itself would refuse.
    """
    return [_fetched(plan, number, read, profile) for number, read in _read(plan, sources)]


def _read(plan: BatchPlan, sources: "Sequence[ReadByChunks | None]") -> Iterator[tuple[int, Read]]:
    order = plan.order
    for number, by_chunks in enumerate(sources):
        name, own = order.sources[number][:2] if isinstance(order, Mixed) else ("", order)
        if by_chunks is not None and isinstance(own, ByChunks):
            yield number, Read(name, own, by_chunks)


def _fetched(plan: BatchPlan, number: int, read: Read, profile: Profile) -> Fetching:
    stored = read.by_chunks.index.size
    here, split = profile.processes // profile.machines, profile.mesh("tp")
    machines = [plan.lanes_of(ranks, profile.data_ranks) for ranks in ranks_by_machine(profile.processes, here, split)]
    most = max(map(len, machines))
    read.by_chunks.check_room(most)
    holds_all = read.by_chunks.limit >= read.by_chunks.working_set(len(stored))
    an_epoch = []
    for lanes in machines:
        own = _own_lanes(plan, number, lanes)
        chunks = np.concatenate([read.order.chunks_of(lane, 0) for lane in own])
        # The chunk in which one lane ends and the next one begins is read twice, long apart.
        an_epoch.append(int(stored[np.unique(chunks) if holds_all else chunks].sum()))
    return Fetching(
        source=read.name,
        lanes=most,
        cache=int(read.by_chunks.working_set(most)),
        an_epoch=max(an_epoch),
        once=holds_all and profile.machines == 1,
    )


def _own_lanes(plan: BatchPlan, source: int, lanes: Sequence[int]) -> list[int]:
    """Return which lanes of a source are read for some lanes of the plan."""
    order = plan.order
    return [order.mixture.lane_in_source(source, lane) for lane in lanes] if isinstance(order, Mixed) else [*lanes]
