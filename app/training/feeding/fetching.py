"""Stages that turn coming micro-batches into tensors, each in a thread of its own, while the step before trains.

Rows are fetched and collated where they always are: in loading processes, or in this thread, whose random generators
only it may seed. What `run.batches(fetch=...)` names comes after that, and the copy to the device is the last stage:

    rows, augment, collate  ->  first stage  ->  second stage  ->  copy  ->  step
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from typing import Any, NamedTuple

import torch

from app.sampling.batch_plan import Step
from app.training.feeding.copying import Copy

Stage = Callable[[Any], Any]
"""Takes what the stage before it made of one micro-batch; draws nothing from global generators."""
Fetch = Stage | Sequence[Stage]


class _Coming(NamedTuple):
    """A step on its way: a future for each turn; or what the step raises."""

    step: Step | None
    turns: list[Future]
    error: Exception | None = None


class Composed:
    """Collate rows and put the result through stages, without threads."""

    def __init__(self, collate: Callable[[list], Any], fetch: Fetch):
        """Put stages behind a function that collates rows."""
        self.collate, self.fetch = collate, stages_of(fetch)

    def at(self, step: int) -> "Composed":
        """Return the function for a training step, counted from 0."""
        return Composed(self.collate.at(step), self.fetch) if hasattr(self.collate, "at") else self

    def __call__(self, rows: list) -> Any:
        """Return the model inputs of a micro-batch's rows."""
        return reduce(lambda value, stage: stage(value), self.fetch, self.collate(rows))


def stages_of(fetch: Fetch) -> tuple[Stage, ...]:
    """Return one stage or several as a tuple."""
    return (fetch,) if callable(fetch) else tuple(fetch)


def ahead(steps: Iterator[Step], stages: Sequence[Stage], device: torch.device) -> Generator[Step, None, None]:
    """Yield steps whose inputs went through the stages and to the device, the coming ones ahead of need.

    At most as many micro-batches as there are stages are on their way beyond the step that is yielded, or one step, if
    that has more: a stage that is faster than training waits, and memory stays bounded. What a stage or the rows raise
    is raised where their step would be yielded. Closing the generator ends its threads, after what they are doing.
    """
    copy = Copy(device)
    stages = [*stages, copy] if device.type != "cpu" else stages
    pools = [ThreadPoolExecutor(1, thread_name_prefix=f"fetch-{number}") for number in range(len(stages))]
    coming: deque[_Coming] = deque()
    try:
        while True:
            while not coming or (coming[-1].step is not None and _beyond(coming) < len(stages)):
                coming.append(_begin(steps, stages, pools))
            if coming[0].step is None and coming[0].error is None:
                return
            yield _arrived(coming.popleft(), copy)  # nothing here holds its inputs while it trains
    finally:
        for pool in pools:  # in this order: what waits for an earlier stage hears that it is cancelled
            pool.shutdown(wait=True, cancel_futures=True)


def _arrived(coming: _Coming, copy: Copy) -> Step:
    """Wait for a step's inputs.

    Raises:
        Exception: what its rows or a stage have raised.
    """
    if coming.error is not None:
        raise coming.error
    assert coming.step is not None
    pairs = zip(coming.step.turns, coming.turns, strict=True)
    return coming.step._replace(turns=[turn._replace(inputs=copy.arrive(each.result())) for turn, each in pairs])


def _beyond(coming: deque[_Coming]) -> int:
    """Count the micro-batches on their way after the next step."""
    return sum(len(each.turns) for each in coming) - len(coming[0].turns)


def _begin(steps: Iterator[Step], stages: Sequence[Stage], pools: Sequence[ThreadPoolExecutor]) -> _Coming:
    """Take the next step, and put its turns on their way."""
    try:
        step = next(steps, None)
    except Exception as error:  # of rows that are read ahead: earlier steps come first
        return _Coming(None, [], error)
    turns = [] if step is None else [_through(turn.inputs, stages, pools) for turn in step.turns]
    return _Coming(step and step._replace(turns=[turn._replace(inputs=None) for turn in step.turns]), turns)


def _through(inputs: Any, stages: Sequence[Stage], pools: Sequence[ThreadPoolExecutor]) -> Future:
    """Put the inputs of a micro-batch through all stages; return what will hold the result.

    A pool works in order. So a stage waits for one micro-batch at a time, the one that is next for the stage before it.
    """
    result: Future = Future()
    result.set_result(inputs)
    for stage, pool in zip(stages, pools, strict=True):
        result = pool.submit(lambda stage, before: stage(before.result()), stage, result)
    return result
