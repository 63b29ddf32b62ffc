"""Lines of Python's library as bare words, and with their signs: a task of sequence to sequence."""

import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from app.data.tables.python_library import functions_of, stdlib_files

WORDS, TOKENS = 3, 24
"""Words of the shortest line that is taken, and tokens of the longest one."""
KINDS = (tokenize.NAME, tokenize.NUMBER, tokenize.OP)


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
        elif token.type in KINDS:
            line.append(token)
        elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT):
            whole = False
    return rows
