"""The tables of a mixture's sources, with the columns that the flags name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING

from app.data.mixtures.joined import MixedRows, Slice
from app.data.mixtures.mix_file import FLAG, Mix, MixedSource
from app.data.rows import Rows
from app.data.streams.rows import StreamedRows
from app.data.streams.samples import Finish, Finished, StreamedSamples
from app.data.tables.columns import name_of, name_table
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset

Make = Callable[["Dataset"], Rows]
"""Takes a table, and returns its samples; these do their work when they are read."""


@dataclass(frozen=True)
class Part:
    """What is trained on of one source."""

    source: MixedSource
    table: "Dataset"
    """All of its rows; of a stream, some of them."""
    stream: StreamedRows | None
    places: frozenset[str]
    """The files that it is read from."""

    @property
    def rows(self) -> int:
        """Count the rows."""
        return len(self.table if self.stream is None else self.stream)

    def samples(self, make: Make, identity: Sequence[object], finish: Finish = list) -> Rows:
        """Return the samples that `make` makes of tables; for `identity` and `finish` see StreamedSamples."""
        if self.stream is None:
            return Finished(make(self.table), finish)
        of_source = *identity, self.source.template, sorted(self.source.renamed.items())
        source = self.source
        return StreamedSamples(self.stream, lambda table: make(as_flags_say(table, source)), of_source, finish=finish)


@dataclass(frozen=True)
class MixedTables:
    """What is trained on of all sources."""

    mix: Mix
    parts: tuple[Part, ...]

    @property
    def streams(self) -> bool:
        """Tell whether any of them is streamed."""
        return any(part.stream is not None for part in self.parts)

    @property
    def rows(self) -> int:
        """Count the rows of all of them."""
        return sum(part.rows for part in self.parts)

    def cut(self, whole: Rows) -> MixedRows:
        """Return the samples of all sources, which have been made as one data set."""
        slices, start = [], 0
        for part in self.parts:
            slices.append(Slice(whole, start, start + part.rows))
            start += part.rows
        return MixedRows(self.mix, slices)

    def joined(self, make: Make, identity: Sequence[object], finish: Finish = list) -> MixedRows:
        """Return the samples of all sources, each made apart; the arguments are those of Part.samples."""
        return MixedRows(self.mix, [part.samples(make, identity, finish) for part in self.parts])

    def described(self) -> str:
        """Say what each source has, and its weight."""
        told = [
            f"{part.source.told}: {part.rows:,} rows"
            + ("" if part.stream is None else f", streamed in {part.stream.chunks:,} chunks")
            for part in self.parts
        ]
        return f"a mix of {'; '.join(told)}"


def as_flags_say(table: "Dataset", source: MixedSource) -> "Dataset":
    """Return a source's table with the names of columns that the flags have, and with its template filled in.

    Raises:
        UserError: a column is not there.
    """
    name = name_of(table)
    if lacking := next((column for column in source.renamed if column not in table.column_names), None):
        raise UserError(
            f"{FLAG}: the source {source.name} has no column {lacking}; it has {', '.join(table.column_names)}"
        )
    if source.template:
        table = _filled_in(table, source)
    renamed = {theirs: ours for theirs, ours in source.renamed.items() if theirs != ours}
    taken = [ours for ours in renamed.values() if ours in table.column_names and ours not in renamed]
    return name_table(table.remove_columns(taken).rename_columns(renamed), name)


def _filled_in(table: "Dataset", source: MixedSource) -> "Dataset":
    """Add the column of texts that a source's template makes."""
    text = source.text

    def made(rows: dict) -> dict:
        names = list(rows)
        filled = [dict(zip(names, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        used = {name for _, name, _, _ in Formatter().parse(source.template) if name}
        if lacking := next(((row, name) for row in filled for name in used if row[name] is None), None):
            raise UserError(
                f"{FLAG}: a row of {source.name} has nothing in {lacking[1]}, which its template needs: leave such "
                f"rows out ({str(lacking[0])[:200]})"
            )
        return {text: [source.template.format_map(row) for row in filled]}

    try:
        source.template.format_map(dict.fromkeys(table.column_names, ""))
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise UserError(
            f"{FLAG}: the template of {source.name} cannot be filled in ({error}): write columns in braces, of which "
            f"there are {', '.join(table.column_names)}, and other braces twice"
        ) from None
    key = key_of(table._fingerprint, source.template, text)
    return table.map(
        made, batched=True, new_fingerprint=key, remove_columns=[text] if text in table.column_names else []
    )


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
    first = chosen[0].features
    for table, name in zip(chosen, names, strict=True):
        if differ := next((c for c in first if c in table.features and table.features[c] != first[c]), None):
            raise UserError(
                f"{FLAG}: the column {differ} of {name} is {table.features[differ]}, and of {names[0]} "
                f"{first[differ]}: give all sources the same type"
            )
    whole = datasets.concatenate_datasets(chosen)
    whole._fingerprint = key_of(*(table._fingerprint for table in tables), *columns)
    return name_table(whole, f"{FLAG} {', '.join(names)}")
