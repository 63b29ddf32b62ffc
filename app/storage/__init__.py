"""Where the files of a run live: one interface, and one file for each kind of place: a disk, and a bucket.

Elsewhere in app, a `Path` of a run's folder is a name: it is joined, compared and shown, and only a `Storage` opens,
lists or changes what lies there (tests/storage/test_storage.py checks it).
"""

from pathlib import Path

from app.storage.addresses import address
from app.storage.bucket import BucketStorage
from app.storage.drafts import DRAFT
from app.storage.interface import Changed, Entry, Kind, Lease, Log, Mark, Storage
from app.storage.local import LocalStorage

__all__ = ["DRAFT", "Changed", "Entry", "Kind", "Lease", "Log", "Mark", "Storage", "at"]


def at(folder: Path | str) -> Storage:
    """Return the storage of a folder, which need not be there yet. Nothing is looked at before it is asked for.

    Args:
        folder: a path, or a URL of s3, gs, az, hf, http or https, also one in a `Path`, which has lost a slash.

    Raises:
        UserError: a URL that names no folder; see `addresses.address`.
    """
    url = address(folder)
    return LocalStorage(Path(folder)) if url is None else BucketStorage(url)
