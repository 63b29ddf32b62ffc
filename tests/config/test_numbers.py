"""Numbers that no setting can have: refused for every field of every recipe, and of every command."""

import dataclasses
import importlib
import math
import sys
import typing

import pytest
import tyro
from support.launching import ROOT

from app import UserError
from app.commands import load, summaries
from app.config import RunConfig, as_flag, check_numbers, setting
from app.launching.flags import parse_command

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
NEGATIVE = {"run.workers"}  # -1 has a meaning


def config_of(recipe):
    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        return importlib.import_module(recipe).Config()
    finally:
        sys.path.remove(str(ROOT / "recipes"))


def with_value(config, name, value):
    """Return a config with another value of a field, by its dotted name."""
    first, _, rest = name.partition(".")
    return dataclasses.replace(config, **{first: with_value(getattr(config, first), rest, value) if rest else value})


def kinds(config, prefix=""):
    """Yield the dotted name and the declared type of every field."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from kinds(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", hints[field.name], value


def members(kind):
    """Return the plain types in a declared one, such as float in `float | None` and in `tuple[float, float]`."""
    parts = [part for part in typing.get_args(kind) if part is not ...]
    return {each for part in parts for each in members(part)} if parts else {kind}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_of_every_recipe(recipe):
    """NaN, infinities, whole numbers beyond 64 bits, and negative ones where they mean nothing."""
    config, tried = config_of(recipe), 0
    check_numbers(config)
    for name, kind, value in kinds(config):
        wrong = [math.nan, math.inf, -math.inf] if float in members(kind) else []
        wrong += [2**63, -(2**64)] if members(kind) & {int, float} and bool not in members(kind) else []
        wrong += [-1] if kind is int and name not in NEGATIVE else []
        for number in wrong:
            given = (*value[:-1], number) if isinstance(value, tuple) else number
            with pytest.raises(UserError, match=as_flag(name)):
                check_numbers(with_value(config, name, given))
            tried += 1
    assert tried > 80


@pytest.mark.parametrize("word", ["nan", ".nan", "inf", "-.inf", ".INF"])
def test_in_a_file_of_flags_too(tmp_path, word):
    (tmp_path / "flags.yaml").write_text(f"run:\n  min_change: {word}\n")
    sys.path.insert(0, str(ROOT / "recipes"))
    from app import parse

    with pytest.raises((UserError, SystemExit)):
        check_numbers(parse(type(config_of("cls")), ["--config", str(tmp_path / "flags.yaml")]))


def test_a_field_may_say_otherwise():
    @dataclasses.dataclass
    class Config:
        highest: float = setting(math.inf, finite=False)
        run: RunConfig = dataclasses.field(default_factory=RunConfig)

    check_numbers(Config())
    with pytest.raises(UserError, match=r"--run\.min-change nan: must be a finite number"):
        check_numbers(Config(run=RunConfig(min_change=math.nan)))


COMMANDS = [name for name in sorted(summaries()) if hasattr(load(name), "Options")]  # launch reads its own words


def is_positional(options, name):
    hints = [vars(kind).get("__annotations__", {}).get(name) for kind in options.__mro__]
    return any(tyro.conf.Positional in getattr(hint, "__metadata__", ()) for hint in hints)


def options_of(name, *words):
    """Read a command's options from words, after those that it needs."""
    options, needed = load(name).Options, []
    for field in dataclasses.fields(options):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            flag = [] if is_positional(options, field.name) else [as_flag(field.name)]
            needed += [*flag, *("x", "x")[: 1 + ("tuple" in str(field.type))]]
    return parse_command(options, [*needed, *words], name, rest=False)[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_list_and_number_of_every_command(name):
    """A list that is given without anything in it asks for nothing; numbers as above."""
    options = options_of(name)
    hints = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        kind, flag = hints[field.name], as_flag(field.name)
        optional = field.default is not dataclasses.MISSING and not is_positional(type(options), field.name)
        if typing.get_origin(kind) is tuple and optional:
            with pytest.raises(UserError, match=rf"{flag}: give at least one after it, or leave it out"):
                options_of(name, flag)
        for word in ["nan", "inf"] * (float in members(kind)) + [str(2**63)] * (kind is int):
            with pytest.raises(UserError, match=flag):
                options_of(name, f"{flag}={word}")
