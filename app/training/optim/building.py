"""The optimizers of a run: built from settings, with the learning rate of each step."""

import functools
import inspect
import math
import typing
from collections.abc import Iterable

import torch

from app.config import OptimConfig
from app.config.points import Point
from app.errors import UserError
from app.training.optim import shard_trial
from app.training.optim.adamw import give_seeds
from app.training.optim.classes import find_class, for_updates, is_imported, make
from app.training.optim.groups import groups_of
from app.training.optim.muon import Muon, is_for_muon
from app.training.optim.schedule import check_points, learning_rate

# torch 2.13 cannot run the other fused kernels, those of SGD and Adagrad, on FSDP's DTensors.
FUSED = ("Adam", "AdamW")


class Place(typing.NamedTuple):
    """Where an optimizer will work."""

    device: torch.device
    sharded: bool
    """Whether FSDP2 shards the weights."""
    exact: bool
    seed: int = 0
    """Of the run."""


def build_optimizer(model: torch.nn.Module, config: OptimConfig, place: Place | None = None) -> torch.optim.Optimizer:
    """Build the optimizer that the config names, for the parameters that require a gradient.

    Args:
        place: None where nothing is trained.

    Raises:
        UserError: the name is unknown or unsuitable, a pattern of names fits none, no parameter requires a gradient, or
            the optimizer cannot work at this place.
    """
    optimizer_class = for_updates(find_class(config.name), config.updates)
    accepted = {name: each.default for name, each in inspect.signature(optimizer_class).parameters.items()}
    arguments = _fitting(config, accepted)
    if place and is_imported(config.name):
        small = functools.partial(make, config.name, optimizer_class, arguments=arguments)
        shard_trial.check(config.name, small, place.device, place.sharded, place.exact)
    matrices = functools.partial(is_for_muon, model) if optimizer_class is Muon else None
    groups = groups_of(model, config, "weight_decay" in accepted, matrices)
    arguments |= _kernels(config, optimizer_class, accepted, groups, place)
    if config.updates == "stochastic":
        give_seeds(groups, model, place.seed if place else 0)
    return make(config.name, optimizer_class, groups, arguments)


def _kernels(
    config: OptimConfig,
    optimizer_class: type[torch.optim.Optimizer],
    accepted: dict[str, typing.Any],
    groups: list[dict],
    place: Place | None,
) -> dict[str, bool]:
    """Return the options that choose an optimizer's kernels, as --optim.implementation asks."""
    kind = config.implementation
    parameters = [parameter for group in groups for parameter in group["params"]]
    if kind == "auto":
        usual = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
        return {"fused": True} if optimizer_class.__name__ in FUSED and "fused" in accepted and usual else {}
    named = f"--optim.implementation {kind}: "
    if kind != "for-loop" and kind not in accepted:
        raise UserError(f"{named}{config.name} has no such kernels: use auto")
    if kind == "fused" and place and place.sharded and optimizer_class.__name__ not in FUSED:
        raise UserError(f"{named}torch's kernels for {config.name} do not take the shards of FSDP2: use foreach")
    if (
        kind == "fused"
        and place
        and place.exact
        and place.device.type == "cpu"
        and not all(map(fills_vectors, parameters))
    ):
        raise UserError(
            f"{named}on a CPU these kernels round numbers that fill no vector of 16 in another way, so layouts would "
            "differ with --run.exact: use auto, or foreach"
        )
    return {name: name == kind for name in ("foreach", "fused") if name in accepted}


def fills_vectors(parameter: torch.nn.Parameter, slices: int = 1) -> bool:
    """Tell whether fused CPU kernels compute the same bits for a whole tensor and for shards of whole rows.

    They round the last numbers, which do not fill a vector of up to 16 numbers, in another way.

    Args:
        slices: into how many slices rows may be cut.
    """
    return parameter.ndim > 1 and parameter.shape[1:].numel() % (16 * slices) == 0


CHANGEABLE = ("weight_decay", "betas", "eps", "momentum")
"""Options of parameter groups that a run may change in its middle; the learning rate is set in every step."""


def check_change(config: typing.Any, changed: dict[str, tuple[typing.Any, typing.Any]]) -> None:
    """Refuse a change in the middle of a run that an optimizer cannot make.

    Args:
        changed: settings, by name, as they were and as they are.

    Raises:
        UserError: it cannot.
    """
    before, now = changed.get("optim.momentum", (1, 1))
    if bool(before) != bool(now) and config.optim.name.lower() == "rmsprop":
        raise UserError(
            f"--optim.momentum {now}: RMSprop cannot begin or end with momentum in the middle of a run, because its "
            f"state lacks it: leave it at {before}, or start another run"
        )


def _fitting(config: OptimConfig, options: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """Return the settings among `options`, the options of an optimizer with a value that each can have."""
    values = {name: getattr(config, name) for name in ("lr", "updates", *CHANGEABLE)}
    # Adafactor's eps is a pair, with another meaning, and some optimizers have three betas.
    return {k: v for k, v in values.items() if k in options and _length(v) == _length(options[k])}


def _length(value: typing.Any) -> int:
    return len(value) if isinstance(value, tuple | list) else 0


class Entry(typing.NamedTuple):
    """Which of a run's optimizers one is."""

    place: int
    clip: float
    """The largest norm of its gradient; 0 for no clipping."""


class Optimizers:
    """A run's optimizers, each with the settings for its learning rate; None: the recipe sets the rate."""

    def __init__(self):
        self.known: list[tuple[torch.optim.Optimizer, OptimConfig | None]] = []
        self._rates: dict[torch.optim.Optimizer, float] = {}  # of the step, without factors of groups

    def add(self, optimizer: torch.optim.Optimizer, settings: OptimConfig | None) -> None:
        """Add an optimizer."""
        self.known.append((optimizer, settings))

    def set_rates(self, step: int, total_steps: int, global_batch: int) -> None:
        """Set the learning rates of step `step`, counted from 0."""
        for optimizer, settings in self.known:
            if settings is not None:
                rate = self._rates[optimizer] = learning_rate(settings, step, total_steps, global_batch)
                for group in optimizer.param_groups:
                    group["lr"] = rate * group.get("factor", 1.0)

    def options(self, names: Iterable[str]) -> list[list[dict[str, typing.Any]]]:
        """Return options of each optimizer's groups, such as weight_decay, where they have them."""
        return [
            [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
            for optimizer, _ in self.known
        ]

    def set_options(self, options: list[list[dict[str, typing.Any]]], names: set[str]) -> None:
        """Set some options of groups again that a checkpoint has replaced by those that it had."""
        for (optimizer, _), of_groups in zip(self.known, options, strict=True):
            for group, before in zip(optimizer.param_groups, of_groups, strict=True):
                group |= {name: value for name, value in before.items() if name in names}

    def rates(self) -> list[float]:
        """Return each optimizer's learning rate in this step: that of weights without a factor of their own."""
        rates = []
        for optimizer, _ in self.known:
            plain = [group["lr"] for group in optimizer.param_groups if "factor" not in group]
            rates.append(plain[0] if plain else self._rates.get(optimizer, 0.0))
        return rates

    def check_points(self, total_steps: int) -> None:
        """Refuse a schedule that ends before the run does.

        Raises:
            UserError: there is one.
        """
        for _, settings in self.known:
            if settings is not None:
                check_points(settings, total_steps)

    def find(self, optimizer: torch.optim.Optimizer) -> Entry:
        """Return an optimizer's place among them, and its clipping norm.

        Raises:
            UserError: run.prepare did not return this optimizer.
        """
        for index, (each, settings) in enumerate(self.known):
            if each is optimizer:
                return Entry(index, settings.clip if settings else 0.0)
        raise UserError("run.step got an optimizer that run.prepare did not return: pass the one that it returned")


def check(config: OptimConfig) -> None:
    """Raise UserError for the first invalid value."""
    for_updates(find_class(config.name), config.updates)
    for field in ("schedule", "batch_scaling", "implementation", "updates"):
        names = typing.get_args(typing.get_type_hints(OptimConfig)[field])
        _require(getattr(config, field) in names, config, field, f"one of {', '.join(names)}")
    _require(config.lr is not None and 0 < config.lr < math.inf, config, "lr", "above 0, for example 5e-4")
    _require(0 <= config.weight_decay < math.inf, config, "weight_decay", "0 or more, for example 0.01")
    _require(all(0 <= beta < 1 for beta in config.betas), config, "betas", "from 0 to below 1, for example 0.9 0.999")
    _require(0 <= config.eps < math.inf, config, "eps", "0 or more, for example 1e-8")
    _require(0 <= config.momentum < math.inf, config, "momentum", "0 or more, for example 0.9")
    _require(0 <= config.clip < math.inf, config, "clip", "a norm, for example 1.0, or 0 for no clipping")
    _require(0 <= config.warmup < math.inf, config, "warmup", "a fraction (0.1) or a number of steps (500), or 0")
    _require(0 <= config.min_lr <= 1, config, "min_lr", "a fraction of the peak from 0 to 1, for example 0.1")
    _require(0 <= config.decay < math.inf, config, "decay", "a fraction (0.2) or a number of steps (500)")
    _require(0 < config.gamma <= 1, config, "gamma", "above 0 and at most 1, for example 0.1")
    increasing = all(a < b for a, b in zip((0, *config.milestones), (*config.milestones, math.inf), strict=True))
    _require(increasing, config, "milestones", "increasing and above 0, for example 0.5 0.75")
    _require(config.base_batch >= 0, config, "base_batch", "the global batch that --optim.lr was chosen for, or 0")
    _require(0 < config.layer_decay <= 1, config, "layer_decay", "above 0 and at most 1, for example 0.75")
    _check_schedule(config)
    if config.batch_scaling != "none" and not config.base_batch:
        raise UserError(
            f"--optim.batch-scaling {config.batch_scaling} has nothing to scale from: give the global batch that lr "
            "was chosen for, for example --optim.base-batch 256, or use --optim.batch-scaling none"
        )


def _check_schedule(config: OptimConfig) -> None:
    """Refuse a schedule that lacks what it needs, and what another schedule needs."""
    if config.schedule == "multistep" and not config.milestones:
        raise UserError("--optim.schedule multistep never drops: give it --optim.milestones, for example 0.5 0.75")
    if config.schedule == "one_cycle" and not config.warmup:
        raise UserError("--optim.schedule one_cycle has no way up: give it --optim.warmup, for example 0.3")
    if config.cycles > 1 and config.schedule != "cosine":
        raise UserError(f"--optim.cycles {config.cycles}: only --optim.schedule cosine restarts, not {config.schedule}")
    if bool(config.points) != (config.schedule == "points"):
        raise UserError(
            "--optim.schedule points needs --optim.points, for example 0:0 10%:1 100%:0.1"
            if config.schedule == "points"
            else f"--optim.points need --optim.schedule points, not {config.schedule}"
        )
    points = [Point.parse(text) for text in config.points]
    if points and not max(point.factor for point in points):
        raise UserError("--optim.points: all factors are 0, so nothing would be trained")


def _require(good: bool, config: OptimConfig, field: str, what: str) -> None:
    if not good:
        value = getattr(config, field)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        raise UserError(f"--optim.{field.replace('_', '-')} {shown} does not work: it must be {what}")
