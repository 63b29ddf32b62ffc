"""Leaks: no row is both trained on and evaluated on, by whatever files, folders, splits and sources both are given."""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from app.data import card
from app.data.folders import files_below, splits_by_name
from app.data.patterns import divided, files_of, fits
from app.data.reading import read_whole
from app.data.streams.shards import Shard, real_place
from app.data.tables.files import READERS, extension
from app.data.tables.splits import Rows, for_evaluation, kind_of, names_in, overlap
from app.errors import UserError


class Place(NamedTuple):
    """Where rows are read from: equal for the same data, however they are named."""

    path: str
    """A file, a folder, a Hub id, or builtin data."""
    configuration: str = ""
    """Of a folder or a Hub id, the one that is asked for; empty: the default one."""


class Taken(NamedTuple):
    """Rows of a data set that is read as a whole."""

    places: Sequence[Place]
    """Its files, or the folder or Hub id with the configuration."""
    rows: list[Rows]


class Trained(NamedTuple):
    """What is trained on."""

    whole: tuple[Taken, ...] = ()
    """Of data sets that are read as a whole."""
    streamed: frozenset[str] = frozenset()
    """Files or URLs of what is streamed."""

    @classmethod
    def of(cls, parts: "Iterable[Trained]") -> "Trained":
        """Return all parts of what is trained on."""
        listed = [*parts]
        return cls(
            tuple(each for part in listed for each in part.whole), frozenset().union(*(p.streamed for p in listed))
        )

    def files(self, scored: Place | None) -> frozenset[str]:
        """Return the files of which none may be evaluated on.

        Args:
            scored: what is evaluated on, if it is read as a whole; what is trained on of the same files or the same
                folder is then left to `refuse_rows`, which knows its rows.
        """
        files = [self.streamed]
        for each in self.whole:
            place = each.places[0]
            if os.path.isdir(place.path):
                splits = "+".join(name for name, _, _ in each.rows)
                files += [] if place == scored else [places_read(place.path, splits, place.configuration)]
            elif scored is None or os.path.isdir(scored.path):
                files += [frozenset(place.path for place in each.places)]
        return frozenset().union(*files)


NOTHING = Trained()


def refuse_shared(trained: Mapping[str, Trained]) -> None:
    """Refuse sources that share a file: rows that one holds out for evaluation would be trained on in the other.

    Args:
        trained: of each source of a mixture, by its name.
    """
    parts = {name: _Parts.of(each) for name, each in trained.items()}
    for one, other in itertools.combinations(parts, 2):
        if shared := parts[one].shared(parts[other]):
            raise UserError(
                f"--data.mix: {one} and {other} both read {shared}, so what one holds out for evaluation would be "
                "trained on in the other: give --data.eval-path, or sources without common files"
            )


class _Parts(NamedTuple):
    """What may be read of a source, whatever the split."""

    files: frozenset[Place]
    """Also Hub ids."""
    folders: frozenset[Place]
    """Of which no card says what is read: it may be all."""

    @classmethod
    def of(cls, trained: Trained) -> "_Parts":
        """List the files of folders whose card names them."""
        files, folders = set(map(Place, trained.streamed)), set[Place]()
        for place in (place for each in trained.whole for place in each.places):
            if not os.path.isdir(place.path):
                files.add(place)
            elif (by_split := _by_card(place.path, _names_below(place.path), place.configuration)) is None:
                folders.add(place)
            else:
                names = (name for of_split in by_split.values() for name in of_split)
                files |= {Place(real_place(os.path.join(place.path, name))) for name in names}
        return cls(frozenset(files), frozenset(folders))

    def shared(self, other: "_Parts") -> str:
        """Name something that both read; nothing if there is nothing."""
        both = self.files & other.files
        for folders, parts in ((self.folders, other), (other.folders, self)):
            both |= {each for each in parts.files | parts.folders for folder in folders if _is_in(each, folder)}
        return min(both, default=Place("")).path


def _is_in(place: Place, folder: Place) -> bool:
    """Tell whether a place of data is the same as another one, or in it, whatever their configurations."""
    return place.path == folder.path or place.path.startswith(f"{folder.path}/")


def refuse_files(flag: str, path: str, trained: frozenset[str], scored: frozenset[str]) -> None:
    """Refuse to evaluate on files that are trained on, by whatever names, folders or patterns both are given.

    Args:
        flag: the one that names what is evaluated on, by `path`.
    """
    if shared := sorted(trained & scored):
        raise UserError(
            f"{flag} {path}: {shared[0]} would be both trained on and evaluated on; give other data, or leave the flag "
            "out"
        )


def refuse_rows(flag: str, path: str, trained: Taken, scored: Taken, fix: str) -> None:
    """Refuse to evaluate on rows that are trained on.

    Args:
        flag: the one that asks for it, by `path`.
        fix: what to do, to end the message with.
    """
    if scored.places == trained.places:
        shared = overlap(trained.rows, scored.rows)
    else:
        shared = ", ".join(place.path for place in scored.places if place in trained.places)
    if shared:
        raise UserError(f"{flag} {path}: {shared} would be both trained on and evaluated on{fix}")


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
    own = next(iter(for_evaluation(by_split)), "train")
    wanted = {kind_of(name) or name for name in names_in(split or own)}
    return [name for kind, names in by_split.items() if kind in wanted for name in names]
