"""Functions of Python's library without their first line, and that line: a task of sequence to sequence."""

import ast
from collections.abc import Iterator
from pathlib import Path

from app.data.tables.python_library import functions_of, stdlib_files


def signature_rows(root: str) -> Iterator[dict[str, str]]:
    """Yield a `source`, what a function does, and a `target`, its name and parameters; no source twice."""
    seen = set()
    for file in stdlib_files(Path(root)):
        for text in functions_of(Path(root) / file):
            row = split(text)
            if row and row["source"] not in seen:
                seen.add(row["source"])
                yield row


def split(text: str) -> dict[str, str] | None:
    """Return the body of a function, without comments and docstring, and its signature; None if nothing is left.

    A signature is the name with those of the parameters, such as `open(path, *flags)`.
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
    source = "\n".join(map(ast.unparse, body))
    return {"source": source, "target": f"{function.name}({', '.join(names)})"} if source else None
