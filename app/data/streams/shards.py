"""Shards: the files of one data set, in a folder, behind a pattern, or at a URL, and the formats that they have."""

import itertools
import os
import re
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from app import storage
from app.data.folders import is_hidden
from app.data.patterns import PATTERN as PATTERN  # of places that are streamed, for commands
from app.data.patterns import divided, fits
from app.data.reading import near
from app.errors import UserError
from app.storage.addresses import address

FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".tar": "tar"}
PACKED = (".gz", ".zst")
LOOKED_AT = 1000  # files of a folder in a folder, to see whether any is a shard
READ = "parquet, jsonl (also .gz and .zst), and tar in the layout of WebDataset"
# Words by which folders and files say that they are not to train on, as the Hub's layouts have them.
SPLITS = {
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}


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
    def plain_name(self) -> str:
        """Return its name without the ending of a compressed file."""
        return self.name[: len(self.name) - len(self.packed)]

    @property
    def split(self) -> str:
        """Return train, validation or test, as its name says; train if it says nothing."""
        words = {word for part in PurePosixPath(self.plain_name.lower()).parts for word in re.split(r"[^a-z]+", part)}
        return next((split for split, named in SPLITS.items() if words & {*named}), "train")


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


def is_url(path: str) -> bool:
    """Tell whether a path is a URL that a storage reads."""
    return address(path) is not None


def shards_in(path: str, split: str = "train") -> tuple[Shard, ...]:
    """List the shards of a split as `find_shards` would; none where it would refuse."""
    if not is_url(path) and os.path.isdir(path) and not _has_shards(path):
        return ()  # without a look at what may be a million pictures
    try:
        return find_shards("", path, split).files
    except UserError:
        return ()


def names_files(path: str) -> bool:
    """Tell whether a path names a file, or files by a pattern, which are all of one split, whatever they are called."""
    try:
        place = _place(path)
    except OSError:
        return True  # what cannot be asked about is refused where it is read
    return bool(place.file or place.pattern)


def _has_shards(folder: str) -> bool:
    """Tell whether a local folder, or one in it, has a file that may be a shard."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if Shard(entry.name, 0, "").format:
                return True
            if entry.is_dir() and not is_hidden(entry.name):
                with os.scandir(entry.path) as inside:
                    if any(Shard(each.name, 0, "").format for each in itertools.islice(inside, LOOKED_AT)):
                        return True
    return False


def find_shards(flag: str, path: str, split: str = "train") -> Shards:
    """List the shards of a split.

    Args:
        path: a folder, a file, or a pattern such as data/*.parquet; local or a URL.
        split: train, validation or test, by the words in the names; of one file, and of files behind a pattern, all.

    Raises:
        UserError: there are none, they have several formats, or one is empty.
    """
    try:
        place = _place(path)
        entries = place.entries()
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be listed: {error.strerror or error}") from None
    if not entries:
        raise UserError(f"{flag} {path}: there is nothing of this name{'' if is_url(path) else near(path)}")
    shards = [Shard(each.name, each.size, each.tag) for each in entries if place.file or not _is_aside(each.name)]
    if place.pattern:
        shards = [shard for shard in shards if fits(shard.name, place.pattern)]
    elif not place.file:
        shards = [shard for shard in shards if shard.format and shard.split == split]
    _check(flag, path, shards)
    return Shards(place.folder, tuple(sorted(shards)))


class Place(NamedTuple):
    """Where files are looked for."""

    folder: str
    file: str = ""
    """The name of the only one in it, if it is one."""
    pattern: str = ""
    """Of the names below the folder, if several are meant."""

    def entries(self) -> list[storage.Entry]:
        """List the files that there are.

        Raises:
            OSError: nobody knows.
        """
        files = storage.at(self.folder)
        if not self.file:
            return files.files()
        entry = files.entry(self.file)
        return [] if entry is None else [entry]


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
        is_file = bool(Shard(name, 0, "").format or url.scheme.startswith("http") and url.key)
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


def _is_aside(name: str) -> bool:
    """Tell whether a file is no data: hidden, or what programs write beside data when they are done."""
    return any(is_hidden(part) or part.startswith("_") for part in PurePosixPath(name).parts)


def _check(flag: str, path: str, shards: list[Shard]) -> None:
    if not shards:
        raise UserError(f"{flag} {path}: it has no shards; what is streamed: {READ}")
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
