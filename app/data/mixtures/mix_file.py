"""The file of --data.mix: which sources a run trains on, by which weights, and how these change.

sources:
  - {name: web, path: "s3://bucket/web", weight: 7}
  - {name: code, path: "code/*.parquet", weight: 3, text: content, epochs: 4}
later:
  - {from: 0.8, weights: {web: 3, code: 7}}

A source may give columns by the names of their flags (`text: content`), a `template` that makes the text of a row, and
in s2s a `prefix` that stands before each of its texts to read.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from app.config.yaml_files import UniqueKeys
from app.data.config import TableData
from app.data.reading import read_text
from app.errors import UserError

FLAG = "--data.mix"
COLUMNS = ("text", "label", "prompt", "completion", "messages", "chosen", "rejected", "source", "target", "image")
"""Flags of columns, which each source may have other names for."""
PLACES = ("name", "split", "columns", "txt")
"""Further flags of a table; the first one is called `config` here, where a name is the source's."""


@dataclass(frozen=True)
class MixedSource:
    """A source of a mixture."""

    name: str
    path: str
    weight: float
    epochs: float | None
    """How often its rows may be seen; None: any number of times."""
    template: str
    """A text in which {column} stands for what a column holds; it becomes the text of a row. Empty: none."""
    prefix: str
    """Before each text of a row."""
    text: str
    """The flag's name of the column of that text; empty: the recipe has none."""
    languages: bool
    """Languages of a column `translation` count as columns."""
    renamed: dict[str, str]
    """Its own names of columns, and the names that the flags have for them."""
    flags: dict[str, Any]
    """Flags of the table that are others for this source."""

    @property
    def told(self) -> str:
        """Return the name, the weight and the limit, in a few words."""
        return f"{self.name}, weight {self.weight:g}" + (
            "" if self.epochs is None else f", at most {self.epochs:g} times"
        )

    def applied(self, config: TableData, share: float) -> TableData:
        """Return the flags of the data for this source alone; its columns have the names of `config`.

        Args:
            share: of the room for chunks.
        """
        gb = getattr(config, "cache_gb", 0.0) * share
        return dataclasses.replace(config, path=(self.path,), **{"mix": "", "cache_gb": gb, **self.flags})


@dataclass(frozen=True)
class Later:
    """A change of the mix, planned ahead."""

    start: float
    """A fraction of the run if below 1, else a number of steps."""
    weights: dict[str, float]
    """Of the sources that have another one from there on, by name."""

    @property
    def told(self) -> str:
        """Say from where on there are which weights."""
        start = f"{self.start:.4g} of the run" if self.start < 1 else f"step {self.start:g}"
        return f"from {start} on {', '.join(f'{name} {weight:g}' for name, weight in self.weights.items())}"


@dataclass(frozen=True)
class Mix:
    """What the file says."""

    sources: tuple[MixedSource, ...]
    later: tuple[Later, ...]

    def described(self, amounts: Iterable[str]) -> str:
        """Say what each source has, in words such as `100 rows`, its weight, and which others it will have."""
        have = "; ".join(f"{s.told}: {amount}" for s, amount in zip(self.sources, amounts, strict=True))
        return f"a mix of {have}{''.join(f'; {each.told}' for each in self.later)}"


def read_mix(config: TableData, file: str) -> Mix:
    """Read the file.

    Args:
        config: the flags of the data, of which each source may have others.

    Raises:
        UserError: it cannot be read, or says something that makes no mixture; the message has the place in it.
    """
    try:
        content = yaml.load(read_text(FLAG, file), Loader=_Loader)
    except _OtherReading as error:
        raise UserError(f"{FLAG} {file}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{FLAG} {file}: it is no YAML: {' '.join(str(error).split())}") from None
    whole = _Fields(file, "", content, "an object with `sources`")
    listed = whole.take("sources", _listed)
    later = whole.take("later", _listed, [])
    whole.done()
    sources = tuple(_source(config, _Fields(file, f"sources[{i}]", each)) for i, each in enumerate(listed))
    names = [source.name for source in sources]
    if not sources:
        raise UserError(
            f"{FLAG} {file}: `sources` is empty: name at least one, as `- {{name: web, path: ..., weight: 1}}`"
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{FLAG} {file}: two sources are called {twice}: give each a name of its own")
    changes = tuple(_later(names, _Fields(file, f"later[{i}]", each)) for i, each in enumerate(later))
    _check_weights(file, sources, changes)
    _check_later(file, changes)
    return Mix(sources, changes)


class _OtherReading(ValueError):
    """YAML reads a word as something else than it seems to be."""


class _Loader(UniqueKeys):
    """YAML in which words are what they seem to be.

    By YAML 1.1, which PyYAML reads, 1e3 is a text, 010 the number 8, 1:30 the number 90, and `no` false.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        value = super().construct_object(node, deep) if not _is_date(node) else None
        if isinstance(node, yaml.ScalarNode) and node.style is None and (told := _other_reading(node, value)):
            raise _OtherReading(f"line {node.start_mark.line + 1}: {node.value} is {told}")
        return value


_DECIMAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_OCTAL = re.compile(r"[-+]?0o?[0-7]+")
_QUOTED = "in quotes if it is a text"


def _is_date(node: yaml.Node) -> bool:
    return str(node.tag).endswith(":timestamp")


def _other_reading(node: yaml.ScalarNode, value: Any) -> str:
    """Say how YAML reads a word without quotes, if that is not what it seems to be, and what to write."""
    word = node.value
    if _is_date(node):
        return "a date to YAML: write it in quotes"
    if isinstance(value, bool) and word.lower() not in ("true", "false"):
        return f"{str(value).lower()} to YAML: write {str(value).lower()}, or write it {_QUOTED}"
    if isinstance(value, int) and not isinstance(value, bool) and not _WHOLE.fullmatch(word):
        return f"the number {value} to YAML: write {value} if that is meant, or write it {_QUOTED}"
    if isinstance(value, float) and math.isfinite(value) and not _DECIMAL.fullmatch(word):
        return f"the number {value} to YAML: write {value} if that is meant, or write it {_QUOTED}"
    if isinstance(value, str) and (_DECIMAL.fullmatch(word) or _OCTAL.fullmatch(word)):
        number = int(word.replace("o", ""), 8) if "o" in word else int(word) if word.isdigit() else float(word)
        return f"a text to YAML, and no number: write {number}, or write it {_QUOTED}"
    return ""


class _Fields:
    """The fields of an object in the file, taken one by one."""

    def __init__(self, file: str, place: str, content: Any, kind: str = "an object, as {name: web, ...}"):
        self._file, self._place = file, place
        if not isinstance(content, Mapping):
            raise self.wrong("", content, kind)
        self._left = dict(content)

    def take(self, name: str, read: Callable[[Any], Any], default: Any = ...) -> Any:
        """Return a field; `read` gives its value, or raises a ValueError that says what it should be."""
        if name not in self._left:
            if default is ...:
                close = difflib.get_close_matches(name, map(str, self._left), 1)
                raise UserError(
                    f"{FLAG} {self._file}: {self._at(name)} is missing{f' (it has {close[0]})' if close else ''}"
                )
            return default
        value = self._left.pop(name)
        try:
            return read(value)
        except ValueError as error:
            raise self.wrong(name, value, str(error)) from None

    def wrong(self, name: str, value: Any, expected: str) -> UserError:
        """Return the error of a field."""
        where = self._at(name)
        return UserError(f"{FLAG} {self._file}: {f'{where} is' if where else 'it holds'} {value!r:.60}, not {expected}")

    def refuse(self, name: str, why: str) -> UserError:
        """Return the error of a field that is of the right type."""
        return UserError(f"{FLAG} {self._file}: {self._at(name)}: {why}")

    def done(self, allowed: str = "") -> None:
        """Refuse fields that nobody has taken."""
        if self._left:
            name = str(next(iter(self._left)))
            there = f"; there are {allowed}" if allowed else ""
            raise UserError(f"{FLAG} {self._file}: {self._at(name)}: there is no such field{there}")

    def _at(self, name: str) -> str:
        return ".".join(filter(None, (self._place, name)))


def _source(config: TableData, fields: _Fields) -> MixedSource:
    name, path = fields.take("name", _name), fields.take("path", _text)
    weight, epochs = fields.take("weight", _weight), fields.take("epochs", _above_0, None)
    template = fields.take("template", _text, "")
    there = {each.name for each in dataclasses.fields(config)}
    flag_of_text = next((flag for flag in ("text", "source") if flag in there), "")
    texts = _listed_text(getattr(config, flag_of_text, ()))
    if template and len(texts) != 1:
        raise fields.refuse(
            "template",
            "it becomes one text, and --data.text names 2 columns"
            if texts
            else "this recipe has no --data.text that it could become",
        )
    prefix = fields.take("prefix", _text, "") if "prefix" in there else ""
    if prefix and getattr(config, "prefix", ""):
        raise fields.refuse("prefix", "--data.prefix is given too: leave it out, and give each source its own here")
    renamed: dict[str, str] = {}
    for flag in (each for each in COLUMNS if each in there):
        ours = getattr(config, flag)
        wanted = (ours,) if isinstance(ours, str) else ours
        theirs = fields.take(flag, _columns(len(wanted)), None)
        renamed |= dict(zip(theirs or (), wanted, strict=True)) if theirs else {}
    if template and texts[0] in renamed.values():
        raise fields.refuse("template", f"it is the text of a row, so leave out `{flag_of_text}`")
    flags = {flag: fields.take("config" if flag == "name" else flag, _text, None) for flag in PLACES if flag in there}
    flags["stream"] = fields.take("stream", _switch, None)
    of_columns = (flag for flag in COLUMNS if flag in there)
    of_texts = (*["template"] * bool(texts), *["prefix"] * ("prefix" in there))
    shown = ("name", "path", "weight", "epochs", *of_texts, *of_columns, "config", *PLACES[1:], "stream")
    fields.done(", ".join(shown))
    if flags.get("columns") is not None:
        flags["columns"] = tuple(flags["columns"].split())
    given = {flag: value for flag, value in flags.items() if value is not None}
    text, languages = next(iter(texts), ""), config.txt == "parallel"
    return MixedSource(name, path, weight, epochs, template, prefix, text, languages, renamed, given)


def _later(names: list[str], fields: _Fields) -> Later:
    start = fields.take("from", _above_0)
    weights = fields.take("weights", _weights)
    fields.done("from, weights")
    if strange := next((name for name in weights if name not in names), None):
        raise fields.refuse(f"weights.{strange}", f"there is no such source; there are {', '.join(names)}")
    return Later(start, weights)


def _check_later(file: str, later: tuple[Later, ...]) -> None:
    starts = [each.start for each in later]
    if twice := next((start for start in starts if starts.count(start) > 1), None):
        raise UserError(f"{FLAG} {file}: two changes in `later` are from {twice:g}: write them as one")


def _check_weights(file: str, sources: tuple[MixedSource, ...], later: tuple[Later, ...]) -> None:
    weights = {source.name: source.weight for source in sources}
    for place, changed in [("sources", {}), *((f"later[{i}]", each.weights) for i, each in enumerate(later))]:
        weights |= changed
        if not any(weights.values()):
            raise UserError(f"{FLAG} {file}: {place}: every source has the weight 0: one must have more")


def _listed(value: Any) -> list:
    if not isinstance(value, list):
        raise ValueError("a list")
    return value


def _listed_text(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text" + ": write it in quotes" * isinstance(value, int | float))
    return value


def _switch(value: Any) -> str:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return str(value).lower()


def _name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"\w[\w.-]*", value):
        raise ValueError("a name of letters, digits, _, . and -" + ", in quotes" * isinstance(value, int | float))
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a number")
    return float(value)


def _weight(value: Any) -> float:
    if (number := _number(value)) < 0:
        raise ValueError("a number of 0 or more: 0 leaves the source out")
    return number


def _above_0(value: Any) -> float:
    if (number := _number(value)) <= 0:
        raise ValueError("a number above 0")
    return number


def _weights(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not value:
        raise ValueError("an object of sources and their weights")
    return {str(name): _weight(number) for name, number in value.items()}


def _columns(count: int) -> Callable[[Any], tuple[str, ...]]:
    def read(value: Any) -> tuple[str, ...]:
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or len(names) != count or not all(isinstance(n, str) for n in names):
            raise ValueError("the name of a column" if count == 1 else f"a list of the names of {count} columns")
        return tuple(names)

    return read
