"""Files that come with this package and are not imported: profiles and recipes."""

from pathlib import Path

import app


def folder(name: str) -> Path:
    """Return a folder of them: an installed package has it inside `app`, a copy of the repository next to `app`."""
    places = [place / name for place in Path(app.__file__).parents[:2]]
    return next((place for place in places if place.is_dir()), places[-1])
