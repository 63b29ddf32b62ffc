"""Loading: fetch and collate each step's rows, and copy them to the device ahead of need."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from app.data.rows import MISSING, Fetched, Rows, read_rows
from app.distributed.helper_processes import leave_to_parent, starting_helpers
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan, EvaluationPlan, Length, Step, Turn, Weigh
from app.sampling.seeding import EVALUATION, sample_generator, seed_all
from app.training.feeding.copying import on_cuda, to_device
from app.training.feeding.fetching import Fetch, ahead, stages_of

Collate = Callable[[list], Any]  # model inputs of a micro-batch's rows
Augment = Callable[[Any, np.random.Generator], Any]  # one row, changed
HASHES = 1 << 20  # of orders: few enough that sums of their squares over any number of ranks are exact


class _Steps(Dataset):
    """A data set whose items are steps, by their numbers or as planned, so that a DataLoader can start at any step."""

    def __init__(
        self,
        plan: BatchPlan | EvaluationPlan,
        data: Rows,
        collate: Collate,
        augment: Augment | None,
        rank: int,
        ranks: int,
        weigh: Weigh | None,
        length: Length | None,
    ):
        self.plan, self.data, self.collate, self.augment = plan, data, collate, augment
        self.rank, self.ranks, self.weigh, self.length = rank, ranks, weigh, length
        self._spare: Any = None  # inputs of a micro-batch that could be read, for turns that count nothing

    def __getitem__(self, index: int | Step) -> Step | UserError:
        step = self.plan.step(index, self.rank, self.ranks) if isinstance(index, int) else index
        try:
            rows: list[list[Any] | None] = [None] * len(step.turns)
            if self.length is not None and isinstance(self.plan, BatchPlan):
                step, rows = self._sorted(step, self.plan, self.length)
            if self.weigh is not None:
                return self._weighed(step, rows, self.weigh)
            each = zip(step.turns, rows, strict=True)
            return step._replace(turns=[turn._replace(inputs=self._inputs(step, turn, own)) for turn, own in each])
        except UserError as error:  # if raised in a worker, torch would put its message inside a traceback
            return error

    def _inputs(self, step: Step, turn: Turn, rows: list[Any] | None) -> Any:
        """Make the inputs of a turn of its rows, which are read if that was not done before."""
        return self._collated(step, *self._there(step, turn, rows))

    def _there(self, step: Step, turn: Turn, rows: list[Any] | None) -> tuple[list[Any], list[int], list[int]]:
        """Return the rows of a turn that are not MISSING, their ids and epochs; without `rows`, they are read."""
        self._seed(step, turn.index)
        ids, epochs = turn.ids.tolist(), turn.epochs.tolist()
        return readable(read_rows(self.data, ids) if rows is None else rows, ids, epochs)

    def _collated(self, step: Step, rows: list[Any], ids: list[int], epochs: list[int]) -> Any:
        collate = collate_of(self.collate, step.index)
        return collate(augmented(rows, self.augment, ids, epochs, self.plan.seed))

    def _seed(self, step: Step, micro_batch: int) -> None:
        # Rows and collate functions may draw from the global generators: what they draw depends on the plan alone.
        seed_all(self.plan.seed, step.index, micro_batch, -1)

    def _sorted(self, step: Step, plan: BatchPlan, length: Length) -> tuple[Step, list[list[Any] | None]]:
        """Sort the micro-batches that share a lane by length, longest rows first, each as large as it was.

        A rank reads the rows of all that are sorted together, also of those that others compute.

        Returns:
            The step with the samples that each turn then has, and the rows of each turn; None for an idle one.
        """
        turns: list[Turn] = []
        rows: list[list[Any] | None] = []
        together, group = range(0), (0, 0)
        for turn in step.turns:
            if turn.idle:
                turns.append(turn)
                rows.append(None)
                continue
            if turn.index not in together:
                together = plan.sorted_with(turn.index, step.micro_count)
                located = plan.located(step.index, together)
                ids, epochs = (np.concatenate(parts) for parts in zip(*located, strict=True))
                self._seed(step, together.start)
                read = read_rows(self.data, ids.tolist())
                lengths = np.array([-1 if row is MISSING else length(row) for row in read])
                by_length = np.argsort(-lengths, kind="stable")
                pieces = np.split(by_length, np.cumsum([len(own) for own, _ in located])[:-1])
                group = (
                    together.start // plan.order.sort_over,
                    zlib.crc32(by_length.tobytes() + lengths.tobytes()) % HASHES,
                )
            places = pieces[turn.index - together.start]
            turns.append(turn._replace(ids=ids[places], epochs=epochs[places], sorted_as=group))
            rows.append([read[place] for place in places])
        return step._replace(turns=turns), rows

    def _weighed(self, step: Step, rows: Sequence[list[Any] | None], weigh: Weigh) -> Step:
        """Return this rank's part of a step with the weights of what was read; what counts nothing repeats other rows.

        Args:
            rows: of each turn, if they were read before.

        Raises:
            UserError: nothing was read yet that could be repeated.
        """
        turns = [self._read(step, turn, weigh, own) for turn, own in zip(step.turns, rows, strict=True)]
        best = max(turns, key=lambda turn: turn.weight)
        if best.weight:
            self._spare = best.inputs
        elif self._spare is None:
            self._spare = self._any_inputs(step, weigh)
        kept = [turn if turn.weight and not turn.idle else turn._replace(inputs=self._spare) for turn in turns]
        return step._replace(turns=kept)

    def _any_inputs(self, step: Step, weigh: Weigh) -> Any:
        """Return the inputs of some micro-batch: of the step, or else of another one, which it does not count in.

        Raises:
            UserError: none can be read.
        """
        for ids, epochs in self._near(step):
            read = self._read(step, Turn(0, ids, epochs, 0.0), weigh, None)
            if read.weight:
                return read.inputs
        raise UserError(f"step {step.index + 1}: none of its samples can be read, or all weigh 0: see to the data")

    def _near(self, step: Step) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids and epochs of micro-batches: this rank's, others of the step, and some of other steps, near first.

        Ever fewer, as a damaged chunk may be all that is read for many steps.
        """
        yield from ((turn.ids, turn.epochs) for turn in step.turns)
        if isinstance(self.plan, EvaluationPlan):
            return
        yield from self.plan.micro_batches(step.index)
        for power in range(self.plan.steps.bit_length()):
            for other in (step.index + 2**power, step.index - 2**power):
                if 0 <= other < self.plan.steps:
                    yield from self.plan.micro_batches(other)

    def _read(self, step: Step, turn: Turn, weigh: Weigh, rows: list[Any] | None) -> Turn:
        """Read what can be read of a turn's samples; or take its `rows`, if they were read before."""
        if turn.idle:
            return turn
        there, ids, epochs = self._there(step, turn, rows)
        missing = len(turn.ids) - len(there)
        turn = turn._replace(ids=np.array(ids, np.int64), epochs=np.array(epochs, np.int64), missing=missing)
        if not there:
            return turn._replace(weight=0.0, idle=True)
        weight = float(sum(map(weigh, there)))
        return turn._replace(weight=weight, idle=not weight, inputs=self._collated(step, there, ids, epochs))


def collate_of(collate: Collate, step: int) -> Collate:
    """Return what collates the rows of a step, counted from 0, or of an evaluation (EVALUATION)."""
    return collate.at(step) if step != EVALUATION and hasattr(collate, "at") else collate


def inputs_of(
    data: Rows, collate: Collate, augment: Augment | None, ids: list[int], epochs: list[int], seed: int
) -> Any:
    """Fetch rows, augment each with its own random generator if `augment` is given, and collate them.

    If `augment` has a method `many`, that changes all rows at once: `augment.many(rows, seed, epochs, ids)`.
    """
    rows, ids, epochs = readable(read_rows(data, ids), ids, epochs)
    return collate(augmented(rows, augment, ids, epochs, seed))


def readable(rows: list[Any], ids: list[int], epochs: list[int]) -> tuple[list[Any], list[int], list[int]]:
    """Leave out the rows that are MISSING, with their ids and epochs."""
    if any(row is MISSING for row in rows):
        there = [place for place, row in enumerate(rows) if row is not MISSING]
        rows, ids, epochs = ([values[place] for place in there] for values in (rows, ids, epochs))
    return rows, ids, epochs


def augmented(rows: list[Any], augment: Augment | None, ids: list[int], epochs: list[int], seed: int) -> list[Any]:
    """Change rows as `augment` does, if there is one."""
    if augment is None:
        return rows
    if hasattr(augment, "many"):
        return augment.many(rows, seed, epochs, ids)
    keys = zip(rows, epochs, ids, strict=True)
    return [augment(row, sample_generator(seed, epoch, i)) for row, epoch, i in keys]


def load(
    plan: BatchPlan | EvaluationPlan,
    steps: range,
    data: Rows,
    collate: Collate,
    rank: int,
    ranks: int,
    device: torch.device,
    workers: int = 0,
    augment: Augment | None = None,
    fetch: Fetch = (),
    weigh: Weigh | None = None,
    length: Length | None = None,
) -> Iterator[Step]:
    """Yield data rank `rank`'s part of each step, loaded and copied to the device ahead of need.

    Args:
        steps: indices of the steps, counted from 0.
        data: rows by sample id; if it has `__getitems__`, that is called with a list of ids.
        collate: makes model inputs (nested dicts and lists of tensors) from a micro-batch's rows. If it has a method
            `at`, that returns the function for a training step, counted from 0.
        workers: loader processes; 0: this process loads.
        augment: changes one row; its random generator is seeded by (seed, epoch, sample). See `inputs_of`.
        fetch: stages after collate, each in a thread of its own; see `fetching.ahead`.
        weigh: the weight of a row as it is read; the steps then have the weights of this rank's turns alone.
        length: that of a row as it is read: micro-batches that share a lane of `plan` are sorted by it together.
    """
    steps_of_rank, stages = _Steps(plan, data, collate, augment, rank, ranks, weigh, length), stages_of(fetch)
    numbers: Iterable[int | Step] = _announced(steps, plan, data, rank, ranks) if isinstance(data, Fetched) else steps
    if device.type == "cpu" and not workers:  # here a DataLoader would add nothing but overhead
        plain = map(_or_raise, map(steps_of_rank.__getitem__, numbers))
        return ahead(plain, stages, device) if stages else plain
    loader = DataLoader(
        steps_of_rank,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=device.type == "cuda" and not stages,
        in_order=True,
        generator=torch.Generator(),
        prefetch_factor=2 if workers else None,
        worker_init_fn=_begin_worker,
    )
    with starting_helpers():
        loaded = map(_or_raise, loader)
    if stages:
        return ahead(loaded, stages, device)
    return on_cuda(loaded, device) if device.type == "cuda" else (to_device(step, device) for step in loaded)


def _announced(steps: range, plan: BatchPlan | EvaluationPlan, data: Fetched, rank: int, ranks: int) -> Iterator[Step]:
    """Yield the steps, each when its rows are being fetched. This runs in the rank's process, also with workers."""
    for index in steps:
        step = plan.step(index, rank, ranks)  # once: for a mixture it takes as long as reading the rows may
        data.prepare(plan.coming(step, index, rank, ranks))
        yield step


def _begin_worker(number: int) -> None:
    leave_to_parent()


def _or_raise(step: Step | UserError) -> Step:
    if isinstance(step, UserError):
        raise step
    return step


def _as_it_is(step: Any) -> Any:
    """Return the step unchanged: torch's default would turn numpy arrays and numbers into tensors."""
    return step
