"""Commands of `python -m app NAME`: one folder each, with `command.py` and what serves only that command.

The module `command` has three parts. Its docstring, whose first line is the summary. A dataclass `Options`, which is
read like a recipe's config. And `main(options) -> int`, which returns the exit status: 0 if all is well, 1 if something
bad was found. Wrong options are a UserError, which ends with 2. A `main(options, flags)` also gets the words that are
not among its options; they are flags of a recipe. A module may have `main_of_words(words)` instead, and no Options.
torch and the like are imported in functions: --help answers at once.
"""

import ast
import importlib
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent


def summaries() -> dict[str, str]:
    """Return the summary of each command by its name, without importing any."""
    documents = {name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for name, path in _files()}
    return {name: (text or "").partition("\n")[0] for name, text in documents.items()}


def load(name: str) -> ModuleType:
    """Import a command's module."""
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}.command")


def _files() -> list[tuple[str, Path]]:
    """List the commands and their files."""
    return sorted((path.parent.name.replace("_", "-"), path) for path in FOLDER.glob("*/command.py"))
