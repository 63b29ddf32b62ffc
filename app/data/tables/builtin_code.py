"""Tasks made of the code of Python's library: what each name is, lines without their signs, endings with a slip."""

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from app.data.tables.python_library import functions_of, stdlib_files
from app.sampling.hashing import key_of

SHORT, LONG = 12, 160
"""Tokens of the shortest and the longest function whose names are tagged."""
STRING = 16
"""Characters of a string that are kept in one."""
TAGS = ["O", *(f"{mark}-{kind}" for kind in ("argument", "attribute", "builtin", "call", "local") for mark in "BI")]

Place = tuple[int, int]
"""Line and column, in characters."""
WORDS, TOKENS = 3, 24
"""Words of the shortest line that is taken without its signs, and tokens of the longest one."""
OF_LINES = (tokenize.NAME, tokenize.NUMBER, tokenize.OP)
LINES = 4
"""Lines of the shortest function that gets a slip."""
CHARACTERS = 400
"""Characters of the longest one."""
PIECE = re.compile(r"\w+|[^\w\s]")
"""A word, or a sign."""
SLIPS = ("swapped", "left out", "doubled", "replaced")


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
    columns: dict[str, list[str]] = {"tokens": [], "tags": []}
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
        columns["tokens"].append(word)
        columns["tags"].append(tag)
    return columns


def _spans(function: ast.AST, lines: list[str]) -> dict[Place, tuple[Place, str]]:
    """Return where each entity begins, where it ends, and its kind; a call hides the names in it."""
    spans: dict[Place, tuple[Place, str]] = {}

    def place(line: int, column: int) -> Place:  # the parser counts bytes
        return line, len(lines[line - 1].encode()[:column].decode())

    def mark(line: int, column: int, end: tuple[int, int], kind: str) -> None:
        spans.setdefault(place(line, column), (place(*end), kind))

    def end_of(node: ast.expr) -> tuple[int, int]:  # which the parser always sets
        return cast(int, node.end_lineno), cast(int, node.end_col_offset)

    nodes = list(ast.walk(function))
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)} - arguments
    for node in nodes:
        if isinstance(node, ast.Call) and _is_dotted(node.func):
            called = node.func
            mark(called.lineno, called.col_offset, end_of(called), "call")
    for node in nodes:
        if isinstance(node, ast.arg):
            mark(node.lineno, node.col_offset, (node.lineno, node.col_offset + len(node.arg.encode())), "argument")
        elif isinstance(node, ast.Name):
            kinds = {"argument": arguments, "local": local, "builtin": vars(builtins)}
            if kind := next((kind for kind, names in kinds.items() if node.id in names), ""):
                mark(node.lineno, node.col_offset, end_of(node), kind)
        elif isinstance(node, ast.Attribute):
            line, column = end_of(node)
            mark(line, column - len(node.attr.encode()), (line, column), "attribute")
    return spans


def _is_dotted(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def sign_rows(root: str) -> Iterator[dict[str, str]]:
    """Yield a `source`, the words of a line, and a `target`, the line; no source twice."""
    seen = set()
    for file in stdlib_files(Path(root)):
        for text in functions_of(Path(root) / file):
            for row in split(text):
                if row["source"] not in seen:
                    seen.add(row["source"])
                    yield row


def split(text: str) -> list[dict[str, str]]:
    """Return lines of a function without their signs, and whole, with a space between any two tokens.

    A line is a logical one, which brackets may spread over several. Words are names, keywords and numbers. Left out are
    lines with a string, whose words could be anything, lines without signs, and what is too short or too long.
    """
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, tokenize.TokenError):
        return []
    rows = []
    line: list[tokenize.TokenInfo] = []
    whole = True
    for token in tokens:
        if token.type == tokenize.NEWLINE:
            words = [part.string for part in line if part.type != tokenize.OP]
            if whole and WORDS <= len(words) < len(line) <= TOKENS:
                rows.append({"source": " ".join(words), "target": " ".join(part.string for part in line)})
            line, whole = [], True
        elif token.type in OF_LINES:
            line.append(token)
        elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT):
            whole = False
    return rows


def slip_rows(root: str) -> Iterator[dict[str, str]]:
    """Yield first halves of functions as `prompt`, second halves as `chosen`, and those with a slip as `rejected`."""
    seen = set()
    for file in stdlib_files(Path(root)):
        for text in functions_of(Path(root) / file):
            if text in seen or len(text) > CHARACTERS or text.count("\n") + 1 < LINES:
                continue
            seen.add(text)
            prompt, end = halves(text)
            wrong = with_slip(end, int(key_of(text), 16))
            if wrong != end:
                yield {"prompt": prompt, "chosen": end, "rejected": wrong}


def halves(text: str) -> tuple[str, str]:
    """Cut a function between two lines; the first half ends with the end of its last line."""
    lines = text.split("\n")
    middle = (len(lines) + 1) // 2
    return "\n".join(lines[:middle]) + "\n", "\n".join(lines[middle:])


def with_slip(text: str, number: int) -> str:
    """Return a text in which one of SLIPS has happened to a word or a sign; which and where, a large number decides.

    The text itself comes back where it has only one piece, or two equal ones are swapped.
    """
    pieces = list(PIECE.finditer(text))
    if len(pieces) < 2:
        return text
    number, kind = divmod(number, len(SLIPS))
    number, place = divmod(number, len(pieces) - 1)
    one, after = pieces[place], pieces[place + 1]
    if SLIPS[kind] == "swapped":
        between = text[one.end() : after.start()]
        return text[: one.start()] + after[0] + between + one[0] + text[after.end() :]
    other = pieces[number % len(pieces)]
    instead = {"left out": "", "doubled": f"{one[0]} {one[0]}", "replaced": other[0]}[SLIPS[kind]]
    return text[: one.start()] + instead + text[one.end() :]
