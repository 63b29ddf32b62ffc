"""Tables that our own readers write into the cache of their files, as Arrow, from where they are memory-mapped."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from app.data.cache import drafted
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, Features


def written_once(
    place: Path, features: "Features", parts: "Iterable[pa.Table]", reader: str, split: str
) -> "Dataset | None":
    """Write parts of a table into a file, unless it is there, and map it; none if the table has no rows.

    Args:
        place: the file, whose name and folder say what it holds.
        reader: the format that the table was read from, such as json.
        split: the name of the table among others of its data.
    """
    import datasets
    import pyarrow as pa

    if not place.exists():
        with drafted(place) as draft, pa.ipc.new_stream(str(draft), features.arrow_schema) as sink:
            for part in parts:
                sink.write_table(part)
    info = datasets.DatasetInfo(features=features, builder_name=reader)
    table = datasets.Dataset.from_file(str(place), info=info, split=datasets.Split(split))
    table._fingerprint = key_of(place.parent.name, place.name)
    return table if len(table) else None
