"""Which code that lies in a folder is run: what this installation has too, and what this user has run here before.

A run's folder keeps the recipe that trained it, and an exported model has it next to its weights. Either may come from
somebody else. A recipe in such a folder is run only if it is one of this installation's, or if this user has trained
with it on this machine, from the folder that it names; else the user is asked, or says --trust-code. Modules are
imported from the recipe's own folder, never from the one where its copy lies.
"""

import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from app import storage
from app.errors import UserError, printable
from app.launching import shipped

RECIPES = shipped.folder("recipes")


class Code(NamedTuple):
    """A recipe to run, and the folder for its imports; empty: the one in which it lies."""

    file: Path
    imports: str = ""


def remember(source: str, folder: str) -> None:
    """Note that this user trains with a recipe that lies in a folder. Where that cannot be written, do nothing."""
    if not source:
        return
    with suppress(OSError, RuntimeError):  # of no home
        place = _memory()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        (place / _key(source, folder)).touch(mode=0o600)


def recipe_of(run: Path, folder: str, allowed: bool) -> Code:
    """Return the recipe that a run's folder has kept; arguments and errors are those of `checked`."""
    files = storage.at(run)
    if not files.is_file("recipe.py"):
        raise UserError(
            f"{run / 'recipe.py'} is missing, and it builds the model. A run from a notebook has no recipe: its "
            "finished model is in model/; to use other checkpoints, put the recipe into a file"
        )
    return checked(files.down("recipe.py"), folder, allowed)


def checked(copy: Path, folder: str, allowed: bool) -> Code:
    """Return what to run for a recipe's copy in somebody's folder.

    Args:
        folder: where its original was, as the folder says.
        allowed: the user has said --trust-code.

    Raises:
        UserError: nobody vouches for it, or it cannot be read.
    """
    try:
        source = copy.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{copy} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if (recipe := installed(source)) is not None:
        return Code(recipe)
    if not source.strip():
        return Code(copy)  # there is nothing to run
    there = "\0" not in folder and Path(folder).is_absolute() and Path(folder).is_dir()
    if _remembers(source, folder):
        return Code(copy, folder if there else str(RECIPES))
    if not allowed and not _says_yes(copy):
        raise UserError(
            f"{printable(str(copy))} is code that came with its folder, and is none of the recipes of this "
            "installation, nor one that you have trained with on this machine: read it, and give --trust-code to run it"
        )
    return Code(copy, folder if there else "")


def installed(source: str) -> Path | None:
    """Return the recipe of this installation that has a source; None if there is none."""
    for file in sorted(RECIPES.glob("*.py")):
        with suppress(OSError, ValueError):
            if file.read_text(encoding="utf-8") == source:
                return file
    return None


def _says_yes(copy: Path) -> bool:
    """Ask on a terminal; without one, the answer is no."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(
        f"{printable(str(copy))} is code that came with its folder. Run it? [y/N] ", end="", file=sys.stderr, flush=True
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remembers(source: str, folder: str) -> bool:
    with suppress(OSError, RuntimeError, ValueError):
        place = _memory()
        about = place.stat()
        private = about.st_uid == os.getuid() and not about.st_mode & 0o022
        return private and (place / _key(source, folder)).exists()
    return False


def _memory() -> Path:
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "samestep" / "recipes"


def _key(source: str, folder: str) -> str:
    """Name a recipe by its contents and its folder, from which it imports other modules."""
    return hashlib.sha256(f"{folder}\0{source}".encode("utf-8", "surrogatepass")).hexdigest()
