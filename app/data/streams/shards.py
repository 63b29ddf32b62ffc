"""Shards: the files of one data set, in a folder, behind a pattern, or at a URL, and the formats that they have."""

import os
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from app import storage
from app.data import card
from app.data.file_names import LOGS, is_readme, log_among, looks_like_data, run_folders
from app.data.folders import check_numbered, entries_below, is_hidden, splits_by_name, splits_meant, trouble_of
from app.data.patterns import divided, files_of, fits
from app.data.reading import near
from app.data.tables.splits import SPLIT_WORDS, kind_of
from app.errors import UserError
from app.storage.addresses import address

FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".tar": "tar"}
PACKED = (".gz", ".zst")
READ = "parquet, jsonl (also .gz and .zst), and tar in the layout of WebDataset"
NONE = f"it has no shards; what is streamed: {READ}"
NAMED = 3  # files of a split that are named where shards are described


class Shard(NamedTuple):
    """A file of a data set."""

    name: str
    """Below the folder of the data set, with slashes."""
    size: int
    """In bytes."""
    tag: str
    """Of its contents: it changes when they do."""

    @property
    def format(self) -> str:
        """Return parquet, jsonl or tar; nothing for another file."""
        return FORMATS.get(PurePosixPath(self.plain_name).suffix.lower(), "")

    @property
    def packed(self) -> str:
        """Return .gz or .zst for a compressed file; else nothing."""
        ending = PurePosixPath(self.name).suffix.lower()
        return ending if ending in PACKED else ""

    @property
    def ending(self) -> str:
        """Return the end of its name that says its format, such as .jsonl.gz."""
        return PurePosixPath(self.plain_name).suffix + self.name[len(self.plain_name) :]

    @property
    def plain_name(self) -> str:
        """Return its name without the ending of a compressed file."""
        return self.name[: len(self.name) - len(self.packed)]


class Shards(NamedTuple):
    """The files of a data set, of one format."""

    folder: str
    """Or URL, that names of shards are below."""
    files: tuple[Shard, ...]
    """In the order of their names."""

    @property
    def format(self) -> str:
        """Return the format that all of them have."""
        return self.files[0].format

    def place_of(self, shard: int) -> str:
        """Return the path or URL of a shard, for messages."""
        return f"{self.folder}/{self.files[shard].name}"

    @property
    def places(self) -> frozenset[str]:
        """Return one path or URL for each shard, whatever names it has."""
        return frozenset(real_place(self.place_of(number)) for number in range(len(self.files)))


class Survey(NamedTuple):
    """The shards that a path names, by their splits."""

    flag: str
    """That names the path, for errors."""
    path: str
    folder: str
    """Or URL, that names of shards are below."""
    files: tuple[Shard, ...]
    """In the order of their names, if they are named one by one or by a pattern: they are of any split."""
    by_split: dict[str, tuple[Shard, ...]]
    """Of a whole folder: the shards of train, validation and test, as far as there are any."""
    unread: tuple[str, ...]
    """Of a whole folder: the names of other files."""

    def of(self, split: str) -> Shards:
        """Return the shards of a split.

        Raises:
            UserError: there are none, they have several formats, or one is empty.
        """
        files = self.files or self.by_split.get(kind_of(split), ())
        if not files and self.by_split:
            every = [shard for shards in self.by_split.values() for shard in shards]
            pattern = "**/" * any("/" in shard.name for shard in every) + "*" + every[0].ending
            raise UserError(
                f"{self.flag} {self.path}: it has no shards of the split {split}; by the words in their names, there "
                f"are {self.described()}: name files by a pattern, such as '{self.folder}/{pattern}', to take "
                "them whatever they are called"
            )
        _check(self.flag, self.path, files)
        return Shards(self.folder, files)

    def described(self) -> str:
        """Say how many shards each split has, and name the first ones."""
        parts = {"": self.files} if self.files else self.by_split
        told = {split: f"{len(files):,} ({_first([shard.name for shard in files])})" for split, files in parts.items()}
        return "; ".join(f"{split} {files}".lstrip() for split, files in told.items())

    def described_unread(self) -> str:
        """Name the first files that are not read; nothing if there are none."""
        return _first(self.unread)

    def notes(self) -> list[str]:
        """Return what the user should know of the shards, a line each."""
        unread = [f"no shards, and not read: {self.described_unread()}"] if self.unread else []
        return [f"shards: {self.described()}", *unread]


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def real_place(path: str) -> str:
    """Return one path or URL for a file, whatever names it has."""
    url = address(path)
    return os.path.realpath(path) if url is None else str(url)


def is_url(path: str) -> bool:
    """Tell whether a path is a URL that a storage reads."""
    return address(path) is not None


def format_at(path: str) -> str:
    """Return the format of the shards at a local path, which may be refused for other reasons; nothing if none is."""
    # By their names alone: these may be a million pictures.
    below = os.path.isdir(path) and not divided(path).pattern
    names = (each.name for each in entries_below(path)) if below else (name for name in files_of(path))
    return next(filter(None, (Shard(name, 0, "").format for name in names)), "")


def find_shards(flag: str, path: str, split: str = "train") -> Shards:
    """List the shards of a split.

    Args:
        path: a folder, a file, or a pattern such as data/*.parquet; local or a URL.
        split: train, validation or test, by the words in the names; of one file, and of files behind a pattern, all.

    Raises:
        UserError: there are none, they have several formats, or one is empty.
    """
    return survey(flag, path).of(split)


def survey(flag: str, path: str) -> Survey:
    """List the shards of all splits.

    Raises:
        UserError: there is nothing of this name, or which split a shard is of cannot be told.
    """
    what = f"{flag} {path}"
    try:
        place = _place(path)
        entries = place.entries(what)
    except OSError as error:
        raise UserError(f"{what}: cannot be listed: {error.strerror or error}") from None
    if not entries:
        raise UserError(f"{what}: there is nothing of this name{'' if is_url(path) else near(path)}")
    files = sorted(Shard(each.name, each.size, each.tag) for each in entries)
    if place.file or place.pattern:
        _check(flag, path, files)
        return Survey(flag, path, place.folder, tuple(files), {}, ())
    of_runs = run_folders(file.name for file in files)  # whose metrics.jsonl would be taken for a shard
    files = [file for file in files if not file.name.startswith(of_runs)]
    shards = [shard for shard in files if shard.format and not _is_marker(shard.name)]
    if log := log_among(each.name for each in entries):
        raise UserError(f"{what}: {log}")
    if not shards:
        raise UserError(f"{what}: {NONE}")
    by_split = _by_split(what, shards)
    if any(file.name == card.NAME for file in files):
        _check_card(what, place.folder, by_split)
    return Survey(flag, path, place.folder, (), by_split, _unread(what, files, shards))


def _check_card(what: str, folder: str, by_split: dict[str, tuple[Shard, ...]]) -> None:
    """Refuse shards of which the data set's card says something else than their names.

    Raises:
        UserError: it does, has several configurations, or cannot be read.
    """
    fix = "name the files to train on by a pattern"
    try:
        described = card.configurations(storage.at(folder).read_text(card.NAME, follow=True))
    except (OSError, ValueError) as error:
        raise UserError(f"{what}: {card.NAME} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if described[1:]:
        names = ", ".join(each.name for each in described)
        raise UserError(f"{what}: {card.NAME} says that these are several data sets ({names}): {fix}")
    if not described or not (patterns := described[0].patterns):
        return
    for split, shards in by_split.items():
        for shard in shards:
            said = [other for other, own in patterns.items() if any(fits(shard.name, pattern) for pattern in own)]
            if [kind_of(other) or other or split for other in said] != [split]:
                other = f"of {' and '.join(said)}" if said else "of none that is read"
                raise UserError(
                    f"{what}: by its name, {shard.name} is of {split}, and {card.NAME} says that it is {other}: {fix}"
                )


def _unread(what: str, files: Sequence[Shard], shards: Sequence[Shard]) -> tuple[str, ...]:
    """Return the names of files that are no shards, without those that never are data.

    Raises:
        UserError: one looks like data.
    """
    read = {shard.name for shard in shards}
    others = [file.name for file in files if file.name not in read and not is_readme(file.name)]
    others = [name for name in others if not any(map(is_hidden, name.split("/")))]
    if lost := next((name for name in others if looks_like_data(name, shards[0].format)), None):
        why = "has a name with _ at its beginning, as what is no data" if _is_marker(lost) else "cannot be streamed"
        raise UserError(
            f"{what}: {lost} would be left out, as it {why}: take it away, or name the shards by a pattern; what is "
            f"streamed: {READ}"
        )
    return tuple(name for name in others if not _is_marker(name))


def _by_split(what: str, shards: Sequence[Shard]) -> dict[str, tuple[Shard, ...]]:
    """Divide the shards of a folder by their splits.

    Raises:
        UserError: a name says two splits or one that does not exist, some names say train and others nothing, or
            datasets would see another split in a name than people do.
    """
    names = [shard.name for shard in shards]
    kinds, meant = splits_by_name(names), splits_meant(names)
    check_numbered(what, names)
    split_of_shard: dict[Shard, str] = {}
    for shard in shards:
        said = kinds[shard.name]
        if len(said) > 1:
            raise UserError(
                f"{what}: {shard.name} is named for {' and '.join(sorted(said))}: give it the name of one split, or "
                "name the files to train on by a pattern"
            )
        if strange := said - {*SPLIT_WORDS}:
            raise UserError(
                f"{what}: {shard.name} is of the split {next(iter(strange))}, and what is streamed has "
                f"{', '.join(SPLIT_WORDS)}: name the files to train on by a pattern"
            )
        split_of_shard[shard] = next(iter(said), "")
    named = [shard for shard, split in split_of_shard.items() if split]
    odd = [shard for shard, split in split_of_shard.items() if not split]
    if "train" not in split_of_shard.values():
        # Next to shards that are named for other splits, the rest is to train on, unless it is named in another way.
        own = splits_meant([shard.name for shard in odd])
        odd = [shard for shard in odd if own[shard.name]]
    if named and odd:
        raise UserError(
            f"{what}: the name of {named[0].name} says its split, and that of {odd[0].name} does not in the same way: "
            "put the shards of each split into a folder of its name, or name the files to train on by a pattern"
        )
    for shard in shards:
        if others := meant[shard.name] - {split_of_shard[shard] or "train"}:
            raise UserError(
                f"{what}: {shard.name} is named for {' and '.join(sorted(others))}, and would be read for "
                f"{split_of_shard[shard] or 'train'}: write the words for splits in lower case, parted from others by "
                "-, _, . or a blank, or name the files by a pattern"
            )
    by_split: dict[str, tuple[Shard, ...]] = {}
    for split in SPLIT_WORDS:
        if files := tuple(shard for shard in shards if (split_of_shard[shard] or "train") == split):
            by_split[split] = files
    return by_split


class Place(NamedTuple):
    """Where files are looked for."""

    folder: str
    file: str = ""
    """The name of the only one in it, if it is one."""
    pattern: str = ""
    """Of the names below the folder, if several are meant."""

    def entries(self, what: str) -> list[storage.Entry]:
        """List the files that there are: the one, those of the pattern, or all, also hidden ones.

        Args:
            what: names the place in errors.

        Raises:
            OSError: nobody knows.
            UserError: what has the name of a file is none.
        """
        files = storage.at(self.folder)
        if self.file:
            names = [self.file]
        elif address(self.folder):
            return [each for each in files.files() if self._means(each.name)]
        elif not os.path.isdir(self.folder):
            return []
        else:
            trouble_by_name = self._below_pattern() if self.pattern else self._below()
            if odd := next(filter(trouble_by_name.get, trouble_by_name), None):
                fix = "take it away, or name the shards by a pattern"
                raise UserError(f"{what}: {odd} {trouble_by_name[odd]}: {fix}")
            names = [*trouble_by_name]
            names += [each for each in os.listdir(self.folder) if each in LOGS and not self.pattern]
        entries = (files.entry(name) for name in names)
        return [entry for entry in entries if entry is not None]

    def _below(self) -> dict[str, str]:
        """Return of what lies below the folder, by its name, why it cannot be read: nothing of a file."""
        return {each.name: each.trouble for each in entries_below(self.folder)}

    def _below_pattern(self) -> dict[str, str]:
        """Return the same of what the pattern names, but for folders."""
        paths = [path for path in files_of(os.path.join(self.folder, self.pattern)) if not os.path.isdir(path)]
        trouble_by_name = {os.path.relpath(path, self.folder): trouble_of(path) for path in paths}
        return {name: trouble for name, trouble in trouble_by_name.items() if self._means(name)}

    def _means(self, name: str) -> bool:
        """Tell whether a pattern, if there is one, is meant for a file below the folder."""
        return not self.pattern or (fits(name, self.pattern) and not any(map(is_hidden, name.split("/"))))


def _place(path: str) -> Place:
    """Find out what a path names.

    Raises:
        OSError: nobody knows.
    """
    if url := address(path):
        slashes = re.sub("^([^/]+:)/+", r"\1//", path.rstrip("/"))  # of which a `Path` keeps one
        folder, pattern = divided(slashes, _is_in_store, first=3)
    else:
        folder, pattern = divided(os.path.expanduser(path))
    if pattern:
        return Place(folder or ".", pattern=pattern)
    above, _, name = folder.rpartition("/")
    if url:
        name = unquote(name) if url.scheme.startswith("http") else name
        # Whatever has a format may still be a folder; a web server has files alone, and lists none.
        is_file = bool(Shard(name, 0, "").format or (url.scheme.startswith("http") and url.key))
        is_file = is_file and storage.at(above).is_file(name)
    else:
        is_file = os.path.isfile(folder)
    return Place(above or ("/" if folder.startswith("/") else "."), file=name) if is_file else Place(folder)


def _is_in_store(url: str) -> bool:
    above, _, name = url.rpartition("/")
    try:
        return storage.at(above).exists(name)
    except OSError:
        if url.startswith("http"):  # servers answer in any way to a name that they do not have
            return False
        raise


def _is_marker(name: str) -> bool:
    """Tell whether a file is no data: hidden, or what programs write beside data when they are done."""
    return any(is_hidden(part) or part.startswith("_") for part in PurePosixPath(name).parts)


def _check(flag: str, path: str, shards: Sequence[Shard]) -> None:
    if not shards:
        raise UserError(f"{flag} {path}: {NONE}")
    if strange := next((shard for shard in shards if not shard.format), None):
        raise UserError(f"{flag} {path}: {strange.name} cannot be streamed; what is streamed: {READ}")
    if packed := next((shard for shard in shards if shard.packed and shard.format != "jsonl"), None):
        raise UserError(
            f"{flag} {path}: {packed.name} cannot be read in parts: unpack it (parquet is compressed inside, and "
            "pictures in tar shards are compressed already)"
        )
    formats = {shard.format: shard.name for shard in shards}
    if len(formats) > 1:
        named = " and ".join(sorted(formats.values())[:2])
        raise UserError(f"{flag} {path} has shards of several formats, such as {named}: name those of one format")
    if empty := next((shard for shard in shards if not shard.size), None):
        raise UserError(f"{flag} {path}: {empty.name} is empty: leave it out, or write it again")
