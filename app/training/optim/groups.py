"""Groups of parameters that the optimizer treats alike: their learning rate, weight decay, and when they are frozen."""

import difflib
import fnmatch
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils.other import is_repeated_blocks
from torch import nn

from app.config import OptimConfig
from app.errors import UserError
from app.sampling.triggers import as_steps


class Frozen(NamedTuple):
    """Steps in which a weight is not trained, as the user gave them: fractions of the run if below 1."""

    start: float = 0.0
    end: float | None = None

    def holds(self, step: int, total_steps: int) -> bool:
        """Tell whether the weight is frozen in step `step`, counted from 0."""
        begun = step >= as_steps(self.start, total_steps)
        return begun and (self.end is None or step < as_steps(self.end, total_steps))


def groups_of(
    model: nn.Module, config: OptimConfig, decays: bool, is_for_muon: Callable[[str, nn.Parameter], bool] | None = None
) -> list[dict[str, Any]]:
    """Sort the parameters that are trained into groups; freeze those that never are.

    Groups are "decay" (two dimensions or more) and "no_decay" (biases, norms), and parts of these whose weights have a
    rate, a decay or a time of their own; each sorted by parameter name.

    Args:
        decays: whether the optimizer has a weight decay.
        is_for_muon: tells which parameters, by name, are in groups with `"muon": True`; None for other optimizers.

    Raises:
        UserError: a pattern fits no name, or no parameter requires a gradient.
    """
    names = [name for name, _ in model.named_parameters()]  # a tied parameter once
    factors, own_decays = (_by_name(names, field, getattr(config, field)) for field in ("rates", "decays"))
    frozen = _frozen(names, config.freeze)
    for name, parameter in model.named_parameters():
        if frozen.get(name) == Frozen():
            parameter.requires_grad_(False)
    depths = _layer_factors(model, config.layer_decay)
    groups: dict[tuple, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        if parameter.requires_grad:
            decay = own_decays.get(name, config.weight_decay if parameter.ndim >= 2 else 0.0)
            factor = factors.get(name, 1.0) * depths.get(name, 1.0)
            muon = is_for_muon is not None and is_for_muon(name, parameter)
            groups[parameter.ndim < 2, muon, decay, factor, frozen.get(name)].append(parameter)
    if not groups:
        raise UserError(
            "no parameter of the model requires a gradient: unfreeze some (parameter.requires_grad_(True)), or freeze "
            "fewer (--optim.freeze)"
        )
    if is_for_muon is not None and not any(muon for _, muon, *_ in groups):
        raise UserError("--optim.name Muon: the model has no matrix of a hidden layer that is trained: take AdamW")
    return [_group(key, groups[key], decays) for key in sorted(groups, key=_order)]


def drop_frozen(optimizer: torch.optim.Optimizer, step: int, total_steps: int) -> None:
    """Drop the gradients of weights that are frozen in step `step`, counted from 0: the optimizer leaves them alone."""
    for group in optimizer.param_groups:
        if group.get("frozen") and Frozen(*group["frozen"]).holds(step, total_steps):
            for parameter in group["params"]:
                parameter.grad = None


def _order(key: tuple) -> tuple:
    *rest, frozen = key
    return *rest, frozen is not None, frozen and (frozen.start, frozen.end or 0.0)


def _group(key: tuple, parameters: list[nn.Parameter], decays: bool) -> dict[str, Any]:
    small, muon, decay, factor, frozen = key
    group: dict[str, Any] = {"name": "no_decay" if small else "decay", "params": parameters}
    group |= {"weight_decay": decay} if decays else {}
    group |= {"muon": True} if muon else {}
    group |= {"factor": factor} if factor != 1 else {}
    return group | ({"frozen": tuple(frozen)} if frozen else {})


def _by_name(names: list[str], field: str, patterns: Iterable[str]) -> dict[str, float]:
    """Read PATTERN=NUMBER, and give each name that fits its number.

    Raises:
        UserError: one is something else, or fits no name.
    """
    number_by_name: dict[str, float] = {}
    for text in patterns:
        pattern, equals, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            equals = ""
        if not equals or not 0 <= value < float("inf"):
            raise UserError(f"--optim.{field} {text!r}: give PATTERN=NUMBER, for example 'classifier.*=10'")
        number_by_name |= dict.fromkeys(_fitting(names, field, pattern), value)
    return number_by_name


def _frozen(names: list[str], patterns: Iterable[str]) -> dict[str, Frozen]:
    span_by_name: dict[str, Frozen] = {}
    for text in patterns:
        pattern, at, when = text.partition("@")
        start, colon, end = when.partition(":")
        try:
            if bool(at) != bool(colon):
                raise ValueError
            span = Frozen(float(start or 0), float(end) if end else None)
            places = [place for place in span if place is not None]
            in_order = span.end is None or span.start < span.end or (span.start < 1) != (span.end < 1)
            if not all(0 <= place < math.inf for place in places) or not in_order:
                raise ValueError
        except ValueError:
            raise UserError(
                f"--optim.freeze {text!r}: give PATTERN, PATTERN@:STEP (frozen until then), "
                "PATTERN@STEP: (frozen from then on) or PATTERN@STEP:STEP"
            ) from None
        span_by_name |= dict.fromkeys(_fitting(names, "freeze", pattern), span)
    return span_by_name


def _fitting(names: list[str], field: str, pattern: str) -> list[str]:
    fitting = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not fitting:
        longer = f"{pattern}.*"
        if any(fnmatch.fnmatchcase(name, longer) for name in names):
            hint = f"try {longer!r}"
        else:
            near = difflib.get_close_matches(pattern.strip("*."), names, n=3, cutoff=0.3) or names[:3]
            hint = f"names are {', '.join(near)} and so on; * stands for anything"
        raise UserError(f"--optim.{field} {pattern!r} fits none of the model's {len(names)} weights: {hint}")
    return fitting


def _layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Return each parameter's factor: `decay` to the power of the number of layers above it.

    Layers are the blocks of the model's lists of blocks, one after the other. What comes before the first block is a
    layer below it, and what comes after the last one a layer above it.

    Raises:
        UserError: the model has no list of blocks.
    """
    if decay == 1:
        return {}
    lists = [name for name, module in model.named_modules() if is_repeated_blocks(module) and len(module)]
    lists = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if not lists:
        raise UserError(
            f"--optim.layer-decay {decay}: {type(model).__name__} has no list of blocks (nn.ModuleList), so its layers "
            "are not known; use --optim.rates"
        )
    sizes = [len(cast(nn.ModuleList, model.get_submodule(name))) for name in lists]
    first = dict(zip(lists, itertools.accumulate(sizes, initial=1), strict=False))  # the depth of each first block
    depths: dict[str, int] = {}
    reached, top = 0, sum(sizes) + 1
    for name, _ in model.named_parameters():
        inside = next((prefix for prefix in lists if name.startswith(f"{prefix}.")), None)
        if inside is None:
            depths[name] = reached if reached < top - 1 else top
        else:
            depths[name] = first[inside] + int(name.removeprefix(f"{inside}.").partition(".")[0])
            reached = max(reached, depths[name])
    return {name: decay ** (top - depth) for name, depth in depths.items()}
