"""Whether two runs took the same steps, from what they have written down."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from app.commands.prove.difference import ROUNDED, TENSORS, Difference
from app.commands.prove.trace import Trace


class Tolerances(NamedTuple):
    """Largest relative deviations; under 0 every bit counts, as it always does in samples, inputs and learning rate.

    A tensor's own size is no measure for it: some have no gradient but rounding (a key's bias in attention, a bias in
    front of a norm), of which AdamW makes steps of full size.

    Args:
        gradient: of the norm; and the distance of a tensor's gradient in parts of the norm of the whole gradient.
        weights: the distance of a tensor in parts of the way that the whole model has gone; of a buffer in parts of its
            own norm.
        quiet: a tensor whose gradient in the reference has been under this part of the whole is not held to `weights`.
    """

    loss: float = 0.0
    gradient: float = 0.0
    weights: float = 0.0
    quiet: float = 0.0


EXACT = Tolerances()
# Law 3 for the loss. Healthy layouts of recipes/cls.py were apart by 3e-6, 5e-5 and 2e-5 after 100 steps.
ORDINARY = Tolerances(loss=1e-5, gradient=1e-3, weights=1e-3, quiet=1e-4)
# A way shorter than this part of the weights' norm is not a measure: float32 rounds them by 2**-24 of it.
LEAST_WAY = 2**-24 / ORDINARY.weights


class Growth(NamedTuple):
    """How a relative deviation has grown: from the first step that has one to the step with the largest."""

    begin: int
    first: float
    end: int
    largest: float

    @property
    def rate(self) -> float:
        """Return by what factor it has grown in a step."""
        return (self.largest / self.first) ** (1 / (self.end - self.begin))

    def __str__(self) -> str:
        way = f"{self.first:.1e} in step {self.begin}, {self.largest:.1e} in step {self.end}"
        return f"{way}, {self.rate:.2g}-fold a step"


@dataclass
class Comparison:
    """How a run compares with the reference.

    Args:
        steps: how many both have made.
        first: the difference nearest to the cause, in the first step that has one.
        tensor: the first difference that names tensors.
        deviations: of every step in order, by quantity, relative.
    """

    steps: int
    first: Difference | None = None
    tensor: Difference | None = None
    deviations: dict[str, list[float]] = field(default_factory=dict)

    def growth(self, what: str) -> Growth | None:
        """Tell how a quantity's deviation has grown; None where it has not."""
        there = [(step, size) for step, size in enumerate(self.deviations.get(what, []), 1) if 0 < size < math.inf]
        if not there:
            return None
        (begin, first), (end, largest) = there[0], max(there, key=lambda pair: pair[1])
        return Growth(begin, first, end, largest) if end > begin else None

    @property
    def may_be_rounding(self) -> bool:
        """Tell whether the runs began alike and what then differs is what rounding can make different."""
        return self.first is not None and self.first.step > 1 and self.first.what in ROUNDED


def compare(reference: Trace, other: Trace, tolerances: Tolerances) -> Comparison:
    """Compare two runs step by step, as far as both have come."""
    common = sorted(reference.steps.keys() & other.steps.keys())
    result = Comparison(max(common, default=0))
    buffers, quiet = reference.buffers | other.buffers, set()
    for step in common:
        a, b = reference.steps[step], other.steps[step]
        scale = _scale(reference.steps[common[0]]["weights"], a["weights"], buffers)
        found = []
        if step:
            found += _computed(a, b, tolerances)
            quiet |= _quiet(a["gradients"], tolerances.quiet)
        found += _kept(a, b, buffers, quiet, scale, tolerances.weights)
        for difference in found:
            difference.step = step
        result.first = result.first or next(iter(found), None)
        result.tensor = result.tensor or next((d for d in found if d.what in TENSORS), None)
        if step:
            apart = _distances(a["weights"], b["weights"])
            weights = math.hypot(*(apart[name] for name in apart.keys() - buffers - quiet))
            now = {"loss": _largest(_losses(a, b)), "gradient norm": _largest(_columns(a, b, "grad_norm"))}
            for what, deviation in {**now, "weights": _ratio(weights, scale)}.items():
                result.deviations.setdefault(what, []).append(deviation)
    return result


def _computed(a: dict, b: dict, tolerances: Tolerances) -> Iterator[Difference]:
    """Find what differs in what a step computes, nearest to the cause first."""
    if a["ids"] != b["ids"]:
        yield Difference("samples", [], a["ids"], b["ids"])
    fed = [f"micro-batch {i}" for i, ours, theirs in _pairs(a["inputs"], b["inputs"]) if ours != theirs]
    if fed:
        yield Difference("inputs", fed)
    for name, *pair in _losses(a, b):
        if relative(*pair) > tolerances.loss:
            own = _pairs(a["losses"].get(name, {}), b["losses"].get(name, {}))
            micros = [f"micro-batch {i}" for i, *losses in own if relative(*losses) > tolerances.loss]
            yield Difference("loss" if micros else "loss weights", micros, *pair, relative(*pair))
    for _, *pair in _columns(a, b, "grad_norm"):
        if relative(*pair) > tolerances.gradient:
            yield Difference("gradient norm", [], *pair, relative(*pair))
    gradients = _distances(a["gradients"], b["gradients"])
    whole = _norm(a["gradients"])
    yield from _far("gradients", {n: _ratio(d, whole) for n, d in gradients.items()}, tolerances.gradient)
    for _, *pair in _columns(a, b, "lr"):
        if relative(*pair):
            yield Difference("learning rate", [], *pair, relative(*pair))


def _kept(a: dict, b: dict, buffers: set[str], quiet: set[str], scale: float, tolerance: float) -> Iterator[Difference]:
    """Find what differs in what a step leaves behind.

    Args:
        quiet: tensors that are left out.
        scale: what distances of weights are measured by.
    """
    apart = _distances(a["weights"], b["weights"])
    weights = {name: _ratio(apart[name], scale) for name in apart if name not in buffers | quiet}
    yield from _far("weights", weights, tolerance)
    own = {name: _ratio(apart[name], a["weights"].get(name, {}).get("norm")) for name in apart if name in buffers}
    yield from _far("buffers", own, tolerance)


def _far(what: str, sizes: dict[str, float], tolerance: float) -> Iterator[Difference]:
    """Name the tensors that are too far apart, the farthest first."""
    far = sorted((n for n, size in sizes.items() if size > tolerance or not tolerance), key=sizes.get, reverse=True)
    if far:
        yield Difference(what, [_plain(name) for name in far], deviation=sizes[far[0]])


def relative(a: float | None, b: float | None) -> float:
    """Return the difference of two numbers in parts of the larger one; infinite where only one of them is there."""
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
    """Pair a column and those of further optimizers."""
    return [pair for pair in _pairs(a, b) if pair[0] == column or pair[0].startswith(f"{column}/")]


def _largest(pairs: Iterable[tuple[str, Any, Any]]) -> float:
    return max((relative(*pair) for _, *pair in pairs), default=0.0)


def _distances(a: dict[str, dict], b: dict[str, dict]) -> dict[str, float]:
    """Estimate, by sketches, how far the tensors whose bits differ are apart; infinite where there is no telling."""
    apart = {}
    for name, ours, theirs in _pairs(a, b):
        if ours and theirs and ours["hash"] == theirs["hash"]:
            continue
        told = ours and theirs and None not in (*ours["sketch"], *theirs["sketch"])
        apart[name] = math.dist(ours["sketch"], theirs["sketch"]) if told else math.inf
    return apart


def _scale(start: dict[str, dict], now: dict[str, dict], buffers: set[str]) -> float:
    """Measure how far the parameters have gone, but not under what rounding them can make; their size at the start."""
    size = _norm({name: about for name, about in now.items() if name not in buffers})
    gone = _distances(start, now)
    moved = math.hypot(*(gone[name] for name in gone if name not in buffers))
    return max(moved, LEAST_WAY * size) if start is not now else size


def _norm(tensors: dict[str, dict]) -> float:
    return math.hypot(*(about["norm"] or 0.0 for about in tensors.values()))


def _quiet(gradients: dict[str, dict], part: float) -> set[str]:
    """Name the tensors whose gradient, where it is not 0, is under a part of the whole one."""
    limit = part * _norm(gradients)
    return {name for name, about in gradients.items() if 0 < (about["norm"] or 0.0) < limit}


def _ratio(length: float, scale: float | None) -> float:
    return length / scale if scale else (math.inf if length else 0.0)


def _plain(name: str) -> str:
    """Leave out where a run has only one model to name."""
    return name.removeprefix("models.0.")
