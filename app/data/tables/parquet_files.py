"""Tables from parquet files: columns of the kinds that other programs write, as kinds that recipes read.

The reader of datasets takes the kinds of the first file's columns for all files, and does not say which file is
damaged. Categories and views of texts are texts here, and a column without a value in one file is what others hold.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from app.data.cache import written_once
from app.data.reading import reading
from app.data.tables.columns import is_number, is_text
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, Features

VERSION = 1
"""Part of the cache's key: raise it when the rows change."""
ROWS_AT_ONCE = 1000


def read_parquet(flag: str, path: str, files: Mapping[str, list[str]], folder: Path) -> "dict[str, Dataset]":
    """Read parquet files, those of each split, into tables that a folder keeps.

    Raises:
        UserError: a file cannot be read; it is named.
    """
    tables = {}
    for split, names in files.items():
        features = _features_of(flag, path, names)
        place = folder / f"parquet-{VERSION}-{split}-{key_of(*names)}.arrow"
        tables[split] = written_once(place, features, _parts(flag, names, features), "parquet", split)
    return {split: table for split, table in tables.items() if table is not None}


def _features_of(flag: str, path: str, names: Iterable[str]) -> "Features":
    """Return what the columns of all files hold; a file may lack a column."""
    import pyarrow as pa
    from pyarrow import parquet

    def schemas() -> "Iterator[tuple[str, pa.Schema]]":
        for file in names:
            with reading(flag, file):
                try:
                    schema = parquet.read_schema(file)
                except pa.ArrowException as error:
                    raise ValueError(without_end(error)) from error
            yield file, schema

    return features_of(flag, path, schemas())


def features_of(flag: str, path: str, schemas: "Iterable[tuple[str, pa.Schema]]") -> "Features":
    """Return what the columns of files hold together, by the name and the schema of each; a file may lack a column.

    Raises:
        UserError: a column holds several things, or what nothing here can read.
    """
    import datasets

    origin_and_feature: dict[str, tuple[str, object]] = {}
    for file, schema in schemas:
        for name, feature in _own_features(flag, file, schema).items():
            first, before = origin_and_feature.setdefault(name, (file, feature))
            if (common := _together(before, feature)) is None:
                raise UserError(f"{flag} {path}: the column {name} {_different(before, first, feature, file)}")
            origin_and_feature[name] = (file if common is feature and before != feature else first, common)
    return datasets.Features({name: feature for name, (_, feature) in origin_and_feature.items()})


def without_end(error: "pa.ArrowException") -> str:
    """Say in words for the user what Arrow says of a file, of one that does not end as parquet does more than that."""
    if "magic bytes" not in str(error):
        return str(error)
    return "it does not end as a parquet file does: it is cut, or something else: fetch or write it again"


def _different(one: object, first: str, other: object, second: str) -> str:
    """Say what a column holds in one file and in another, and what to do."""
    ours, theirs = _classes(one), _classes(other)
    if type(one) is type(other) and ours and theirs and ours != theirs:
        pairs = enumerate(itertools.zip_longest(ours, theirs, fillvalue="none"))
        number, (here, there) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
        return (
            f"has other classes in each: the class {number} is {here} in {first} and {there} in {second}: cast it to "
            "one ClassLabel in all files"
        )
    return f"holds {_said(one)} in {first} and {_said(other)} in {second}: give it one type in all files"


def _own_features(flag: str, file: str, schema: "pa.Schema") -> "Features":
    import datasets

    if twice := _twice(schema):
        raise UserError(f"{flag} {file} has two columns named {twice}: give each a name of its own")
    try:
        return datasets.Features.from_arrow_schema(plain(schema))
    except ValueError as error:  # it is about the type of a column that nothing here can read
        strange = next((field for field in plain(schema) if not _is_known(field)), None)
        what = f"its column {strange.name} holds {strange.type}" if strange is not None else str(error)
        raise UserError(f"{flag} {file}: {what}, which cannot be read: leave the column out of the file") from None


def _twice(fields: "Iterable[pa.Field]", inside: str = "") -> str:
    """Return the name of a column, or of a field of one, that another one has too; nothing if there is none."""
    import pyarrow as pa

    names = set()
    for field in fields:
        if field.name in names:
            return f"{inside}{field.name}"
        names.add(field.name)
        kind = field.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        if pa.types.is_struct(kind) and (twice := _twice(kind, f"{inside}{field.name}.")):
            return twice
    return ""


def _is_known(field: "pa.Field") -> bool:
    import datasets
    import pyarrow as pa

    try:
        datasets.Features.from_arrow_schema(pa.schema([field]))
    except ValueError:
        return False
    return True


def _classes(feature: object) -> list[str]:
    """Return the classes of a ClassLabel, or of lists of it; of others none."""
    return getattr(getattr(feature, "feature", feature), "names", None) or []


def _said(feature: object) -> str:
    if classes := _classes(feature):
        shown = f"{', '.join(classes[:3])}{' and more' * (len(classes) > 3)}"
        return f"{'lists of ' * hasattr(feature, 'feature')}the classes {shown}"
    return f"{getattr(feature, 'dtype', feature)!s:.200}"


def _together(one: object, other: object) -> object | None:
    """Return what a column holds that is one thing in one file and another in the next; None if nothing does."""
    import datasets
    import pyarrow as pa

    nothing = datasets.Value("null")
    if one == other or other == nothing:
        return one
    if one == nothing:
        return other
    if not (isinstance(one, datasets.Value) and isinstance(other, datasets.Value)):
        return None
    kinds = one(), other()
    if all(is_text(kind) or (is_number(kind) and not pa.types.is_boolean(kind)) for kind in kinds):
        if any(map(is_text, kinds)):
            return datasets.Value("large_string" if any(map(pa.types.is_large_string, kinds)) else "string")
        schemas = [pa.schema([("a", kind)]) for kind in kinds]
        return datasets.Value(str(pa.unify_schemas(schemas, promote_options="permissive").field("a").type))
    return None


def plain(schema: "pa.Schema") -> "pa.Schema":
    """Return a schema with the types that recipes read, where the file has others for the same values."""
    import pyarrow as pa

    fields = [field.with_type(_plain(field.type)) for field in schema]
    return pa.schema(fields, schema.metadata)


def _plain(kind: "pa.DataType") -> "pa.DataType":
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _plain(kind.value_type)
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if types.is_list(kind) or types.is_list_view(kind):
        return pa.list_(_plain(kind.value_type))
    if types.is_large_list(kind) or types.is_large_list_view(kind):
        return pa.large_list(_plain(kind.value_type))
    return kind


def _parts(flag: str, names: Iterable[str], features: "Features") -> "Iterator[pa.Table]":
    """Yield the rows of files, some at a time."""
    import pyarrow as pa
    from pyarrow import parquet

    for file in names:
        with reading(flag, file, pa.ArrowException), parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(ROWS_AT_ONCE):
                yield with_features(pa.Table.from_batches([batch]), features)


def with_features(part: "pa.Table", features: "Features") -> "pa.Table":
    """Return rows of a file with the columns of all files, each of the kind that it has in all.

    Raises:
        pa.ArrowException: a value is none of that kind.
    """
    import pyarrow as pa
    from datasets.table import table_cast

    part = part.cast(plain(part.schema))
    for name, kind in zip(features, features.arrow_schema.types, strict=True):
        if name not in part.column_names:
            part = part.append_column(name, pa.nulls(len(part), kind))
    return table_cast(part, features.arrow_schema)
