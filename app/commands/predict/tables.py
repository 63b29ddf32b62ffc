"""Tables that are written line by line: parquet or jsonl."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import UserError
from app.storage.drafts import draft_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

FILE = "predictions.parquet"  # to write, unless --to names another
AT_ONCE = 1024  # lines of a parquet file that are written together


def check(name: str, endings: Sequence[str] = (".parquet", ".jsonl")) -> None:
    """Refuse a name whose ending is unknown, and a file that is there already.

    Raises:
        UserError: it is one of these.
    """
    if Path(name).suffix not in endings:
        raise UserError(f"--to {name}: give a file that ends in {' or '.join(endings)}")
    if Path(name).exists():
        raise UserError(f"--to {name} exists already: give another file, or move it away")


def to_copy(rows: "Dataset", columns: Sequence[str]) -> "Dataset":
    """Return columns to copy into the table; those of images have the files as they are, or their paths."""
    import datasets

    copies = rows.select_columns(list(columns))
    for name, feature in copies.features.items():
        if isinstance(feature, datasets.Image):
            copies = copies.cast_column(name, datasets.Image(decode=False))
    return copies


class Writer:
    """Write lines into a file; it has its name only when it is whole."""

    def __init__(self, path: Path, kinds: "pa.Schema | None" = None):
        """Open a draft next to `path`.

        Args:
            kinds: types of columns whose first lines may not show them.
        """
        self._kinds = kinds
        self.path, self.draft = path, draft_of(path)
        self._lines: list[dict[str, Any]] = []
        self._parquet: Any = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._text = self.draft.open("w", encoding="utf-8") if path.suffix in (".jsonl", ".json") else None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
        for file in (self._text, self._parquet):
            if file is not None:
                file.close()
        if kind is None and self.draft.exists():
            self.draft.rename(self.path)
        else:
            self.draft.unlink(missing_ok=True)

    def add(self, line: dict[str, Any]) -> None:
        """Add a line; all lines have the same names."""
        if self._text is not None:
            self._text.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            return
        self._lines.append(line)
        if len(self._lines) >= AT_ONCE:
            self._flush()

    def whole(self, text: str) -> None:
        """Write the whole content of a file that is no table."""
        assert self._text is not None
        self._text.write(text)

    def _flush(self) -> None:
        if not self._lines:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._parquet is None:
            schema = pa.Table.from_pylist(self._lines).schema
            for place, field in enumerate(schema):  # the first lines of a list may be empty
                if field.type == pa.list_(pa.null()):
                    schema = schema.set(place, field.with_type(pa.list_(pa.string())))
            for field in self._kinds or ():
                schema = schema.set(schema.get_field_index(field.name), field)
            self._parquet = pq.ParquetWriter(self.draft, schema)
        table = pa.Table.from_pylist(self._lines, schema=self._parquet.schema)
        self._parquet.write_table(table)
        self._lines = []
