"""Tables from json files: a record in each line, a list of records, or an object with a list for each column.

The reader of datasets looks at the first ten megabytes of the first file for what a column holds, makes times of texts
such as 2024-01-01, numbers of some texts, and another kind of column of what is a number here and a word there. So a
column's kind is that of all of its values, in all splits: numbers if all are, and text if any is.

What json can say and no column can hold is refused with its line: half a letter, values in values in values, and whole
numbers among fractions that cannot keep them.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from app.data.cache import written_once
from app.data.reading import open_text, reading, unreadable
from app.data.tables.columns import counted
from app.data.tables.files import extension
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, Features

VERSION = 1
"""Part of the cache's key: raise it when the rows change."""
ROWS_AT_ONCE = 1000
WANTED = 'give a record, such as {"text": ..., "label": ...}'
EXACT = 2**53
"""Beyond it, floats do not keep each whole number."""
DEEPEST = 50
"""Levels of a value. Arrow's files have 64."""
TOO_DEEP = f"values in more than {DEEPEST} levels: write the inner ones as a text"
_SPACE = re.compile(r"\s*")
# Half of a letter that json writes in two parts, without its other half.
_HALF = r"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])"
_HALF_IN_TEXT, _HALF_IN_BYTES = re.compile(_HALF), re.compile(_HALF.encode())

Record = tuple[str, dict[str, Any]]
"""Where a record is in its file, in words, and what it holds."""
Kind = Any
"""What a column holds, as a feature of datasets; of objects, a dictionary of their keys' kinds."""


def read_json_tables(flag: str, path: str, files: Mapping[str, list[str]], folder: Path) -> "dict[str, Dataset]":
    """Read json files, those of each split, into tables that a folder keeps.

    Raises:
        UserError: a file cannot be read; it is named, and the place in it.
    """
    import datasets

    stem = folder / f"json-{VERSION}-{key_of(*(part for item in files.items() for part in (item[0], *item[1])))}"
    kinds: dict[str, dict[str, Kind]] = {}
    tables = {}
    for split, names in files.items():
        place = stem.with_name(f"{stem.name}-{split}.arrow")
        if place.exists():
            import pyarrow as pa

            with pa.ipc.open_stream(str(place)) as stream:
                features = datasets.Features.from_arrow_schema(stream.schema)
        else:
            if not kinds:
                kinds = _kinds_of(flag, path, files)
            features = datasets.Features(kinds[split])
        tables[split] = written_once(place, features, _tables(flag, path, names, features), "json", split)
    return {split: table for split, table in tables.items() if table is not None}


def _kinds_of(flag: str, path: str, files: Mapping[str, list[str]]) -> dict[str, dict[str, Kind]]:
    """Return what the columns of each split hold; what is a number or a text in several splits is one kind in all."""
    kinds: dict[str, dict[str, Kind]] = {}
    for split, names in files.items():
        kind_by_column = kinds.setdefault(split, {})
        for file, place, record in _all_records(flag, path, names):
            try:
                learn_kinds(kind_by_column, record)
            except ValueError as error:
                raise unreadable(flag, file, ValueError(f"{place} has {error}")) from None
    for name in dict.fromkeys(name for columns in kinds.values() for name in columns):
        have = [columns for columns in kinds.values() if name in columns]
        common = functools.reduce(together, (columns[name] for columns in have))
        if _is_single(common):
            for columns in have:
                columns[name] = common
    return kinds


def learn_kinds(kind_by_column: dict[str, Kind], record: Mapping[str, Any]) -> list[str]:
    """Add what a record holds to what each column holds; return the columns of which that may have changed.

    Raises:
        ValueError: it has too many levels.
    """
    changed = []
    for name, value in record.items():
        before = kind_by_column.get(name)
        if before is _text() and type(value) is str:
            continue
        kind_by_column[name] = kind = kind_of(value) if before is None else together(before, kind_of(value))
        if kind is not before:
            changed.append(name)
    return changed


class Learnt:
    """What the columns of a data set hold, learnt from one record of its shards after another."""

    def __init__(self) -> None:
        self._kinds: dict[str, Kind] = {}
        self._long: dict[str, tuple[str, str]] = {}
        """The shard and the place in it where each column first has a number that floats may not keep."""

    def learn(self, record: Mapping[str, Any], shard: str, place: str | int) -> None:
        """Learn from a record.

        Args:
            place: of the record in its shard, a line or a name.

        Raises:
            ValueError: it has too many levels.
        """
        for name in learn_kinds(self._kinds, record):
            if name not in self._long and _has_long(self._kinds[name]):
                self._long[name] = shard, f"line {place}" if isinstance(place, int) else place

    def add(self, later: "Learnt") -> None:
        """Add what was learnt of shards that come later."""
        for name, kind in later._kinds.items():
            self._kinds[name] = together(self._kinds[name], kind) if name in self._kinds else kind
        self._long = {**later._long, **self._long}

    def kinds(self, named: str) -> dict[str, Kind]:
        """Return what each column holds.

        Args:
            named: what names the place of the shards, for errors.

        Raises:
            UserError: a column has whole numbers that its fractions do not let it keep.
        """
        for name, (shard, place) in self._long.items():
            if _has_long(self._kinds[name], among_fractions=True):
                raise UserError(f"{named}/{shard}: {place}: the column {name} has {TOO_LONG}")
        return self._kinds


TOO_LONG = (
    f"whole numbers beyond {EXACT}, and fractions in other rows, with which it could not keep them: write it as a text "
    "in all rows"
)


def _has_long(kind: Kind, among_fractions: bool = False) -> bool:
    """Tell whether a column has whole numbers that floats may not keep."""
    import datasets

    if isinstance(kind, dict):
        return any(_has_long(inner, among_fractions) for inner in kind.values())
    if isinstance(kind, datasets.List):
        return _has_long(kind.feature, among_fractions)
    single = _single()
    return kind is single["long among fractions"] or (kind is single["long"] and not among_fractions)


@functools.cache
def _single() -> dict[str, Kind]:
    """Return the kinds of single values, by their names; datasets is slow to import."""
    import datasets

    plain = {name: datasets.Value(name) for name in ("null", "bool", "int64", "float64", "string")}
    return {**plain, "long": datasets.Value("int64"), "long among fractions": datasets.Value("float64")}


@functools.cache
def _text() -> Kind:
    return _single()["string"]


@functools.cache
def _mixed() -> Kind:
    """Return the kind of values that have no common one: each row is kept as json writes it."""
    import datasets

    return datasets.Json()


def _is_single(kind: Kind) -> bool:
    return any(kind is each for each in _single().values())


def kind_of(value: Any, levels: int = 1) -> Kind:
    """Return what a value is.

    Args:
        levels: of the record down to the value.

    Raises:
        ValueError: it has too many levels itself.
    """
    import datasets

    single = _single()
    if value is None:
        return single["null"]
    if isinstance(value, str):
        return single["string"]
    if isinstance(value, bool):
        return single["bool"]
    if isinstance(value, int):
        if -EXACT <= value <= EXACT:
            return single["int64"]
        # A longer one is a name of something, and no amount.
        return single["long"] if -(2**63) <= value < 2**63 else single["string"]
    if isinstance(value, float):
        return single["float64"]
    if levels >= DEEPEST:
        raise ValueError(TOO_DEEP)
    if isinstance(value, list):
        return datasets.List(functools.reduce(together, (kind_of(item, levels + 1) for item in value), single["null"]))
    return {name: kind_of(inner, levels + 1) for name, inner in value.items()} if value else _mixed()


def together(one: Kind, other: Kind) -> Kind:
    """Return the kind of a column that holds both: text for numbers and words, and numbers for numbers."""
    import datasets

    single = _single()
    if one is other:
        return one
    if one is single["null"] or other is single["null"]:
        return other if one is single["null"] else one
    if isinstance(one, dict) and isinstance(other, dict):
        # Keys that not all have would be filled up with nothing, which chat templates see.
        return {name: together(one[name], other[name]) for name in one} if one.keys() == other.keys() else _mixed()
    if isinstance(one, datasets.List) and isinstance(other, datasets.List):
        return datasets.List(together(one.feature, other.feature))
    if not (_is_single(one) and _is_single(other)) or single["bool"] in (one, other):
        return _mixed()
    if single["string"] in (one, other):
        return single["string"]
    if one == other == single["int64"]:
        return single["long"]
    return single["long among fractions"] if _has_long(one) or _has_long(other) else single["float64"]


def _tables(flag: str, path: str, names: Iterable[str], features: "Features") -> "Iterator[pa.Table]":
    """Yield the rows of files, some at a time."""
    import pyarrow as pa

    every = _all_records(flag, path, names)
    while records := list(islice(every, ROWS_AT_ONCE)):
        try:
            yield table_of([record for _, _, record in records], features)
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            for file, place, row in records:
                try:
                    table_of([row], features)
                except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                    raise unreadable(flag, file, ValueError(f"{place}: {error}")) from error
            raise


def table_of(rows: Sequence[Mapping[str, Any]], features: "Features") -> "pa.Table":
    """Return records as a table with the columns of all records, each of the kind that it has in all.

    Raises:
        pa.ArrowException, ValueError, TypeError, OverflowError: a record holds something else.
    """
    import pyarrow as pa
    from datasets.table import table_cast

    storage = pa.schema([(name, _stored(kind)) for name, kind in features.items()])
    made = [{name: fitted(row.get(name), kind) for name, kind in features.items()} for row in rows]
    return table_cast(pa.Table.from_pylist(made, storage), features.arrow_schema)


def _stored(kind: Kind) -> "pa.DataType":
    """Return the Arrow type of values as `fitted` returns them."""
    import datasets
    import pyarrow as pa

    if isinstance(kind, dict):
        return pa.struct([(name, _stored(inner)) for name, inner in kind.items()])
    if isinstance(kind, datasets.List):
        return pa.list_(_stored(kind.feature))
    return pa.string() if kind == _mixed() else kind()


def fitted(value: Any, kind: Kind) -> Any:
    """Return a value as a column of some kind holds it: a number among texts is one as json writes it."""
    import datasets

    if value is None:
        return None
    if isinstance(kind, dict):
        return {name: fitted(value[name], inner) for name, inner in kind.items()}
    if isinstance(kind, datasets.List):
        return [fitted(item, kind.feature) for item in value]
    if kind == _mixed() or (kind == _text() and not isinstance(value, str)):
        return json.dumps(value)
    if type(value) is int and not -EXACT <= value <= EXACT and kind == _single()["float64"]:
        raise ValueError(f"{value} is in a column that has {TOO_LONG}")
    return value


def _all_records(flag: str, path: str, names: Iterable[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield all records of files: the file, where it is there, and what it holds."""
    for file in names:
        with reading(flag, file):
            try:
                for place, record in _records(file, f"{flag} {path}"):
                    yield file, place, record
            except RecursionError:
                raise ValueError(f"it has {TOO_DEEP}") from None


def _records(file: str, named: str) -> Iterator[Record]:
    """Yield the records of a file in order.

    Args:
        named: what names the files, for errors.

    Raises:
        UserError, ValueError: the file is no json, or holds something else.
    """
    with open_text(file) as stream:
        first, second = _filled_line(stream), _filled_line(stream)
        stream.seek(0)
        if first.lstrip().startswith("["):
            text = stream.read()
            yield from _of_list(json.loads(text), may_have_half_letters(text))
        elif first.lstrip().startswith("{") and second and _is_json(first):
            yield from _of_lines(stream)
        else:
            yield from _of_whole(stream.read(), file, named)


def _filled_line(stream: TextIO) -> str:
    """Return the next line that is not empty; nothing at the end."""
    while (line := stream.readline()).isspace():
        pass
    return line


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    except RecursionError:  # whoever reads it has the number of the line
        return True
    return True


def may_have_half_letters(text: str | bytes) -> bool:
    """Tell whether a text of json may have a half of a letter without its other half: if not, no string in it has."""
    if isinstance(text, bytes):
        return b"\\u" in text and _HALF_IN_BYTES.search(text) is not None
    return "\\u" in text and _HALF_IN_TEXT.search(text) is not None


def record_of(line: str, number: int) -> dict[str, Any]:
    """Return the record that a line holds.

    Raises:
        ValueError: it holds none, or one that no table can hold; the message has the number of the line.
    """
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError(f"line {number} has {TOO_DEEP}") from None
    except ValueError as error:
        raise ValueError(f"line {number}: {error}: write a whole record in each line") from None
    check_record(record, f"line {number}")
    return record


def check_record(record: Any, place: str) -> None:
    """Raise a ValueError, which names the place, if what stands there is no record with fields."""
    if not isinstance(record, dict):
        raise ValueError(f"{place} is {_shown(record)}: {WANTED}")
    if not record:
        raise ValueError(f"{place} is {{}}, a record without a field: leave it out")


def check_letters(record: Any, place: str) -> None:
    """Raise a ValueError, which names the place, if a text there has half of a letter, which no file of texts holds."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"{place} has {TOO_DEEP}") from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(
            f"{place} has {half} without the other half of the letter (a lone surrogate), which is no text: mend it, "
            "or leave the record out"
        ) from None


def _of_list(items: list, halves: bool) -> Iterator[Record]:
    """Yield the records of a list; texts are records of a text each.

    Args:
        halves: texts may have half letters.
    """
    for number, item in enumerate(items):
        place = counted(number)
        if isinstance(item, str):
            item = {"text": item}
        check_record(item, place)
        if halves:
            check_letters(item, place)
        yield place, item


def _of_lines(lines: Iterable[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        record = record_of(line, number)
        if may_have_half_letters(line):
            check_letters(record, f"line {number}")
        yield f"line {number}", record


def _of_whole(text: str, file: str, named: str) -> Iterator[Record]:
    """Yield the records of a text that has several lines for each.

    A single object may hold columns instead, but in a .jsonl file, which has a record in each line.
    """
    decoder, end, line, records = json.JSONDecoder(), 0, 1, []
    halves = may_have_half_letters(text)
    while (at := cast(re.Match, _SPACE.match(text, end)).end()) < len(text):
        line += text.count("\n", end, at)
        record, end = decoder.raw_decode(text, at)
        if not isinstance(record, dict):
            raise ValueError(f"line {line} has {_shown(record)}, which is no record")
        place = f"the record that begins in line {line}"
        check_record(record, place)
        if halves:
            check_letters(record, place)
        records.append((place, record))
        line += text.count("\n", at, end)
    if not records:
        return
    columns = _columns_in(records[0][1]) if len(records) == 1 and extension(file) != ".jsonl" else None
    yield from records if columns is None else _of_columns(columns, file, named)


def _shown(value: Any) -> str:
    return f"{value!r:.60}"


def _columns_in(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return an object that holds columns, or whole tables; None if it is a record itself."""
    columns = [value for value in fields.values() if isinstance(value, dict | list)]
    records = any(isinstance(value, list) and value and isinstance(value[0], dict) for value in columns)
    return fields if records or 0 < len(columns) == len(fields) else None


def _of_columns(fields: dict[str, Any], file: str, named: str) -> Iterator[Record]:
    """Yield the rows of an object that has a list for each column, or, as pandas writes, an object by row names."""
    import pandas

    try:
        frame = pandas.DataFrame(fields, dtype=object)
        uneven = any(len(value) != len(frame) for value in fields.values())
    except (TypeError, ValueError):
        uneven = True
    if uneven or not _is_by_column(fields):
        raise UserError(
            f"{named}: {file} holds one object with the fields {', '.join(fields)}; give records, as a list, "
            '[{"text": ..., "label": ...}, ...], or one in each line, or else columns of one length, '
            '{"text": [...], "label": [...]}'
        )
    for number, row in enumerate(frame.to_dict("records")):
        yield counted(number), {str(name): value for name, value in row.items()}


def _is_by_column(fields: dict) -> bool:
    """Tell whether all fields are columns: none of records, and not all of lists, as in an object of whole tables."""
    columns = [list(value.values() if isinstance(value, dict) else value) for value in fields.values()]
    texts = any(not any(isinstance(item, list) for item in items) for items in columns)
    return texts and not any(isinstance(item, dict) for items in columns for item in items)
