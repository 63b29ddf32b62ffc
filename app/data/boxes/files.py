"""Data sets of boxes as people keep them, COCO, YOLO and Pascal VOC, found by their layout and read as tables.

Each reader yields rows with the columns of COLUMNS. Boxes are left, top, right, bottom; in pixels, or where `relative`
in fractions of the image's sides.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from app.data.cache import cache_of
from app.data.folders import is_hidden, split_in
from app.data.images import formats
from app.data.reading import explained, naming, read_whole
from app.errors import UserError
from app.sampling.hashing import key_of

if TYPE_CHECKING:
    from datasets import Dataset

# SplitFiles of the cache's key: raise it when the rows change.
VERSION = 2
COLUMNS = ("image", "boxes", "classes", "relative", "size", "file", "places")

Row = dict[str, Any]


class SplitFiles(NamedTuple):
    """One split of a data set: what reads it, and from where."""

    read: Callable[..., Iterator[Row]]
    source: str
    """A file or folder, for `read`."""
    names: tuple[str, ...] = ()
    """Names of the classes that the labels number; none: the labels are names, or there are only numbers."""
    numbered: bool = False
    """Labels are numbers without names."""
    more: tuple[str, ...] = ()
    """Further arguments of `read`."""
    watched: tuple[str, ...] = ()
    """Files and folders whose changes mean that it is read again. Default: the source."""


def box_tables(flag: str, paths: Sequence[str]) -> "dict[str, Dataset]":
    """Return the splits of a data set in one of the known layouts; none if this is something else.

    Raises:
        UserError: a file of it cannot be read.
    """
    if len(paths) != 1 or not os.path.exists(paths[0]):
        return {}
    with explained(flag, paths[0]):
        parts = _parts(Path(paths[0]))
        tables = {split: _table(part) for split, part in parts.items()}
    if parts and not any(len(table) for table in tables.values()):
        raise UserError(f"{flag} {paths[0]} has no image in it that a label belongs to")
    return {split: table for split, table in tables.items() if len(table)}


def _parts(path: Path) -> dict[str, SplitFiles]:
    """Return the splits of a data set; also of the only one that is in a folder, or of those for each split in it.

    Raises:
        ValueError: several of them are data sets.
    """
    if part_by_split := _parts_of(path):
        return part_by_split
    inner = {}
    for folder in sorted(path.iterdir()) if path.is_dir() else ():
        if folder.is_dir() and not is_hidden(folder.name) and (parts := _parts_of(folder)):
            inner[folder] = parts
    splits = {split_in(folder.name): parts for folder, parts in inner.items() if list(parts) == ["train"]}
    if inner and len(splits) == len(inner) and all(splits):
        return {split: parts["train"] for split, parts in splits.items()}
    if len(inner) > 1:
        raise ValueError(f"{' and '.join(map(str, inner))} are data sets of their own: give one of them")
    return next(iter(inner.values()), {})


def _parts_of(path: Path) -> dict[str, SplitFiles]:
    from app.data.boxes import coco, voc, yolo

    for layout in (coco.parts, yolo.parts, voc.parts):
        if part_by_split := layout(path):
            return part_by_split
    return {}


def _table(part: SplitFiles) -> "Dataset":
    """Read a split once: it is kept until a file of it changes."""
    import datasets

    label = datasets.ClassLabel(names=list(part.names)) if part.names else datasets.Value("string")
    number = datasets.Value("int64")
    text, values = datasets.Value("string"), datasets.List(datasets.Value("float64"))
    kinds = (
        text,
        datasets.List(values),
        datasets.List(number if part.numbered else label),
        datasets.Value("bool"),
        values,
        text,
        datasets.List(text),
    )
    folder = cache_of(part.watched or [part.source])
    return datasets.Dataset.from_generator(
        part.read,
        features=datasets.Features(dict(zip(COLUMNS, kinds, strict=True))),
        cache_dir=str(folder),
        gen_kwargs={"source": part.source, "names": part.names, "more": part.more},
        fingerprint=key_of("boxes", VERSION, folder.name, part.read.__module__, *part[1:]),
    )


def is_image(name: str) -> bool:
    """Tell whether a file is an image, by its name; other systems leave ._name next to each."""
    return Path(name).suffix.lower() in formats.ENDINGS and not is_hidden(name)


def images_in(folder: Path) -> list[Path]:
    """List the images in a folder and below it, sorted, but for those in hidden folders."""
    return sorted(
        path
        for path in folder.rglob("*")
        if is_image(path.name) and not any(is_hidden(part) for part in path.relative_to(folder).parts)
    )


def load_json(file: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: it is none; the message names it.
    """
    with naming(file, RecursionError):
        return json.loads(read_whole(file))


def size_of(said: Mapping[str, Any], place: str) -> list[float]:
    """Return the width and height that annotations say their image has; nothing if they do not, or say 0.

    Args:
        said: of `width` and `height`, numbers or texts.
        place: of the annotations, for errors.
    """
    sides = [said.get(side) or 0 for side in ("width", "height")]
    try:
        sides = [float(side) for side in sides]
    except (TypeError, ValueError):
        raise ValueError(f"{place} has the width and height {sides}: give numbers, or leave them out") from None
    return sides if all(sides) else []
