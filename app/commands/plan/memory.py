"""What one process holds all the time under each layout: weights, gradients, optimizer state.

Pure arithmetic over shapes. Activations, the memory that kernels need, and what exists only for an instant (such as a
layer that FSDP has gathered) are left out.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from app.commands.plan.meta_tensors import Cut
from app.distributed.state import base_model
from app.distributed.state.deduplicate import divide
from app.launching.profiles import Profile
from app.tasks.language import four_bits

LEFT_OUT = (
    "activations, gathered layers, 16-bit copies of weights (none under FSDP), buffers of communication, kernels' own "
    "space, the program itself (about 1 GB)"
)
_DOUBLE = 8
# Bytes that torch 2.13 writes for each tensor in addition to its contents: an archive's ends, and names in two lists.
_AROUND = 1900
# Bytes of the record, with settings and scores, and of the manifest.
_RECORDS = 5000


class Shape(NamedTuple):
    """A tensor's dimensions, and the bytes of one of its numbers."""

    dims: tuple[int, ...]
    itemsize: int
    whole: bool = False
    """Whether it is not cut where its parameter is."""

    @classmethod
    def of(cls, tensor: Tensor, whole: bool = False) -> "Shape":
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.element_size(), whole)

    def cut(self, dim: int, parts: int) -> "Shape":
        """Return the shape of one of several equal parts along a dimension."""
        return self._replace(dims=(*self.dims[:dim], self.dims[dim] // parts, *self.dims[dim + 1 :]))

    def follows(self, weight: "Shape") -> bool:
        """Tell whether this, which an optimizer keeps for a weight, is cut as that is: it has as many rows."""
        return bool(self.dims) and not self.whole and self.dims[:1] == weight.dims[:1]

    @property
    def numbers(self) -> int:
        """Count its numbers."""
        return math.prod(self.dims)

    def bytes(self, shards: int = 1) -> int:
        """Return the bytes on the process that holds most of `shards` parts; FSDP2 splits the first dimension."""
        if shards == 1 or not self.dims:
            return self.numbers * self.itemsize
        return -(-self.dims[0] // shards) * math.prod(self.dims[1:]) * self.itemsize


class Weight(NamedTuple):
    """A parameter, and the tensors that its optimizer keeps for it; None if those could not be found out."""

    shape: Shape
    trained: bool
    remembered: tuple[Shape, ...] | None = ()
    saved: bool = True
    """Whether checkpoints hold it."""
    parts: int = 1
    """How many tensor-parallel processes have a part of it each."""

    def cut(self, dim: int | None, parts: int) -> "Weight":
        """Return the part of it that one of several tensor-parallel processes holds; None: it is not cut."""
        if dim is None:
            return self
        tensors = self.remembered
        if tensors is not None:
            tensors = tuple(t.cut(dim, parts) if t.follows(self.shape) else t for t in tensors)
        return self._replace(shape=self.shape.cut(dim, parts), remembered=tensors, parts=parts)


class Memory(NamedTuple):
    """Bytes of one process; `copy` is in the host's memory, while a checkpoint is written during training."""

    weights: int
    gradients: int
    sums: int
    optimizer: int
    copy: int

    @property
    def total(self) -> int:
        """Return what training holds all the time."""
        return self.weights + self.gradients + self.sums + self.optimizer


def weigh(
    models: list[nn.Module], optimizers: list[torch.optim.Optimizer], averages: dict[Tensor, Tensor] | None = None
) -> tuple[list[Weight], int]:
    """List the parameters of models, each once, and count the bytes of their buffers.

    Args:
        averages: of parameters; counted with what the optimizer keeps for each.
    """
    shapes_by_parameter = {p: tensors for optimizer in optimizers for p, tensors in remembered(optimizer).items()}
    for parameter, average in (averages or {}).items():
        tensors = shapes_by_parameter.get(parameter, ())
        shapes_by_parameter[parameter] = None if tensors is None else (*tensors, Shape.of(average))
    parameters, elsewhere = {p: None for model in models for p in model.parameters()}, base_model.parameters(models)
    buffers = {b: b.nbytes for model in models for b in model.buffers()}
    weights = [
        Weight(Shape.of(p), p.requires_grad, shapes_by_parameter.get(p, ()), p not in elsewhere) for p in parameters
    ]
    return weights, sum(buffers.values())


def check_packed(models: list[nn.Module], profile: Profile) -> None:
    """Raise a UserError if weights are packed into 4 bits, and a profile does not support that."""
    if four_bits.unseen(models) is not None:
        split = profile.mesh("tp") > 1
        four_bits.check_layout(profile.is_fsdp, split, bool(profile.zero_stage), profile.compiled)


def of_one_process(weights: list[Weight], models: list[nn.Module], cut: Cut) -> list[Weight]:
    """Return the weights that one of several tensor-parallel processes holds.

    Args:
        weights: of the models, in the order of `weigh`.
        cut: the dimension along which weights are cut, and into how many parts.
    """
    parameters = {p: None for model in models for p in model.parameters()}
    return [weight.cut(*cut.get(p, (None, 1))) for weight, p in zip(weights, parameters, strict=True)]


def remembered(optimizer: torch.optim.Optimizer) -> dict[Tensor, tuple[Shape, ...] | None]:
    """Find out which tensors an optimizer will keep for each parameter, by a step of a copy on empty tensors.

    Every optimizer of torch.optim creates its state before it reads a number. Some fail then, as there are no numbers.
    """
    begin: Callable[[Tensor], dict[str, Tensor]] | None = getattr(optimizer, "begin", None)
    if begin is not None:  # one of ours, which says it
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        held_whole = getattr(optimizer, "held_whole", ())
        states = {p: begin(torch.empty_like(p, device="meta")) for p in parameters}
        return {p: tuple(Shape.of(v, name in held_whole) for name, v in s.items()) for p, s in states.items()}
    shapes_by_parameter = {}
    for group in optimizer.param_groups:
        hollow = [torch.empty_like(p, device="meta").requires_grad_() for p in group["params"]]
        for parameter in hollow:
            parameter.grad = torch.empty_like(parameter)
        twin = copy.copy(optimizer)
        twin.state = defaultdict(dict)
        kernels: dict[str, object] = {name: False for name in ("fused", "foreach") if name in group}
        twin.param_groups = [{**group, "params": hollow, **kernels}]
        whole = True
        try:
            twin.step()
        except Exception:  # an optimizer of the user's own may do anything
            whole = all(twin.state.get(parameter) for parameter in hollow)
        for parameter, double in zip(group["params"], hollow, strict=True):
            state = twin.state.get(double) or optimizer.state.get(parameter, {})
            shapes = tuple(Shape.of(value) for value in state.values() if isinstance(value, Tensor))
            shapes_by_parameter[parameter] = shapes if whole or shapes else None
    return shapes_by_parameter


def per_process(weights: list[Weight], buffers: int, profile: Profile, turns: int, exact: bool, beside: bool) -> Memory:
    """Count what one process of a layout holds, of all processes the one that holds most.

    Args:
        turns: how many each data rank takes in a step.
        beside: whether checkpoints are written while training goes on.
    """
    if profile.zero_stage:
        return _under_zero(weights, buffers, profile)
    shards = profile.shards
    held = buffers + sum(w.shape.bytes(shards) for w in weights)
    if shards > 1 and str(profile.section("fsdp_config").get("fsdp_reshard_after_forward", True)).lower() == "false":
        held += sum(w.shape.bytes() for w in weights)  # stay gathered until the end of the backward pass
    trained = [w for w in weights if w.trained]
    whole, part = (sum(w.shape.bytes(n) for w in trained) for n in (1, shards))
    gradients, sums = part, 0
    if shards > 1 and turns > 1:
        # Between two synchronisations FSDP2 sums whole gradients, in exact mode in float64.
        gradients = _doubles(trained) if exact else whole
    elif shards == 1:
        # DDP keeps its buckets. Gradients are views of them after a step's last turn, and separate tensors before.
        buckets = whole if profile.wrapping == "DDP" else 0
        beside_buckets = exact or turns > 1
        gradients = max(whole, buckets + whole * beside_buckets)
        sums = _doubles(trained) + _DOUBLE * len(trained) if exact else 0
    optimizer = sum(_remembered_bytes(w, shards) for w in weights)
    return Memory(held, gradients, sums, optimizer, _copied(weights, buffers, profile) * beside)


def _copied(weights: list[Weight], buffers: int, profile: Profile) -> int:
    """Count what one process copies to the host for a checkpoint; of what several hold alike, each copies a share."""
    pieces: dict[int, list[int]] = defaultdict(list)  # by how many processes hold them alike
    for weight in weights:
        held = [weight.shape] if weight.saved else []
        for shape in (*held, *(weight.remembered or ())):
            follows = shape.follows(weight.shape)
            shards = profile.shards if follows else 1
            alike = profile.processes // (shards * (weight.parts if follows else 1))
            pieces[max(1, alike)].append(shape.bytes(shards))
    everywhere = pieces[profile.processes]  # also if empty, for buffers
    return sum(max(divide(p, n, taken=buffers * (p is everywhere))[1]) for n, p in pieces.items())


def _under_zero(weights: list[Weight], buffers: int, profile: Profile) -> Memory:
    """Count by the rules of DeepSpeed: master weights and optimizer state are in float32, in equal parts.

    Stage 2 keeps whole weights and parts of gradients, stage 3 parts of both (Rajbhandari et al., *ZeRO*, 2020).
    """
    numbers = sum(w.shape.numbers for w in weights)
    trained = sum(w.shape.numbers for w in weights if w.trained)
    width, n = (4 if profile.precision == "fp32" else 2), profile.shards
    held = width * (numbers if profile.zero_stage < 3 else -(-numbers // n))
    gradients = width * (trained if profile.zero_stage < 2 else -(-trained // n))
    optimizer = sum(_remembered_bytes(w, 1) for w in weights)
    return Memory(held + buffers, gradients, 0, -(-(4 * trained + optimizer) // n), 0)


def _remembered_bytes(weight: Weight, shards: int) -> int:
    """Count the bytes of an optimizer's tensors; those with its rows are sharded as it is."""
    tensors = weight.remembered or ()
    return sum(t.bytes(shards if t.follows(weight.shape) else 1) for t in tensors)


def _doubles(weights: Iterable[Weight]) -> int:
    return _DOUBLE * sum(w.shape.numbers for w in weights)


def checkpoint(tensors: Iterable[Tensor], weights: list[Weight]) -> int:
    """Estimate the bytes of a checkpoint of one process or DDP; shards add some kilobytes for each tensor.

    Args:
        tensors: of the models, once for each name that they are saved under.
    """
    shapes = [Shape.of(t) for t in tensors]
    shapes += [t for w in weights for t in w.remembered or ()]
    return sum(t.bytes() + _AROUND for t in shapes) + _RECORDS
