"""Names in the functions of Python's library and what each of them is: a task of token classification."""

import ast
import builtins
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from app.data.tables.python_library import functions_of, stdlib_files

SHORT, LONG = 12, 160
"""Tokens of the shortest and the longest function that is taken."""
STRING = 16
"""Characters of a string that are kept."""
TAGS = ["O", *(f"{mark}-{kind}" for kind in ("argument", "attribute", "builtin", "call", "local") for mark in "BI")]

Place = tuple[int, int]
"""Line and column, in characters."""


def name_rows(root: str) -> Iterator[dict[str, list[str]]]:
    """Yield functions as `tokens` and `tags`, one for each token; no function twice."""
    seen = set()
    for file in stdlib_files(Path(root)):
        for text in functions_of(Path(root) / file):
            if text in seen:
                continue
            seen.add(text)
            if (row := tagged(text)) and SHORT <= len(row["tokens"]) <= LONG:
                yield row


def tagged(text: str) -> dict[str, list[str]] | None:
    """Return the tokens of a function's source, without comments, and their tags; None if it cannot be parsed.

    A call is the dotted name of what is called (`os.path.join`), an entity of several tokens. Other names are entities
    of one token: an argument or a local variable of the function, a name of `builtins`, or an attribute.
    """
    try:
        (function,) = ast.parse(text).body
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, ValueError, tokenize.TokenError):
        return None
    spans = _spans(function, text.split("\n"))
    found: dict[str, list[str]] = {"tokens": [], "tags": []}
    open_until, kind = (0, 0), ""
    for token in tokens:
        if token.type not in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            continue
        tag = "O"
        if token.start < open_until:
            tag = f"I-{kind}"
        elif token.start in spans:
            open_until, kind = spans[token.start]
            tag = f"B-{kind}"
        word = token.string if token.type != tokenize.STRING else " ".join(token.string.split())[:STRING]
        found["tokens"].append(word)
        found["tags"].append(tag)
    return found


def _spans(function: ast.AST, lines: list[str]) -> dict[Place, tuple[Place, str]]:
    """Return where each entity begins, where it ends, and its kind; a call hides the names in it."""
    spans: dict[Place, tuple[Place, str]] = {}

    def place(line: int, column: int) -> Place:  # the parser counts bytes
        return line, len(lines[line - 1].encode()[:column].decode())

    def mark(line: int, column: int, end_line: int, end_column: int, kind: str) -> None:
        spans.setdefault(place(line, column), (place(end_line, end_column), kind))

    nodes = list(ast.walk(function))
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)} - arguments
    for node in nodes:
        if isinstance(node, ast.Call) and _is_dotted(node.func):
            called = node.func
            mark(called.lineno, called.col_offset, called.end_lineno, called.end_col_offset, "call")
    for node in nodes:
        if isinstance(node, ast.arg):
            mark(node.lineno, node.col_offset, node.lineno, node.col_offset + len(node.arg.encode()), "argument")
        elif isinstance(node, ast.Name):
            kinds = {"argument": arguments, "local": local, "builtin": vars(builtins)}
            if kind := next((kind for kind, names in kinds.items() if node.id in names), ""):
                mark(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, kind)
        elif isinstance(node, ast.Attribute):
            begin = node.end_col_offset - len(node.attr.encode())
            mark(node.end_lineno, begin, node.end_lineno, node.end_col_offset, "attribute")
    return spans


def _is_dotted(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
