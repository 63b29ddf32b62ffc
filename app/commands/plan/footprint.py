"""The memory of one process at the peak of a step, found by a step of the recipe's own loop on empty tensors.

The body of the loop runs as it is: forward passes, losses, backward passes and updates. Weights, optimizer state and
the inputs of one real micro-batch are on the meta device, so they have no contents (simulated_device.py). Every storage
is followed from its first tensor to its last (live_storage.py). So everything counts: what is saved for the backward
pass, the copies that autocast makes, logits, and what exists only for an instant between two operations.
"""

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from app.commands.plan.live_storage import LiveStorages
from app.commands.plan.meta_tensors import emptied, part
from app.commands.plan.pretended_split import cuts_of, split_over
from app.commands.plan.simulated_device import SimulatedDevice
from app.commands.plan.writing_nothing import writing_nothing
from app.distributed.accelerator import Accelerator
from app.sampling.batch_plan import BatchPlan, Step, Turn
from app.training.feeding.copying import map_tensors
from app.training.feeding.fetching import Composed
from app.training.feeding.loader import inputs_of
from app.training.loop.gradients import Gradients
from app.training.loop.step import Batch, CurrentStep
from app.training.loop.step_metrics import StepMetrics

LOOKED_AT = 100  # steps among which the largest micro-batch is searched
_ROWS = 16  # rows that are really read; further rows are taken to be as large
_BLOCK = 512  # bytes; CUDA's caching allocator rounds up to multiples
FIRST, LATER, UPDATE = "first", "later", "update"


class MicroBatch(NamedTuple):
    """A micro-batch: its samples, its number of rows, and the length of the longest row if lengths are known."""

    ids: np.ndarray
    epochs: np.ndarray
    rows: int
    longest: int | None


class Question(NamedTuple):
    """What a footprint is asked for: a type of device, a precision, --run.micro-batch, and the size of layers' groups.

    Args:
        parts: how many tensor-parallel processes compute each layer.
    """

    device: str
    precision: str
    micro_batch: int
    parts: int = 1


class Footprint(NamedTuple):
    """Bytes of a process that trains alone.

    Args:
        held: weights, buffers and optimizer state.
        gradients: of all trained parameters.
        inputs: of one micro-batch; the other numbers do not contain them.
        first: the peak of the first turn of a step, which creates the gradients.
        later: the peak of any later turn, which finds gradients from the turns before.
        uncast: the peak of a later turn, without the 16-bit copies of weights.
        update: the peak while clipping and updating.
    """

    micro: MicroBatch
    held: int
    gradients: int
    inputs: int
    first: int
    later: int
    uncast: int
    update: int


Questions = Generator[Question, Footprint, None]


def largest(plan: BatchPlan) -> MicroBatch:
    """Return the micro-batch with the most rows x length among those of about LOOKED_AT steps, spread over the run."""
    if plan.lengths is None:
        steps = [0]
    else:
        steps = np.unique(np.linspace(0, plan.steps - 1, min(plan.steps, LOOKED_AT)).astype(int)).tolist()
    costliest, most = MicroBatch(np.zeros(0, int), np.zeros(0, int), 0, None), (-1, -1)
    for step in steps:
        for ids, epochs in plan.micro_batches(step):
            longest = None if plan.lengths is None else int(plan.lengths[ids].max())
            cost = (len(ids) * (longest or 1), longest or 1)
            if cost > most:
                costliest, most = MicroBatch(ids, epochs, len(ids), longest), cost
    return costliest


def batches(
    asking: Questions, run: Any, plan: BatchPlan, data: Any, collate: Any, augment: Any
) -> Generator[Batch, None, None]:
    """Yield batches to the body of a recipe's loop, to answer questions about its memory.

    Args:
        asking: yields a Question, is sent the Footprint that answers it, and so on until it ends.
    """
    inputs: dict[int, tuple[MicroBatch, Any]] = {}
    try:
        question = next(asking)
        while True:
            if question.micro_batch not in inputs:
                micro = largest(dataclasses.replace(plan, micro_batch=question.micro_batch))
                inputs[question.micro_batch] = micro, _hollow_inputs(micro, plan, data, collate, augment)
            micro, values = inputs[question.micro_batch]
            counts: dict[str, Any] = {}
            yield from _one_step(run, question, micro, values, counts)
            question = asking.send(Footprint(micro=micro, **counts))
    except StopIteration:
        return


def _one_step(run: Any, question: Question, micro: MicroBatch, inputs: Any, counts: dict[str, Any]) -> Iterator[Batch]:
    """Run the body of the loop once, with two turns."""
    storages = LiveStorages(_BLOCK if question.device == "cuda" else 1)
    simulated = SimulatedDevice(question.device, question.precision, storages)
    models = run.accelerator.models
    optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer, _ in run.optimizers.known]
    cut, split = cuts_of(models, question.parts, run.config.slices), run.accelerator.split
    with (
        split_over(models, question.parts, split),
        emptied(models, optimizers, cut),
        simulated.installed(),
        simulated.casting(models),
        _on_meta(run.accelerator),
    ):
        averages = [part(average, cut.get(p)) for p, average in run.accelerator.averages.items()]
        held = [*averages, *(t for model in models for t in (*model.parameters(), *model.buffers()))]
        trained = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        storages.add(held)
        with ExitStack() as stack, storages:
            for optimizer in optimizers:
                _remember(optimizer, question.device, stack)
            counts["held"] = storages.alive
            storages.most.clear()
            turns = [Turn(i, micro.ids, micro.epochs, float(micro.rows), inputs=inputs) for i in range(2)]
            step = Step(0, turns, 2, 2.0 * micro.rows)
            batch = _Phased(Gradients(run.accelerator, run.config.seed), step, storages)
            current = CurrentStep(1, StepMetrics(run.accelerator, step), batch)
            with run.trial.trying(current), writing_nothing():
                yield batch
    input_bytes: list[int] = []
    map_tensors(lambda t: input_bytes.append(t.nbytes), inputs)
    most = storages.most
    counts["gradients"] = sum(storages.rounded(p.nbytes) for p in dict.fromkeys(trained))
    counts |= {"inputs": sum(input_bytes), "first": most[FIRST], "later": most[LATER], "update": most[UPDATE]}
    counts["uncast"] = storages.most_without[LATER]


class _Phased(Batch):
    """A batch that tells the storages in which phase of the step they are."""

    def __init__(self, gradients: Gradients, step: Step, storages: LiveStorages):
        super().__init__(gradients, step)
        self._storages = storages

    def micros(self, *models: nn.Module, frozen: Sequence[nn.Module] = ()) -> Iterator[Turn]:
        for position, turn in enumerate(super().micros(*models, frozen=frozen)):
            self._storages.phase = LATER if position else FIRST
            yield turn
        self._storages.phase = UPDATE


@contextmanager
def _on_meta(accelerator: Accelerator) -> Iterator[None]:
    """Have an accelerator name the device of tensors without contents as its own."""
    state = accelerator.state
    device, state.device = state.device, torch.device("meta")
    try:
        yield
    finally:
        state.device = device


def _remember(optimizer: torch.optim.Optimizer, device: str, stack: ExitStack) -> None:
    """Have an optimizer create its state, and later updates create the temporary tensors that they need on a device."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        kernels = {name: group[name] for name in ("fused", "foreach") if name in group}
        stack.callback(partial(group.update, kernels))
        if fused:
            group["fused"] = False
        elif device == "cuda" and kernels.get("foreach", False) is None:
            group["foreach"] = True  # as torch chooses for tensors on a GPU
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if fused:  # one kernel that creates no tensors, and that does not exist for meta tensors
        optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]  # only of this one
        stack.callback(optimizer.__dict__.pop, "step")


def _hollow_inputs(micro: MicroBatch, plan: BatchPlan, data: Any, collate: Any, augment: Any) -> Any:
    """Make the inputs of a micro-batch without contents, as large as its longest rows make them."""
    taken = np.arange(micro.rows)
    if plan.lengths is not None:
        taken = np.argsort(-plan.lengths[micro.ids], kind="stable")
    whole = isinstance(collate, Composed)  # stages read what rows refer to, which may be of any size
    taken = taken if whole else taken[:_ROWS]
    read = inputs_of(data, collate, augment, micro.ids[taken].tolist(), micro.epochs[taken].tolist(), plan.seed)

    def hollow(tensor: Tensor) -> Tensor:
        rows = micro.rows if tensor.ndim and len(tensor) == len(taken) else tensor.shape[:1].numel()
        return torch.empty((rows, *tensor.shape[1:]) if tensor.ndim else (), dtype=tensor.dtype, device="meta")

    return map_tensors(hollow, read)
