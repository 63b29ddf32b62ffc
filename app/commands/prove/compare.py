"""Whether two runs took the same steps: compares what they have written down, step by step."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from app.commands.prove.difference import ROUNDED, TENSORS, Difference
from app.commands.prove.trace import Trace


class Tolerances(NamedTuple):
    """Largest relative deviations. 0: every bit must agree, as samples, inputs and learning rate always must.

    Tensors are not measured by their own size: the gradient of some is rounding alone (a key's bias in attention, a
    bias in front of a norm), and AdamW makes steps of full size of it.

    Args:
        gradient: of the gradient norm; for a tensor's gradient, its distance relative to the whole gradient's norm.
        weights: for a parameter, its distance relative to the distance that the whole model has moved since the start;
            for a buffer, relative to its own norm.
        quiet: a tensor whose gradient in the reference was smaller than this part of the whole need not keep `weights`.
    """

    loss: float = 0.0
    gradient: float = 0.0
    weights: float = 0.0
    quiet: float = 0.0


EXACT = Tolerances()
# Law 3 for the loss. Healthy layouts of recipes/cls.py were apart by 3e-6, 5e-5 and 2e-5 after 100 steps.
ORDINARY = Tolerances(loss=1e-5, gradient=1e-3, weights=1e-3, quiet=1e-4)
# The least distance moved to measure by, relative to the norm of the weights: float32 rounds them by 2**-24 of it.
LEAST_MOVED = 2**-24 / ORDINARY.weights


class Growth(NamedTuple):
    """How a relative deviation has grown, from the first step that has one to the step with the largest."""

    begin: int
    first: float
    end: int
    largest: float

    @property
    def rate(self) -> float:
        """Return the factor by which it has grown in each step."""
        return (self.largest / self.first) ** (1 / (self.end - self.begin))

    def __str__(self) -> str:
        way = f"{self.first:.1e} in step {self.begin}, {self.largest:.1e} in step {self.end}"
        return f"{way}, {self.rate:.2g}-fold a step"


@dataclass
class Comparison:
    """How a run compares with the reference.

    Args:
        steps: how many steps both have made.
        first: the difference nearest to the cause, in the first step that has one.
        tensor: the first difference that names tensors.
        deviations: by quantity, the relative deviation of each step in order.
    """

    steps: int
    first: Difference | None = None
    tensor: Difference | None = None
    deviations: dict[str, list[float]] = field(default_factory=dict)

    def growth(self, what: str) -> Growth | None:
        """Return how a quantity's deviation has grown; None if it has not."""
        there = [(step, size) for step, size in enumerate(self.deviations.get(what, []), 1) if 0 < size < math.inf]
        if not there:
            return None
        (begin, first), (end, largest) = there[0], max(there, key=lambda pair: pair[1])
        return Growth(begin, first, end, largest) if end > begin else None

    @property
    def may_be_rounding(self) -> bool:
        """Tell whether the first step agreed and what differs later can differ by rounding."""
        return self.first is not None and self.first.step > 1 and self.first.what in ROUNDED


def compare(reference: Trace, other: Trace, tolerances: Tolerances) -> Comparison:
    """Compare two runs, over the steps that both have made."""
    common = sorted(reference.steps.keys() & other.steps.keys())
    result = Comparison(max(common, default=0))
    buffers, quiet = reference.buffers | other.buffers, set()
    for step in common:
        a, b = reference.steps[step], other.steps[step]
        scale = _scale(reference.steps[common[0]]["weights"], a["weights"], buffers)
        differences: list[Difference] = []
        if step:
            differences += _computed(a, b, tolerances)
            quiet |= _quiet(a["gradients"], tolerances.quiet)
        differences += _kept(a, b, buffers, quiet, scale, tolerances.weights)
        for difference in differences:
            difference.step = step
        result.first = result.first or next(iter(differences), None)
        result.tensor = result.tensor or next((d for d in differences if d.what in TENSORS), None)
        if step:
            apart = _distances(a["weights"], b["weights"])
            weights = math.hypot(*(apart[name] for name in apart.keys() - buffers - quiet))
            now = {"loss": _largest(_losses(a, b)), "gradient norm": _largest(_columns(a, b, "grad_norm"))}
            for what, deviation in {**now, "weights": _ratio(weights, scale)}.items():
                result.deviations.setdefault(what, []).append(deviation)
    return result


def _computed(a: dict, b: dict, tolerances: Tolerances) -> Iterator[Difference]:
    """Yield what differs in what a step computes, nearest to the cause first."""
    if a["ids"] != b["ids"]:
        yield Difference("samples", [], a["ids"], b["ids"])
    fed = [f"micro-batch {i}" for i, ours, theirs in _pairs(a["inputs"], b["inputs"]) if ours != theirs]
    if fed:
        yield Difference("inputs", fed)
    for name, there, here in _losses(a, b):
        if relative(there, here) > tolerances.loss:
            loss_pairs = _pairs(a["losses"].get(name, {}), b["losses"].get(name, {}))
            places = [f"micro-batch {i}" for i, *losses in loss_pairs if relative(*losses) > tolerances.loss]
            yield Difference("loss" if places else "loss weights", places, there, here, relative(there, here))
    for _, there, here in _columns(a, b, "grad_norm"):
        if relative(there, here) > tolerances.gradient:
            yield Difference("gradient norm", [], there, here, relative(there, here))
    gradients = _distances(a["gradients"], b["gradients"])
    whole = _norm(a["gradients"])
    yield from _far("gradients", {n: _ratio(d, whole) for n, d in gradients.items()}, tolerances.gradient)
    for _, there, here in _columns(a, b, "lr"):
        if relative(there, here):
            yield Difference("learning rate", [], there, here, relative(there, here))


def _kept(a: dict, b: dict, buffers: set[str], quiet: set[str], scale: float, tolerance: float) -> Iterator[Difference]:
    """Yield what differs in the weights and buffers after a step.

    Args:
        quiet: tensors to leave out.
        scale: the length that distances of weights are divided by.
    """
    apart = _distances(a["weights"], b["weights"])
    weights = {name: _ratio(apart[name], scale) for name in apart if name not in buffers | quiet}
    yield from _far("weights", weights, tolerance)
    buffer_distances = {
        name: _ratio(apart[name], a["weights"].get(name, {}).get("norm")) for name in apart if name in buffers
    }
    yield from _far("buffers", buffer_distances, tolerance)


def _far(what: str, sizes: dict[str, float], tolerance: float) -> Iterator[Difference]:
    """Yield one difference with the tensors that are too far apart, the farthest first."""
    far = sorted(
        (n for n, size in sizes.items() if size > tolerance or not tolerance), key=sizes.__getitem__, reverse=True
    )
    if far:
        yield Difference(what, [_plain(name) for name in far], deviation=sizes[far[0]])


def relative(a: float | None, b: float | None) -> float:
    """Return the difference of two numbers relative to the larger one; infinite if only one of them is a number."""
    if a == b:
        return 0.0
    if a is None or b is None or not math.isfinite(a - b):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def _pairs(a: dict, b: dict) -> list[tuple[str, Any, Any]]:
    return [(key, a.get(key), b.get(key)) for key in {**a, **b}]


def _losses(a: dict, b: dict) -> list[tuple[str, Any, Any]]:
    return [(name, a.get(name), b.get(name)) for name in {**a["losses"], **b["losses"]}]


def _columns(a: dict, b: dict, column: str) -> list[tuple[str, Any, Any]]:
    """Pair the values of a column, and of the same column of further optimizers."""
    return [pair for pair in _pairs(a, b) if pair[0] == column or pair[0].startswith(f"{column}/")]


def _largest(pairs: Iterable[tuple[str, Any, Any]]) -> float:
    return max((relative(*pair) for _, *pair in pairs), default=0.0)


def _distances(a: dict[str, dict], b: dict[str, dict]) -> dict[str, float]:
    """Estimate from sketches the distance between tensors whose bits differ; infinite if it cannot be estimated."""
    apart = {}
    for name, ours, theirs in _pairs(a, b):
        if ours and theirs and ours["hash"] == theirs["hash"]:
            continue
        told = ours and theirs and None not in (*ours["sketch"], *theirs["sketch"])
        apart[name] = math.dist(ours["sketch"], theirs["sketch"]) if told else math.inf
    return apart


def _scale(start: dict[str, dict], now: dict[str, dict], buffers: set[str]) -> float:
    """Return how far the parameters have moved, at least what rounding them can make; at the start, their norm."""
    size = _norm({name: about for name, about in now.items() if name not in buffers})
    gone = _distances(start, now)
    moved = math.hypot(*(gone[name] for name in gone if name not in buffers))
    return max(moved, LEAST_MOVED * size) if start is not now else size


def _norm(tensors: dict[str, dict]) -> float:
    return math.hypot(*(about["norm"] or 0.0 for about in tensors.values()))


def _quiet(gradients: dict[str, dict], part: float) -> set[str]:
    """Name the tensors whose gradient is not 0, but smaller than a part of the whole gradient."""
    limit = part * _norm(gradients)
    return {name for name, about in gradients.items() if 0 < (about["norm"] or 0.0) < limit}


def _ratio(length: float, scale: float | None) -> float:
    return length / scale if scale else (math.inf if length else 0.0)


def _plain(name: str) -> str:
    """Shorten the name of a tensor of a run's first model."""
    return name.removeprefix("models.0.")
