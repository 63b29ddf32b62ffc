"""Json files that are one object with a list for each column, written out as the records that datasets reads.

datasets makes one row of {"text": [...], "label": [...]} and of what pandas writes, {"text": {"0": ...}, ...}.
"""

import json
from pathlib import Path

from app.data.cache import drafted
from app.data.reading import open_text
from app.errors import UserError
from app.sampling.hashing import key_of

HEAD = 2**20
"""Characters of the longest first line that is looked at to tell whether a file has a record in each line."""


def as_records(file: str, folder: Path, named: str) -> str:
    """Return a json file of the same rows that is no single object: the file itself, or one written from it.

    Args:
        folder: where to keep the written file.
        named: what names the files, for errors.

    Raises:
        UserError: the file is one object, but not of columns of one length.
    """
    import pandas

    place = folder / f"{key_of(file)}.jsonl"
    if place.exists() or (found := _object_of(file)) is None:
        return str(place) if place.exists() else file
    try:
        frame = pandas.DataFrame(found, dtype=object)
        uneven = any(len(value) != len(frame) for value in found.values())
    except (TypeError, ValueError):
        uneven = True
    if uneven or not _is_by_column(found):
        raise UserError(
            f"{named}: {file} holds one object with the fields {', '.join(found)}; give records, as a list, "
            '[{"text": ..., "label": ...}, ...], or one in each line, or else columns of one length, '
            '{"text": [...], "label": [...]}'
        )
    with drafted(place) as draft:
        draft.write_text("".join(json.dumps(row) + "\n" for row in frame.to_dict("records")))
    return str(place)


def _object_of(file: str) -> dict | None:
    """Return the one object that a file is; None where it has records, even one, or is no json."""
    try:
        with open_text(file) as stream:
            while (first := stream.readline(HEAD)).isspace():
                pass
            if not first.lstrip().startswith("{") or (_is_json(first) and stream.read(HEAD).strip()):
                return None
            stream.seek(0)
            found = json.load(stream)
    except ValueError:  # the reader of datasets says what is wrong
        return None
    columns = [value for value in found.values() if isinstance(value, dict | list)]
    records = any(isinstance(value, list) and value and isinstance(value[0], dict) for value in columns)
    return found if records or 0 < len(columns) == len(found) else None


def first_keys(file: str) -> list[str]:
    """Return the keys of the first record of a json file; nothing if it has none that can be read."""
    try:
        with open_text(file) as stream:
            text = stream.read(HEAD)
        found, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    except ValueError:  # the reader of datasets says what is wrong
        return []
    return list(found)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _is_by_column(found: dict) -> bool:
    """Tell whether all fields are columns: none of records, and not all of lists, as in an object of whole tables."""
    columns = [list(value.values() if isinstance(value, dict) else value) for value in found.values()]
    texts = any(not any(isinstance(item, list) for item in items) for items in columns)
    return texts and not any(isinstance(item, dict) for items in columns for item in items)
