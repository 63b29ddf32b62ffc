"""Where the files of a run live: one interface, and one file for each kind of place; today a local disk.

Elsewhere in app, a `Path` of a run's folder is a name: it is joined, compared and shown, and only a `Storage` opens,
lists or changes what lies there (tests/storage/test_storage.py checks it).
"""

from pathlib import Path

from app.storage.drafts import DRAFT
from app.storage.interface import Changed, Entry, Kind, Lease, Log, Mark, Storage
from app.storage.local import LocalStorage

__all__ = ["DRAFT", "Changed", "Entry", "Kind", "Lease", "Log", "Mark", "Storage", "at"]


def at(folder: Path | str) -> Storage:
    """Return the storage of a folder, which need not be there yet. Nothing is looked at before it is asked for."""
    return LocalStorage(Path(folder))
