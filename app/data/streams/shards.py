"""Shards: the files of one data set, in a folder, behind a pattern, or at a URL, and the formats that they have."""

import fnmatch
import glob
import itertools
import os
import re
from pathlib import PurePosixPath
from typing import NamedTuple

from app import storage
from app.data.folders import is_hidden
from app.data.reading import near
from app.errors import UserError
from app.storage.addresses import address

PATTERN = re.compile(r"[*?\[]")
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
    return bool(_divided(path)[1])


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
    folder, pattern = _divided(path)
    try:
        entries = storage.at(folder).files()
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be listed: {error.strerror or error}") from None
    if not entries:
        raise UserError(f"{flag} {path}: there is nothing of this name{'' if is_url(path) else near(path)}")
    shards = [Shard(each.name, each.size, each.tag) for each in entries if not _is_aside(each.name)]
    if pattern:
        shards = [shard for shard in shards if fnmatch.fnmatchcase(shard.name, pattern)]
    else:
        shards = [shard for shard in shards if shard.format and shard.split == split]
    _check(flag, path, shards)
    return Shards(folder, tuple(sorted(shards)))


def _divided(path: str) -> tuple[str, str]:
    """Return the folder to list, and the pattern of names below it; no pattern for a whole folder."""
    path = path.rstrip("/") if is_url(path) else os.path.expanduser(path)
    parts = path.split("/")
    fixed = next((i for i, part in enumerate(parts) if PATTERN.search(part)), len(parts))
    if fixed < len(parts):
        return "/".join(parts[:fixed]) or ("/" if path.startswith("/") else "."), "/".join(parts[fixed:])
    single = Shard(parts[-1], 0, "").format and (is_url(path) or os.path.isfile(path))
    return ("/".join(parts[:-1]) or ".", glob.escape(parts[-1])) if single else (path, "")


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
