"""The tables of a mixture's sources, with the columns that the flags name."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any

from app.data.mixtures.joined import MixedRows, Slice
from app.data.mixtures.mix_file import FLAG, Mix, MixedSource
from app.data.rows import NO_MEASURES, LeavesOut, Measures, Rows
from app.data.streams.rows import StreamedRows
from app.data.streams.samples import Finish, Finished, StreamedSamples
from app.data.tables.columns import Piece, amount, is_text, name_of, name_table, pieces_of, row_name
from app.data.tables.parallel_files import spread
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset

Make = Callable[["Dataset"], Rows]
"""Takes a table, and returns its samples; these do their work when they are read."""


@dataclass(frozen=True)
class SourceTable:
    """What is trained on of one source."""

    source: MixedSource
    table: "Dataset"
    """All of its rows; of a stream, some of them."""
    stream: StreamedRows | None

    @property
    def rows(self) -> int:
        """Count the rows."""
        return len(self.table if self.stream is None else self.stream)

    def samples(self, make: Make, identity: Sequence[object], finish: Finish = list) -> Rows:
        """Return the samples that `make` makes of tables; for `identity` and `finish` see StreamedSamples."""
        if self.stream is None:
            return Finished(make(self.table), finish)
        told = self.source
        of_source = *identity, told.template, told.prefix, sorted(told.renamed.items())

        def made(table: "Dataset") -> Rows:
            return make(as_flags_say(table, told, in_memory=True))

        return StreamedSamples(self.stream, made, of_source, finish=finish)


@dataclass(frozen=True)
class MixedTables:
    """What is trained on of all sources."""

    mix: Mix
    tables: tuple[SourceTable, ...]

    @property
    def streams(self) -> bool:
        """Tell whether any of them is streamed."""
        return any(each.stream is not None for each in self.tables)

    @property
    def rows(self) -> int:
        """Count the rows of all of them."""
        return sum(each.rows for each in self.tables)

    def cut(self, whole: Rows) -> MixedRows:
        """Return the samples of all sources, which have been made as one data set.

        Raises:
            UserError: all rows of a source were left out.
        """
        slices, start, rows = [], 0, 0
        for each in self.tables:
            rows += each.rows
            end = whole.kept_before(rows) if isinstance(whole, LeavesOut) else rows
            if end == start:
                raise UserError(f"{FLAG}: no row of {each.source.name} can be used: leave this source out")
            slices.append(Slice(whole, start, end))
            start = end
        return MixedRows(self.mix, slices, whole=whole)

    def joined(
        self, make: Make, identity: Sequence[object], measures: Measures = NO_MEASURES, finish: Finish = list
    ) -> MixedRows:
        """Return the samples of all sources, each made apart; the arguments are those of StreamedSamples."""
        return MixedRows(self.mix, [each.samples(make, identity, finish) for each in self.tables], measures)

    def described(self) -> str:
        """Say what each source has, and its weight."""
        return self.mix.described(
            f"{each.rows:,} rows"
            + ("" if each.stream is None else f", streamed in {amount(each.stream.chunks, 'chunk')}")
            for each in self.tables
        )


def as_flags_say(table: "Dataset", source: MixedSource, in_memory: bool = False) -> "Dataset":
    """Return a source's table with the names of columns that the flags have, and with its template and prefix.

    Args:
        in_memory: whether texts are made there, as those of a chunk are, instead of in a file.

    Raises:
        UserError: a column is not there, or the template cannot be filled in.
    """
    name, pieces = name_of(table), pieces_of(table)
    if source.languages:
        table = spread(table)
    if lacking := next((column for column in source.renamed if column not in table.column_names), None):
        raise UserError(
            f"{FLAG}: the source {source.name} has no column {lacking}; it has {', '.join(table.column_names)}"
        )
    if source.template:
        table = _filled_in(table, source, in_memory)
    renamed = {theirs: ours for theirs, ours in source.renamed.items() if theirs != ours}
    taken = [ours for ours in renamed.values() if ours in table.column_names and ours not in renamed]
    table = table.remove_columns(taken).rename_columns(renamed)
    if source.prefix and source.text in table.column_names and is_text(table.data.schema.field(source.text).type):
        table = _prefixed(table, source, in_memory)
    return name_table(table, name, pieces)


def _filled_in(table: "Dataset", source: MixedSource, in_memory: bool) -> "Dataset":
    """Add the column of texts that a source's template makes."""
    try:
        source.template.format_map(dict.fromkeys(table.column_names, ""))
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise UserError(
            f"{FLAG}: the template of {source.name} cannot be filled in ({error}): write columns in braces, of which "
            f"there are {', '.join(table.column_names)}, and other braces twice"
        ) from None
    used = {re.split(r"[.\[]", name)[0] for _, name, *_ in Formatter().parse(source.template) if name}

    def made(rows: dict[str, list], numbers: list[int]) -> dict[str, list]:
        texts = []
        for number, *values in zip(numbers, *rows.values(), strict=True):
            row = dict(zip(rows, values, strict=True))
            if lacking := next((name for name in sorted(used) if row[name] is None), None):
                raise UserError(
                    f"{FLAG}: the template of {source.name}: {row_name(table, number)} has nothing in {lacking}; leave "
                    "such rows out of the data"
                )
            texts.append(source.template.format_map(row))
        return {source.text: texts}

    return _with_texts(table, sorted(used), made, source.text, (source.template,), in_memory)


def _prefixed(table: "Dataset", source: MixedSource, in_memory: bool) -> "Dataset":
    """Put a source's prefix before each text; those that are missing or empty stay so, to be refused as such."""

    def made(rows: dict[str, list], _: list[int]) -> dict[str, list]:
        return {
            source.text: [f"{source.prefix}{text}" if text and text.strip() else text for text in rows[source.text]]
        }

    return _with_texts(table, [source.text], made, source.text, ("prefix", source.prefix), in_memory)


def _with_texts(
    table: "Dataset",
    read: Sequence[str],
    make: Callable[[dict[str, list], list[int]], dict[str, list]],
    column: str,
    decided_by: Sequence[str],
    in_memory: bool,
) -> "Dataset":
    """Return a table with a column of texts, which `make` makes of the columns `read` of rows, and their numbers."""
    import datasets

    key = key_of(table._fingerprint, *decided_by, column)
    old = [column] if column in table.column_names else []
    if not in_memory:
        return table.map(make, batched=True, with_indices=True, new_fingerprint=key, remove_columns=old)
    # Without `map`, which shows a bar and writes a file for each chunk.
    texts = make(table.select_columns(list(read))[:], list(range(len(table))))
    kept = table.remove_columns(old)
    return kept.add_column(column, texts[column], new_fingerprint=key, feature=datasets.Value("string"))


def common(tables: "Sequence[Dataset]", columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return those of some columns that the tables of all sources have.

    Raises:
        UserError: some sources have one, and others do not.
    """
    found = []
    for column in columns:
        having = [name for table, name in zip(tables, names, strict=True) if column in table.column_names]
        if lacking := [name for name in names if name not in having] if having else []:
            raise UserError(
                f"{FLAG}: {having[0]} has a column {column}, and {lacking[0]} has none: give it to all sources, or to "
                "none of them"
            )
        found += [column] * bool(having)
    return found


def concatenated(tables: "Sequence[Dataset]", columns: Sequence[str], names: Sequence[str]) -> "Dataset":
    """Return the rows of sources in one table, of these columns.

    Raises:
        UserError: one has other columns, or other types in them.
    """
    import datasets

    for table, name in zip(tables, names, strict=True):
        if lacking := next((column for column in columns if column not in table.column_names), None):
            raise UserError(
                f"{FLAG}: the source {name} has no column {lacking}; it has {', '.join(table.column_names)}: name the "
                f"one it has in its place as `text`, `label` and so on"
            )
    chosen = [table.select_columns([*dict.fromkeys(columns)]) if columns else table for table in tables]
    for column in chosen[0].column_names:
        having = [place for place, table in enumerate(chosen) if column in table.column_names]
        first = chosen[0].features[column]
        if all(chosen[place].features[column] == first for place in having):
            continue
        kind = _together([chosen[place] for place in having], column)
        for place in having:
            theirs = chosen[place].features[column]
            if kind is None and theirs != first:
                raise UserError(
                    f"{FLAG}: the column {column} of {names[place]} is {_told(theirs)}, and of {names[0]} "
                    f"{_told(first)}: give all sources the same type"
                )
            if kind is not None:
                chosen[place] = chosen[place].cast_column(column, kind)
    whole = datasets.concatenate_datasets(chosen)
    whole._fingerprint = key_of(*(table._fingerprint for table in tables), *columns)
    pieces, start = [], 0
    for table in tables:  # selections too count the rows of the whole table that they are of
        own = pieces_of(table) or [Piece(0, name_of(table))]
        pieces += [Piece(start + piece.start, piece.name) for piece in own]
        start += len(table.data)
    return name_table(whole, f"{FLAG} {', '.join(names)}", pieces)


def _together(tables: "Sequence[Dataset]", column: str) -> Any:
    """Return a type for a column that several tables have in forms of one kind: images, texts, or integers; else none.

    Formats write images as files in a column or as paths, and the same text or integer in several widths.
    """
    import datasets
    import pyarrow.types as types

    features = [table.features[column] for table in tables]
    kinds = [table.data.schema.field(column).type for table in tables]
    if any(isinstance(feature, datasets.Image) for feature in features):
        of_files = all(
            isinstance(feature, datasets.Image) or types.is_binary(kind) or types.is_large_binary(kind)
            for feature, kind in zip(features, kinds, strict=True)
        )
        return datasets.Image() if of_files else None
    if any(isinstance(feature, datasets.ClassLabel) for feature in features):
        return None
    if all(map(is_text, kinds)):
        return datasets.Value("string")
    return datasets.Value("int64") if all(map(types.is_integer, kinds)) else None


def _told(feature: Any) -> str:
    """Name a type, of classes with their names."""
    names = getattr(feature, "names", None)
    return f"of the classes {', '.join(names)}" if names else str(feature)
