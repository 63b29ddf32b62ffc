"""The list of a checkpoint's files, with sizes and checksums, by which a folder is known to be whole."""

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import xxhash

from app import storage
from app.errors import UserError
from app.storage import Kind
from app.storage.records import FileSum, JsonRecord, NewerFormat

MANIFEST = "manifest.json"
FORMAT = "2026-11"  # of manifest.json: the month in which a field last changed its meaning
# Files that belong to one rank, by the names that torch, accelerate and DeepSpeed give them.
_OWNED = re.compile(r"(?:__|random_states_|(?:bf16_)?zero_pp_rank_)(\d+)[_.]")


@dataclass(frozen=True)
class Manifest(JsonRecord):
    """What manifest.json says."""

    files: dict[str, FileSum]
    """By their names in the folder."""
    hash: Literal["xxh3_128"] = "xxh3_128"
    """How checksums are made."""
    format: str = FORMAT


def vouch(
    folder: Path,
    rank: int,
    on_block: Callable[[], None] = lambda: None,
    patiently: Callable[[Callable[[], Any]], Any] = lambda act: act(),
) -> dict[str, FileSum]:
    """Have a rank's own files kept and return their sizes and checksums; the main process adds those of no rank.

    Args:
        patiently: calls what waits for the place of the folder, again where that may help.
    """
    files = storage.at(folder)
    names = [entry.name for entry in files.files()]
    owners = [_OWNED.match(PurePosixPath(name).name) for name in names]
    of_rank = [name for name, owner in zip(names, owners, strict=True) if (int(owner[1]) if owner else 0) == rank]
    return keep(folder, of_rank, on_block, patiently)


def keep(
    folder: Path,
    names: list[str],
    on_block: Callable[[], None] = lambda: None,
    patiently: Callable[[Callable[[], Any]], Any] = lambda act: act(),
) -> dict[str, FileSum]:
    """Wait until files of a draft are kept, and return their sizes and checksums; `patiently` as in `vouch`.

    Raises:
        OSError: they are not kept, or what has arrived is not what was written.
    """
    files = storage.at(folder)
    written = entries(folder, names, on_block) if files.is_remote else {}
    for name in names:
        patiently(partial(files.up, name, on_block))
    kept = patiently(lambda: entries(folder, names, on_block))
    if damaged := [name for name in written if written[name] != kept[name]]:
        raise OSError(errno.EIO, "the store has other contents than were sent", str(folder / damaged[0]))
    return kept


def entries(folder: Path, names: Iterable[str], on_block: Callable[[], None] = lambda: None) -> dict[str, FileSum]:
    """Return sizes and checksums of a folder's files, by their names."""
    return {name: _entry(folder, name, on_block) for name in names}


def _entry(folder: Path, name: str, on_block: Callable[[], None]) -> FileSum:
    entry = storage.at(folder).entry(name)
    if entry is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / name))
    return FileSum(entry.size, checksum(folder, name, on_block))


def write(folder: Path, files: dict[str, FileSum]) -> None:
    """Write a folder's manifest, and wait until it and the folders' lists of names are on disk."""
    draft = storage.at(folder)
    draft.fill(MANIFEST, json.dumps(Manifest(files).to_json(), indent=1))
    draft.up(MANIFEST)
    for inner in sorted({str(PurePosixPath(name).parent) for name in files}):
        draft.up(inner)


def check_shared(draft: Path, sums: dict[str, FileSum], what: str) -> None:
    """Refuse a draft that does not have all files that ranks have written.

    Args:
        sums: sizes and checksums of the files of all ranks.
        what: names the folder in the message.

    Raises:
        UserError: another machine has written elsewhere.
    """
    away = [name for name in sums if not storage.at(draft).is_file(name)]
    if away:
        raise UserError(
            f"{draft} does not have {away[0]}, which another process wrote: {what} must be on a disk that all "
            "machines share, or in a bucket"
        )


def listed(folder: Path) -> dict[str, FileSum]:
    """Read a folder's manifest: the size and the checksum of each file, by its name.

    Raises:
        NewerFormat: it is of a newer version.
        ValueError: it is damaged, or names a file outside the folder.
        OSError: it cannot be read.
    """
    try:
        files = Manifest.from_json(json.loads(storage.at(folder).read_text(MANIFEST, follow=True))).files
        if away := [name for name in files if not lies_inside(name)]:
            raise ValueError(f"{away[0]!a} does not lie in the folder")
    except NewerFormat as newer:
        raise NewerFormat(f"{folder / MANIFEST}: {newer}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / MANIFEST} is not the list of files that was written: {error}") from None
    return files


def verify(folder: Path, part: int = 0, parts: int = 1, on_block: Callable[[], None] = lambda: None) -> None:
    """Check a folder's files, or the share `part` of `parts`, against its manifest.

    Raises:
        ValueError: it names the first file that is not as it was written.
        OSError: a file cannot be read.
    """
    files = listed(folder)
    for name in sorted(files)[part::parts]:
        path, entry, expected = folder / name, storage.at(folder).entry(name), files[name]
        if entry is None or entry.kind is not Kind.FILE:
            raise ValueError(f"{path} is missing")
        if entry.size != expected.size:
            raise ValueError(f"{path} has {entry.size} bytes of {expected.size}")
        if checksum(folder, name, on_block) != expected.xxh3:
            raise ValueError(f"{path} does not have the contents that were written")


def lies_inside(name: str) -> bool:
    """Tell whether the name of a file, relative to a folder, leads to a file in that folder."""
    path = Path(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def foreign_to(folder: Path, own_names: Iterable[str]) -> str:
    """Return the name of something in a folder that is none of its own files, or of a link; empty if all are its own.

    Where the folder is a link itself, or a file, that is its own name.

    Args:
        own_names: the names of the folder's own files, relative to it.
    """
    files = storage.at(folder)
    if files.is_link() or not files.is_folder():
        return folder.name
    known_files = {PurePosixPath(name) for name in own_names}
    known_paths = known_files.union(*(file.parents for file in known_files))
    for entry in files.walk():
        if entry.kind is Kind.LINK or PurePosixPath(entry.name) not in known_paths:
            return entry.name
    return ""


def verify_patiently(*args: Any, seconds: float = 1.0, tries: int = 3) -> None:
    """Verify, and try again when the disk fails: a network disk now and then does so for a moment (ESTALE)."""
    for _ in range(tries - 1):
        try:
            return verify(*args)
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(seconds)
    return verify(*args)


def checksum(folder: Path, name: str, on_block: Callable[[], None] = lambda: None) -> str:
    """Hash a file's contents (xxh3, 128 bits); `on_block` is called for every block that was read."""
    digest = xxhash.xxh3_128()
    with storage.at(folder).open(name, follow=True) as file:
        while block := file.read(1 << 22):
            digest.update(block)
            on_block()
    return digest.hexdigest()
