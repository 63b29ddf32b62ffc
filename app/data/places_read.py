"""From which files a path and a split are read, so that none is both trained on and evaluated on."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from app.data import card
from app.data.folders import files_below, splits_by_name
from app.data.patterns import divided, files_of, fits
from app.data.reading import read_whole
from app.data.streams.shards import Shard, real_place
from app.data.tables.files import READERS, extension
from app.data.tables.splits import EVAL_SPLITS, kind_of, names_in


class Place(NamedTuple):
    """Where rows are read from: equal for the same data, however they are named."""

    path: str
    """A file, a folder, a Hub id, or builtin data."""
    configuration: str = ""
    """Of a folder or a Hub id, the one that is asked for; empty: the default one."""


def places_read(path: str, split: str, configuration: str = "") -> frozenset[str]:
    """Return the real paths of the files of tables that a local path and a split are read from.

    Args:
        split: or slices of several; empty: what is evaluated on where nothing else is said, a split of its own or all.
        configuration: of a folder whose card describes several.
    """
    path = os.path.expanduser(path)
    if not os.path.isdir(path) or divided(path).pattern:
        return frozenset(map(real_place, files_of(path)))
    return frozenset(real_place(os.path.join(path, name)) for name in _of_split(_in_folder(path, configuration), split))


def parts_of(place: Place) -> frozenset[Place] | None:
    """Return the files that a folder's card says a configuration has, and another place itself; None without a card."""
    if not os.path.isdir(place.path):
        return frozenset([place])
    by_split = _by_card(place.path, _names_below(place.path), place.configuration)
    if by_split is None:
        return None
    return frozenset(Place(real_place(os.path.join(place.path, name))) for names in by_split.values() for name in names)


def _names_below(folder: str) -> list[str]:
    return ["/".join(parts) for parts in files_below(folder)]


def _in_folder(path: str, configuration: str) -> dict[str, list[str]]:
    """Return the names of the files of each split: as the card of the folder says, else as the names do."""
    names = _names_below(path)
    if (by_split := _by_card(path, names, configuration)) is not None:
        return by_split
    return _by_name([name for name in names if extension(name) in READERS or Shard(name, 0, "").format])


def _by_card(path: str, names: Sequence[str], configuration: str) -> dict[str, list[str]] | None:
    """Return the files of each split as the card of a folder names them; None if it names none."""
    try:
        described = card.configuration_of(read_whole(Path(path, card.NAME)), configuration)
    except (OSError, ValueError):  # which is said where the data are read
        return None
    if described is None or not described.patterns:
        return None
    by_split: dict[str, list[str]] = {}
    for split, patterns in described.patterns.items():
        of_split = [name for name in names if any(fits(name, pattern) for pattern in patterns)]
        if split:
            by_split.setdefault(kind_of(split) or split, []).extend(of_split)
        else:  # a folder, in which names say it
            start = len(patterns[0].removesuffix("**"))
            for kind, files in _by_name([name[start:] for name in of_split]).items():
                by_split[kind] = [f"{patterns[0][:start]}{file}" for file in files]
    return by_split


def _by_name(names: list[str]) -> dict[str, list[str]]:
    kinds = splits_by_name(names)
    by_split: dict[str, list[str]] = {}
    for name in names:
        for kind in kinds[name] or [""]:
            by_split.setdefault(kind, []).append(name)
    unnamed = by_split.pop("", [])
    return {"train": unnamed} | by_split if unnamed else by_split


def _of_split(by_split: dict[str, list[str]], split: str) -> Iterable[str]:
    own = next((kind_of(word) for word in EVAL_SPLITS if kind_of(word) in by_split), "train")
    wanted = {kind_of(name) or name for name in names_in(split)} if split else {own}
    return [name for kind, names in by_split.items() if kind in wanted for name in names]
