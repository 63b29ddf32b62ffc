"""What lies in folders of data: entries that systems and tools leave there, and the splits that names are for."""

import os
from collections.abc import Iterator

from app.data.tables.splits import SPLITS, split_of

LEFT = {"__macosx", "__pycache__", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "lost+found", "icon\r"}


def is_hidden(name: str) -> bool:
    """Tell whether a file or folder is none of the user's data: a hidden one, or what a system leaves in folders."""
    return name.startswith(".") or name.lower() in LEFT


def split_in(name: str) -> str:
    """Return the split that a file or folder is for, by the words of its name; nothing if these do not say."""
    words = "".join(letter if letter.isalpha() else " " for letter in name.lower()).split()
    return next((split_of(split) for split in SPLITS if split in words), "")


def files_below(folder: str) -> Iterator[tuple[str, ...]]:
    """Yield the path of each file below a folder as its parts, following links, without what is hidden."""
    seen = set()
    for top, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(top)
        if real in seen:  # a link leads back up, or to a folder that another name has too
            folders[:] = []
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        inner = () if top == folder else tuple(os.path.relpath(top, folder).split(os.sep))
        for name in sorted(names):
            if not is_hidden(name) and os.path.isfile(os.path.join(top, name)):
                yield (*inner, name)
