"""What is asked of the fields of a recipe's config, and of the configs in it."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from app.config import points
from app.config.settings import OnResume, OptimConfig
from app.errors import UserError

_HUGE = 2**63


def each_field(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield every field of a config and of the configs in it: its dotted name, its declaration, its value."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from each_field(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field, value


def on_resume(config: Any) -> dict[str, OnResume]:
    """List what happens when a field has changed since the run began, by dotted name."""
    return {name: field.metadata.get("on_resume", OnResume.REFUSE) for name, field, _ in each_field(config)}


def check(config: Any) -> None:
    """Refuse numbers that no run can have, in a recipe's config, and those that ask for nothing without another.

    Raises:
        UserError: it names the first such field.
    """
    check_numbers(config)
    if isinstance(config.run.save_every, str) and config.run.save_every != "auto":
        raise UserError(f"--run.save-every {config.run.save_every}: give a number of steps, or auto")
    if not config.run.steps and config.run.epochs <= 0:
        raise UserError(f"--run.epochs {config.run.epochs}: must be a number above 0, or give --run.steps")
    if config.run.slices and not config.run.exact:
        raise UserError(
            f"--run.slices {config.run.slices}: only exact mode needs slices: give --run.exact true too, or leave it "
            "out"
        )


def check_numbers(config: Any) -> None:
    """Refuse numbers that no setting can have: NaN, infinities, those beyond 64 bits, and those below a field's least.

    Raises:
        UserError: it names the first such field.
    """
    for name, field, value in each_field(config):
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, float) and field.metadata.get("finite", True) and not math.isfinite(number):
                raise UserError(f"{as_flag(name)} {number}: must be a finite number")
            if isinstance(number, int) and not -_HUGE <= number < _HUGE:
                raise UserError(f"{as_flag(name)} {number}: must be a number of at most 64 bits")
        least = field.metadata.get("at_least")
        if isinstance(value, str):
            continue
        if least is not None and not value >= least:
            raise UserError(f"{as_flag(name)} {value}: must be at least {least}")


def chosen(config: Any) -> tuple[Any, list[str]]:
    """Fill in the settings that follow from others.

    Returns:
        A config, and lines that tell the user what was chosen and why.

    Raises:
        UserError: there is no learning rate, and the recipe does not choose one.
    """
    config = dataclasses.replace(config, run=dataclasses.replace(config.run))  # the caller's own stays as it is
    for field in dataclasses.fields(config):
        if isinstance(value := getattr(config, field.name), OptimConfig) and value.lr is None and field.name != "optim":
            raise UserError(f"{as_flag(field.name)}.lr is missing: give it")
        if isinstance(value, OptimConfig) and value.points:
            config = dataclasses.replace(
                config, **{field.name: dataclasses.replace(value, points=points.read(value.points))}
            )
    optim, notes = getattr(config, "optim", None), []
    if isinstance(optim, OptimConfig) and optim.lr is None:
        if not hasattr(config, "default_lr"):
            raise UserError("--optim.lr is missing, and the recipe's Config has no default_lr(): give it, or write one")
        rate, why = config.default_lr()
        config = dataclasses.replace(config, optim=dataclasses.replace(optim, lr=rate))
        notes.append(f"learning rate {rate:g}, for {why}; --optim.lr gives another")
    elif isinstance(optim, OptimConfig) and hasattr(config, "default_lr"):
        rate, why = config.default_lr()
        if optim.lr >= 10 * rate:  # as where the config.yaml of a run from scratch is given to fine-tune
            notes.append(f"learning rate {optim.lr:g} as given; for {why} it would be {rate:g} without --optim.lr")
    batch, micro = config.run.global_batch, config.run.micro_batch
    if micro > batch:
        notes.append(f"--run.micro-batch {micro} is larger than --run.global-batch {batch}: a step is one micro-batch")
    return config, notes


def when_begun(config: Any, before: dict) -> dict[str, Any]:
    """Return the values that empty fields get when a run begins, by dotted name.

    Args:
        before: the config of the run that is resumed, as plain values, whose values are kept; empty for a new run.
    """
    had = flatten(before)
    makers = {name: field.metadata.get("when_begun") for name, field, value in each_field(config) if not value}
    made = {name: make() for name, make in makers.items() if make}
    return {
        name: earlier if (earlier := had.get(name)) and type(earlier) is type(new) else new
        for name, new in made.items()
    }


def put(config: Any, fields: dict, values: dict[str, Any]) -> None:
    """Set fields of a config by their dotted names, in it and in its plain values."""
    for name, value in values.items():
        (*parts, last), owner, plain = name.split("."), config, fields
        for part in parts:
            owner, plain = getattr(owner, part), plain[part]
        setattr(owner, last, value)
        plain[last] = value


def as_flag(name: str) -> str:
    """Write a field's dotted name as the flag that sets it."""
    return "--" + name.replace("_", "-")


def flatten(fields: dict, prefix: str = "") -> dict[str, Any]:
    """Turn nested fields into dotted names."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def to_dict(config: Any) -> dict:
    """Turn a config into plain values that YAML and JSON keep."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have, NaN and infinities, by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def defaults(config: Any) -> dict[str, Any]:
    """List the defaults of a config's fields, by dotted name; fields without a default are left out.

    Where a recipe's own defaults differ from those of a part, such as OptimConfig, the recipe's count.
    """
    default_by_name: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.default is not dataclasses.MISSING:
            default_by_name[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default_by_name[field.name] = field.default_factory()
        elif dataclasses.is_dataclass(value):
            default_by_name |= {f"{field.name}.{name}": default for name, default in defaults(value).items()}
    parts = {k: v for k, v in default_by_name.items() if dataclasses.is_dataclass(v) and not isinstance(v, type)}
    return flatten(_plain(default_by_name | {k: dataclasses.asdict(v) for k, v in parts.items()}))


def diff(before: dict, after: dict, default: dict[str, Any] | None = None) -> dict[str, tuple[Any, Any]]:
    """List the fields in which two configs differ, by dotted name, as (before, after).

    Args:
        default: by dotted name; what a field was that `before` lacks, because the setting did not exist then.
    """
    before, after = flatten(before), flatten(after)
    before |= {name: value for name, value in (default or {}).items() if name in after and name not in before}
    names = [*before, *(name for name in after if name not in before)]
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
