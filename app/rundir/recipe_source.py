"""The code of a recipe: kept with its run, and compared without regard to comments and formatting."""

import ast
import difflib
import inspect
import subprocess
from pathlib import Path
from typing import Any

LINES_SHOWN = 12


def source_of(config: Any) -> str:
    """Return the source of the file that defines a config's class; empty for a notebook, which has no file."""
    try:
        return Path(inspect.getfile(type(config))).read_text(encoding="utf-8")
    except (TypeError, OSError, UnicodeDecodeError):
        return ""


def origin_of(config: Any) -> tuple[str, str]:
    """Return where a config's class comes from: the folder, and the git commit there.

    For a notebook, the folder is the working directory. The commit ends in `+` if files have been changed since, and is
    empty without git.
    """
    try:
        folder = Path(inspect.getfile(type(config))).resolve().parent
    except (TypeError, OSError):
        folder = Path.cwd()
    words = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        commit = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    return str(folder), commit


def differences(before: str, now: str) -> list[str]:
    """Compare two sources, without comments, docstrings and formatting, as a few lines of a unified diff.

    Raises:
        SyntaxError, ValueError: one of them is not Python.
    """
    trees = [_meaning(source) for source in (before, now)]
    if ast.dump(trees[0]) == ast.dump(trees[1]):
        return []
    old, new = (ast.unparse(tree).splitlines() for tree in trees)
    # The first two lines of a diff name the files.
    lines = list(difflib.unified_diff(old, new, lineterm="", n=0))[2:]
    return [*lines[:LINES_SHOWN], *([f"... {len(lines) - LINES_SHOWN} more"] if len(lines) > LINES_SHOWN else [])]


def _meaning(source: str) -> ast.Module:
    """Parse a source, leaving out strings that stand alone: docstrings and the help of fields."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            statements = [statement for statement in body if not _is_text(statement)]
            body[:] = statements or [ast.Pass()]
    return tree


def _is_text(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
