"""Json files that are one object instead of a list of records: read where they hold a table by column."""

import json
from pathlib import Path

from app.data.cache import fingerprint, remember
from app.data.tables.reading import open_text
from app.errors import UserError
from app.rundir.atomic import drafted

# A line that ends in so many characters and is a record by itself is one of many.
HEAD = 2**20


def by_column(files: dict[str, list[str]], folder: Path, named: str) -> dict[str, list[str]]:
    """Write json files that hold a table by column as parquet files, and return those; return files of records as is.

    By column is {"text": [...], "label": [...]} and, as pandas writes it, {"text": {"0": ...}, "label": {"0": ...}}:
    the json reader would make one row of it. An object of any other shape is a UserError.

    Args:
        files: of each split.
        folder: where to keep what was found out, and the parquet files.
        named: what names the files, for errors.
    """
    every = [file for names in files.values() for file in names]
    kept = folder / f"objects-{fingerprint(*every)}.json"
    if not remember(kept, lambda: any(_object_of(file) is not None for file in every)):
        return files
    places = {file: folder / f"{fingerprint(file)}.parquet" for file in every}
    for file, place in places.items():
        if not place.exists():
            _convert(file, place, named)
    return {split: [str(places[file]) for file in names] for split, names in files.items()}


def _convert(file: str, place: Path, named: str) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    found = _object_of(file)
    try:
        table = pa.table(_columns(found) or {}) if found else None
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # values of several types in one column
        table = None
    if not table:
        shown = f"one object with the fields {', '.join(found)}" if found else "records, unlike the others"
        raise UserError(
            f"{named}: {file} holds {shown}; give records, as a list, "
            '[{"text": ..., "label": ...}, ...], or one a line, or else columns of one length, '
            '{"text": [...], "label": [...]}'
        )
    with drafted(place, unique=True) as draft:
        parquet.write_table(table, draft)


def _object_of(file: str) -> dict | None:
    """Return the one object that a file is; None where it is records, be it one, or no json."""
    try:
        with open_text(file) as stream:
            head = stream.read(HEAD).lstrip()
            first, _, rest = head.partition("\n")
            if not head.startswith("{") or (rest.strip() and _is_json(first)):
                return None
            found = json.loads(head + stream.read())
    except ValueError:  # the json reader says what is wrong
        return None
    nested = [isinstance(value, dict | list) for value in found.values()]
    records = any(isinstance(value, list) and value and isinstance(value[0], dict) for value in found.values())
    return found if records or (nested and all(nested)) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _columns(found: dict) -> dict[str, list] | None:
    """Return the columns that an object holds; None when it is something else."""
    if not all(isinstance(value, dict | list) for value in found.values()):
        return None
    keys = {tuple(value) if isinstance(value, dict) else len(value) for value in found.values()}
    columns = {name: list(value.values()) if isinstance(value, dict) else value for name, value in found.items()}
    records = any(isinstance(item, dict) for values in columns.values() for item in values)
    # A text is no list; an object of whole tables has nothing else.
    texts = any(not any(isinstance(item, list) for item in values) for values in columns.values())
    return columns if len(keys) == 1 and texts and not records else None
