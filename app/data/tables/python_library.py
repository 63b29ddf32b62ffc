"""Sources of Python's standard library, as rows of text."""

import ast
import os
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGES = 12
"""The largest packages, whose functions are classified."""
LINES = 3
"""Lines of the shortest function that is taken."""
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_files(root: Path) -> list[str]:
    """List the sources of the packages under root, as sorted paths relative to it with forward slashes."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        if Path(folder) != root:  # modules that are one file belong to no package
            files += [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    return sorted(files)


def stdlib_rows(root: str) -> Iterator[dict[str, str]]:
    """Yield the functions of the largest packages in the order of their files and lines, no text twice."""
    labels: dict[str, str] = {}
    for file in stdlib_files(Path(root)):
        for text in functions_of(Path(root) / file):
            labels.setdefault(text, file.partition("/")[0])
    # Ties go to the name that comes first, so that the choice does not depend on the order of counting.
    sizes = sorted(Counter(labels.values()).items(), key=lambda item: (-item[1], item[0]))
    largest = {package for package, _ in sizes[:PACKAGES]}
    for text, label in labels.items():
        if label in largest:
            yield {"text": text, "label": label}


def source_rows(root: str) -> Iterator[dict[str, str]]:
    """Yield the sources in the order of their paths, no text twice; those in no known encoding are left out."""
    seen = set()
    for file in stdlib_files(Path(root)):
        try:
            with tokenize.open(Path(root) / file) as stream:
                text = stream.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        if text and text not in seen:
            seen.add(text)
            yield {"text": text, "file": file}


def functions_of(path: Path) -> Iterator[str]:
    """Yield the source of each function and method in a file, dedented, without decorators.

    A function inside another is only part of the other's text: else its lines could be both in the training set and
    held out. A file that this Python cannot parse (a template, say) has no functions.
    """
    try:
        with tokenize.open(path) as stream:
            source = stream.read()
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return
    # The parser's lines: splitlines() would also split at form feeds, which occur in the library.
    lines = source.split("\n")
    for node in _outermost_functions(tree.body):
        function = lines[node.lineno - 1 : node.end_lineno]
        if len(function) >= LINES:
            yield _dedent(function, node.col_offset)


def _outermost_functions(statements: list) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            continue
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                yield from _outermost_functions(inner)


def _dedent(lines: list[str], width: int) -> str:
    """Remove the first line's indentation from all lines that have it; lines of a string may lack it."""
    return "\n".join(line[width:] if not line[:width].strip() else line for line in lines)
