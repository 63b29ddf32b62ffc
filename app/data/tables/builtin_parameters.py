"""Functions of Python's library without their parameters, and these: a task of sequence to sequence."""

import ast
from collections.abc import Iterator
from pathlib import Path

from app.data.tables.python_library import functions_of, stdlib_files


def parameter_rows(root: str) -> Iterator[dict[str, str]]:
    """Yield a `source`, the name of a function and what it does, and a `target`, its parameters; no source twice."""
    seen = set()
    for file in stdlib_files(Path(root)):
        for text in functions_of(Path(root) / file):
            row = split(text)
            if row and row["source"] not in seen:
                seen.add(row["source"])
                yield row


def split(text: str) -> dict[str, str] | None:
    """Return a function without parameters, comments and docstring, and its parameters; None if nothing is left.

    The first begins with `def` and the name. The parameters are names, such as `path, *flags`, or `()` for none.
    """
    try:
        (function,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    body = function.body[ast.get_docstring(function, clean=False) is not None :]
    given = function.args
    names = [each.arg for each in [*given.posonlyargs, *given.args]]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [each.arg for each in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    if not body:
        return None
    lines = [f"def {function.name}:", *map(ast.unparse, body)]
    return {"source": "\n".join(lines), "target": ", ".join(names) or "()"}
