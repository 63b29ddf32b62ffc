"""Which samples make a step, how they split into micro-batches, and which data rank computes which.

Everything here is a pure function of the step: there is no iterator state. A run that is made longer needs one more
number: by how many samples the last step of the shorter run was short.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from app.config import RunConfig
from app.errors import UserError
from app.sampling.cuts import equal_cost_cuts, even_cuts, even_start
from app.sampling.lanes import micro_batches
from app.sampling.orders import Order, Shuffled
from app.sampling.ramp import Ramp
from app.sampling.seeding import EVALUATION

# Lengths or weights to hash at a time.
DIGESTED = 1 << 16
# Turns of an evaluation whose rows are fetched ahead, if they must be fetched.
COMING = 8


class CountedWeights(Protocol):
    """The weights of samples of which there are too many to hold them all."""

    def fingerprint_of(self, samples: int, /) -> str:
        """Hash those of the first samples."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, samples: np.ndarray, /) -> np.ndarray: ...


Weights = np.ndarray | CountedWeights
"""The weights of all samples in the loss, by their numbers."""
Weigh = Callable[[Any], float]
"""Returns the weight of a sample in the loss, as it is read."""
Length = Callable[[Any], int]
"""Returns the length of a sample, as it is read."""


class Turn(NamedTuple):
    """One forward pass of one data rank: a micro-batch, or an idle turn, which repeats another's rows with weight 0.

    A micro-batch whose samples all have weight 0 is an idle turn too.
    """

    index: int  # type: ignore[assignment]  # it hides tuple.index, which nobody needs
    ids: np.ndarray
    epochs: np.ndarray
    weight: float
    idle: bool = False
    inputs: Any = None
    missing: int = 0
    """Samples that could not be read, and are left out; `ids` has the others."""
    sorted_as: tuple[int, int] | None = None
    """If it was sorted together with others: the number of this group in the step, and a hash of the order it has got.
    All ranks that read the group have to find the same one."""


class Step(NamedTuple):
    """One data rank's turns in one step; the numbers are of the whole global batch."""

    index: int  # type: ignore[assignment]  # as in Turn
    turns: list[Turn]
    micro_count: int
    weight: float
    missing: int = 0
    """Samples of the global batch that could not be read."""


NO_STEP = Step(index=-1, turns=[], micro_count=0, weight=0.0)
"""What there is before the first step: no micro-batches, and no weight."""


@dataclass(frozen=True)
class BatchPlan:
    """The steps of a run over `samples` samples.

    Args:
        samples: size of the data set.
        total: samples that the run sees; if it is no multiple of global_batch, the last step is short.
        lengths: one for each sample, if known: a step's samples are then sorted by length and cut into micro-batches
            of about equal padded size.
        weights: one for each sample, in the loss, such as its supervised tokens; default: all 1.
        short: samples missing from the steps made so far, compared with full steps: the last step of a run may be
            short, and the run may have been made longer after it.
        made: the number of steps made so far. The plan does not know which of them were short and assumes the last
            ones; only questions about those steps depend on this.
        ramp: the parts of a Ramp: sizes of the global batch in the first steps, at most `global_batch`.
        own_order: the order of the samples, with one lane, or with one for each micro-batch of a full step or for each
            `sort_over` of them, if the data have one of their own; default: each epoch has a permutation.
    """

    samples: int
    total: int
    global_batch: int
    micro_batch: int
    seed: int = 0
    lengths: np.ndarray | None = None
    weights: Weights | None = None
    short: int = 0
    made: int = 0
    ramp: tuple[tuple[int, int], ...] = ()
    own_order: Order | None = None

    @classmethod
    def of_run(
        cls,
        settings: RunConfig,
        samples: int,
        lengths: np.ndarray | None = None,
        weights: Weights | None = None,
    ) -> "BatchPlan":
        """Plan a run's steps from its settings.

        Raises:
            UserError: there is no sample, or no step.
        """
        if not samples:
            raise UserError("the training set is empty: there is nothing to train on")
        sizes = batch_sizes(settings)
        total = sizes.before(settings.steps) if settings.steps else round(settings.epochs * samples)
        if not total:
            raise UserError(f"--run.epochs {settings.epochs} of {samples} samples is less than one sample")
        batch, micro = settings.global_batch, settings.micro_batch
        return cls(samples, total, batch, micro, settings.seed, lengths, weights, ramp=sizes.parts)

    def going_on(self, settings: RunConfig, step: int, seen: int) -> "BatchPlan":
        """Plan what follows step `step`, after which `seen` samples were used."""
        short = self.sizes.before(step) - seen
        if not short:
            return self
        total = self.total - short if settings.steps else self.total
        return dataclasses.replace(self, total=total, short=short, made=step)

    def ordered(self, order: Order) -> "BatchPlan":
        """Plan the same steps over samples in another order."""
        return dataclasses.replace(self, own_order=order)

    def check_limit(self) -> None:
        """Refuse a run over sources that may give fewer samples than it sees."""
        limit = self.order.limit
        if limit is not None and limit < self.total:
            raise UserError(
                f"the run sees {self.total:,} samples, and its sources may give {limit:,} (their rows times their "
                "epochs): give fewer --run.steps or --run.epochs, or raise `epochs` in the mix"
            )

    def check_stop(self, settings: RunConfig) -> None:
        """Refuse a --run.stop-at that the run does not reach."""
        if settings.stop_at > self.steps:
            raise UserError(f"--run.stop-at {settings.stop_at}: the run has {self.steps} steps")

    @cached_property
    def sizes(self) -> Ramp:
        """Return the size of the global batch as a function of the step."""
        return Ramp(self.global_batch, self.ramp)

    @property
    def steps(self) -> int:
        """Count the steps of the run."""
        return self.sizes.steps(self.total + self.short)

    @property
    def micro_batches_per_step(self) -> int:
        """Count the micro-batches of a full step."""
        return -(-self.global_batch // self.micro_batch)

    def accumulation(self, ranks: int) -> int:
        """Count the turns of each of `ranks` data ranks in a full step.

        Raises:
            UserError: there are more ranks than micro-batches.
        """
        count, batch = self.micro_batches_per_step, self.global_batch
        if ranks > count:
            smaller = f"use --run.micro-batch {batch // ranks} or a larger --run.global-batch"
            raise UserError(
                f"{ranks} processes for {count} micro-batch{'es' * (count > 1)} (global batch {batch} = {count} x "
                f"{-(-batch // count)}): at most {count} can work; "
                + (smaller if batch >= ranks else f"use --run.global-batch {ranks} or more")
            )
        return -(-self.micro_batches_per_step // ranks)

    def idle(self, ranks: int) -> float:
        """Return the share of idle turns among all turns of `ranks` data ranks in a full step.

        Raises:
            UserError: there are more ranks than micro-batches.
        """
        return 1 - self.micro_batches_per_step / (ranks * self.accumulation(ranks))

    def idle_until(self, ranks: int) -> int:
        """Return the step until which some of `ranks` data ranks have no micro-batch, because the ramp is low."""
        return max((end for end, size in self.ramp if -(-size // self.micro_batch) < ranks), default=0)

    @property
    def rows(self) -> str:
        """Return the samples of a full step's micro-batch as text: `16`, or `10-11` if they differ."""
        small, more = divmod(self.global_batch, self.micro_batches_per_step)
        return f"{small}-{small + 1}" if more else str(small)

    @cached_property
    def order(self) -> Order:
        """Return the order of the samples."""
        return self.own_order or Shuffled(self.samples, self.seed)

    @cached_property
    def fingerprint(self) -> str:
        """Hash what the plan knows of the data: the number of samples, their lengths, weights and own order."""
        return self.fingerprint_of(self.samples, "" if self.own_order is None else self.own_order.fingerprint)

    def fingerprint_of(self, samples: int, order: str) -> str:
        """Hash what the plan knows of its first samples, whose own order has the fingerprint `order`."""
        digest = hashlib.blake2b(str(samples).encode(), digest_size=8)
        for numbers in (self.lengths, self.weights):
            if not isinstance(numbers, np.ndarray):
                digest.update(b"|" if numbers is None else numbers.fingerprint_of(samples).encode())
                continue
            for start in range(0, samples, DIGESTED):  # by pieces, so that no copy of the whole is made
                piece = numbers[start : min(start + DIGESTED, samples)]
                digest.update(np.ascontiguousarray(piece, dtype="<f8").data)
        digest.update(order.encode())
        return digest.hexdigest()

    def seen(self, step: int) -> int:
        """Count the samples used before step `step`, counted from 0."""
        seen = min(self.sizes.before(max(step, self.made)) - self.short, self.total)
        # For a step before `made`: each step from it to `made` used at least one sample.
        return seen if step >= self.made else min(self.sizes.before(step), seen - (self.made - step))

    def epoch_ends(self, step: int) -> bool:
        """Tell whether an epoch ends in step `step`, counted from 0."""
        return self.seen(step + 1) // self.samples > self.seen(step) // self.samples

    def micro_batches(self, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Cut a step into micro-batches: for each, the sample ids [rows] and their epochs [rows], int64."""
        if self.order.lanes > 1:
            return [self.order.locate(numbers) for numbers in self._by_lanes(step)]
        ids, epochs = self.order.stretch(self.seen(step), self.seen(step + 1))
        pieces = -(-len(ids) // self.micro_batch)
        if self.lengths is None:
            cuts: Sequence[int] | np.ndarray = even_cuts(len(ids), pieces)
        else:
            lengths = self.lengths[ids]
            by_length = np.argsort(-lengths, kind="stable")
            ids, epochs = ids[by_length], epochs[by_length]
            cuts = equal_cost_cuts(lengths[by_length], pieces)
        return list(zip(np.split(ids, cuts), np.split(epochs, cuts), strict=True))

    def step(self, step: int, rank: int, ranks: int) -> Step:
        """Return the turns of data rank `rank` of `ranks` in a step."""
        if self.order.lanes > 1 and self.weights is None:
            numbers = self._by_lanes(step)  # other ranks' samples are not looked for
            weights = [float(len(each)) for each in numbers]
            return self._dealt(step, weights, lambda index: self.order.locate(numbers[index]), rank, ranks)
        cuts = self.micro_batches(step)
        weights = [float(len(ids) if self.weights is None else self.weights[ids].sum()) for ids, _ in cuts]
        return self._dealt(step, weights, cuts.__getitem__, rank, ranks)

    def _dealt(
        self,
        step: int,
        weights: list[float],
        located: Callable[[int], tuple[np.ndarray, np.ndarray]],
        rank: int,
        ranks: int,
    ) -> Step:
        """Deal micro-batches, which have these weights, to ranks; `located` returns the ids and epochs of one."""
        turns = -(-len(weights) // ranks)
        ours = [index for index in range(rank * turns, (rank + 1) * turns) if index < len(weights) and weights[index]]
        # What an idle turn repeats: all rows of the micro-batch with the largest weight. On one row, BatchNorm or a
        # loss over the batch may fail or give NaN; on rows without weight, so may any loss. And weight 0 times NaN is
        # NaN. Where rows are read by chunks, it is one of this rank's, if it has any.
        near = ours if self.order.lanes > 1 and ours else range(len(weights))
        repeated = max(near, key=weights.__getitem__)
        turns_here = []
        for index in range(rank * turns, (rank + 1) * turns):
            if index in ours:
                turns_here.append(Turn(index, *located(index), weights[index]))
            else:
                turns_here.append(Turn(index, *located(repeated), 0.0, idle=True))
        return Step(step, turns_here, len(weights), sum(weights))

    def coming(self, step: Step, index: int, rank: int, ranks: int) -> np.ndarray:
        """Return ids of samples, int64: those of a rank's turns in a step, and others that are near what comes next.

        An order by chunks names one sample of each chunk; any other one names none besides the step's own.

        Args:
            step: what `step` returns for `index`, `rank` and `ranks`.
        """
        if self.order.lanes > 1:
            numbers = self._by_lanes(index)
            dealt = [turn.index for turn in step.turns if not turn.idle]
            read = {number for micro in dealt for number in self.sorted_with(micro, len(numbers))}
            own = [numbers[number] for number in sorted(read)]
        else:
            own = [np.arange(self.seen(index), self.seen(index + 1))]
        following = self.order.coming(np.concatenate(own), self.total) if own else np.zeros(0, np.int64)
        return np.concatenate([*(turn.ids for turn in step.turns), following])

    def sorted_with(self, index: int, count: int) -> range:
        """Return the micro-batches, of `count`, that one is sorted with when their rows are read, and itself."""
        first = index - index % self.order.sort_over
        return range(first, min(first + self.order.sort_over, count))

    def lanes_of(self, ranks: Iterable[int], data_ranks: int) -> list[int]:
        """Return the lanes that some of the data ranks read in full steps."""
        turns, order = self.accumulation(data_ranks), self.order
        computed = [index for rank in ranks for index in range(rank * turns, (rank + 1) * turns)]
        lanes = dict.fromkeys(index // order.sort_over for index in computed)
        return [lane for lane in lanes if lane < order.lanes]

    def located(self, step: int, micro_batches: range) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the sample ids and the epochs of some micro-batches of a step, as `micro_batches` of all."""
        if self.order.lanes == 1:
            return self.micro_batches(step)[micro_batches.start : micro_batches.stop]
        numbers = self._by_lanes(step)
        return [self.order.locate(numbers[index]) for index in micro_batches]

    def _by_lanes(self, step: int) -> list[np.ndarray]:
        """Return the samples of each micro-batch of a step, if the order has lanes."""
        order = self.order
        return micro_batches(self.seen(step), self.seen(step + 1), order.lanes, self.micro_batch, order.sort_over)


def ranks_by_machine(processes: int, here: int, together: int) -> list[list[int]]:
    """Return the data ranks of each machine's processes.

    Args:
        processes: of all machines.
        here: of each machine.
        together: how many see the same samples, which are neighbours.
    """
    machines = (range(first, min(first + here, processes)) for first in range(0, processes, here))
    return [list(dict.fromkeys(process // together for process in machine)) for machine in machines]


def batch_sizes(settings: RunConfig) -> Ramp:
    """Return the size of a run's global batch as a function of the step.

    Raises:
        UserError: --run.batch-ramp is no ramp up to --run.global-batch.
    """
    return Ramp.parse(settings.batch_ramp, settings.global_batch, "--run.batch-ramp", "--run.global-batch", "samples")


@dataclass(frozen=True)
class EvaluationPlan:
    """Each sample once, in micro-batches that do not depend on the number of ranks. A "step" is one turn.

    Every step has the index EVALUATION: the number of a turn would depend on the number of ranks.
    """

    samples: int
    micro_batch: int
    lengths: np.ndarray | None = None
    weights: Weights | None = None
    seed: int = 0

    def steps(self, ranks: int) -> int:
        """Count the turns of each of `ranks` data ranks."""
        return -(-self._count // ranks)

    @property
    def _count(self) -> int:
        return -(-self.samples // self.micro_batch)

    @cached_property
    def _by_length(self) -> np.ndarray:
        assert self.lengths is not None  # asked for only where they are known
        return np.argsort(-self.lengths, kind="stable")

    def step(self, step: int, rank: int, ranks: int) -> Step:
        """Return what data rank `rank` of `ranks` evaluates in one turn."""
        index = rank * self.steps(ranks) + step
        idle = index >= self._count
        taken = self._count - 1 if idle else index  # the last one has the shortest rows
        start, end = (even_start(self.samples, self._count, piece) for piece in (taken, taken + 1))
        ids = np.arange(start, end) if self.lengths is None else self._by_length[start:end]
        weight = float(len(ids) if self.weights is None else self.weights[ids].sum())
        turn = Turn(index, ids, np.zeros_like(ids), 0.0 if idle else weight, idle)
        return Step(EVALUATION, [turn], 1, turn.weight)

    def coming(self, step: Step, index: int, rank: int, ranks: int) -> np.ndarray:
        """Return the ids of a rank's samples in a turn and in those that come next, int64; as of BatchPlan."""
        following = range(index + 1, min(index + COMING, self.steps(ranks)))
        turns = [*step.turns, *(self.step(turn, rank, ranks).turns[0] for turn in following)]
        return np.concatenate([turn.ids for turn in turns])
