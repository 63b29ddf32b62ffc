"""Records that are kept as JSON: dataclasses, read strictly by the types of their fields, and written again whole."""

import dataclasses
import reprlib
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from app.errors import printable

IF_ANY = {"if_any": True}  # metadata of a field that is left out of the JSON where it is None
_GREATEST = 2**63  # a count is smaller
_SIMPLE = {int: "a whole number of 0 or more", float: "a number", str: "a text", bool: "true or false"}


class NewerFormat(ValueError):
    """A record is of a format that a newer version of this project has brought."""


@dataclass(frozen=True)
class JsonRecord:
    """What a file, or a part of it, says, by name.

    A field has a type of JSON, `Any`, another record, or a dictionary (by texts), list or tuple of these; a whole
    number is a count. All must be there, but for those with IF_ANY and `format`: the month in which a field of
    the file last changed its meaning. A file without one is of the first format.
    """

    unknown: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """Fields that this version does not know; they are written again as they were."""

    @classmethod
    def from_json(cls, fields: Any, place: str = "") -> Self:
        """Read what JSON holds.

        Args:
            place: of the record in its file, for errors; empty for the whole file.

        Raises:
            ValueError: a field is missing or of another type; the message says which.
            NewerFormat: it is of a newer format.
        """
        if not isinstance(fields, dict):
            raise _wrong(place, fields, "an object with names")
        _check_format(cls, fields)
        left, read = dict(fields), {}
        for name, (kind, required) in _fields_of(cls).items():
            if name in left:
                read[name] = _read(kind, left.pop(name), f"{place}.{name}" if place else name)
            elif required:
                raise ValueError(f"{f'its {place}' if place else 'it'} has no field {name}")
        return cls(**read, unknown=left)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON holds it, its unknown fields last."""
        written = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name != "unknown" and not (value is None and "if_any" in each.metadata):
                written[each.name] = _plain(value)
        return {**written, **{name: value for name, value in self.unknown.items() if name not in written}}


@dataclass(frozen=True)
class FileSum(JsonRecord):
    """What a file must have to be as it was written."""

    size: int
    xxh3: str
    """Checksum of its contents."""


def _fields_of(record: type[JsonRecord]) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field, and whether JSON must have it."""
    kinds = typing.get_type_hints(record)
    fields = [each for each in dataclasses.fields(record) if each.name != "unknown"]
    return {each.name: (kinds[each.name], each.name != "format" and "if_any" not in each.metadata) for each in fields}


def _check_format(record: type[JsonRecord], fields: dict[str, Any]) -> None:
    ours = next((each.default for each in dataclasses.fields(record) if each.name == "format"), None)
    theirs = fields.get("format")
    if isinstance(ours, str) and isinstance(theirs, str) and theirs > ours:
        raise NewerFormat(f"a newer version wrote it (format {printable(theirs[:20])}, this one reads {ours}): update")


def _read(kind: Any, value: Any, place: str) -> Any:
    """Return a value of JSON as a type has it.

    Raises:
        ValueError: it is of another type.
    """
    if kind is Any or _is_simple(kind, value):
        return value
    whole, parts = typing.get_origin(kind), typing.get_args(kind)
    if whole in (typing.Union, types.UnionType):
        return _read_union(parts, value, place)
    if whole is dict and isinstance(value, dict):
        return {name: _read(parts[1], each, f"{place}.{printable(name)}") for name, each in value.items()}
    if whole in (list, tuple) and isinstance(value, list):
        return _read_list(whole, parts, value, place)
    if whole is Literal and isinstance(value, str) and value in parts:
        return value
    if isinstance(kind, type) and issubclass(kind, JsonRecord):
        return kind.from_json(value, place)
    raise _wrong(place, value, _SIMPLE.get(kind) or _in_words(whole, parts))


def _read_union(parts: tuple, value: Any, place: str) -> Any:
    """Read one of several simple types, or None, or one other type."""
    others = [part for part in parts if part is not type(None)]
    if (value is None and len(others) < len(parts)) or any(_is_simple(part, value) for part in others):
        return value
    if len(others) == 1:
        return _read(others[0], value, place)
    raise _wrong(place, value, " or ".join(_SIMPLE[part] for part in others))


def _read_list(kind: type, parts: tuple, value: list, place: str) -> list | tuple:
    kinds = [parts[0]] * len(value) if kind is list or Ellipsis in parts else list(parts)
    if len(kinds) != len(value):
        raise _wrong(place, value, f"a list of {len(kinds)}")
    return kind(_read(kinds[i], each, f"{place}[{i}]") for i, each in enumerate(value))


def _is_simple(kind: Any, value: Any) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value < _GREATEST
    return kind in _SIMPLE and isinstance(value, int | float if kind is float else kind)


def _in_words(whole: Any, parts: tuple) -> str:
    return f"one of {', '.join(parts)}" if whole is Literal else "a list" if whole in (list, tuple) else "an object"


def _wrong(place: str, value: Any, expected: str) -> ValueError:
    shown = printable(reprlib.repr(value))
    return ValueError(f"{f'its {place}' if place else 'it'} is {shown}, not {expected}")


def _plain(value: Any) -> Any:
    if isinstance(value, JsonRecord):
        return value.to_json()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
