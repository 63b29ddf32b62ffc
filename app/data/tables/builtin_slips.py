"""Functions of Python's library that end as they are, and with a slip: a task of preferences."""

import re
from collections.abc import Iterator
from pathlib import Path

from app.data.tables.python_library import functions_of, stdlib_files
from app.sampling.hashing import key_of

LINES = 4
"""Lines of the shortest function that is taken."""
CHARACTERS = 400
"""Characters of the longest one."""
PIECE = re.compile(r"\w+|[^\w\s]")
"""A word, or a sign."""
KINDS = ("swapped", "left out", "doubled", "replaced")


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
    """Return a text in which one of KINDS has happened to a word or a sign; which and where, a large number decides.

    The text itself comes back where it has only one piece, or two equal ones are swapped.
    """
    pieces = list(PIECE.finditer(text))
    if len(pieces) < 2:
        return text
    number, kind = divmod(number, len(KINDS))
    number, place = divmod(number, len(pieces) - 1)
    one, after = pieces[place], pieces[place + 1]
    if KINDS[kind] == "swapped":
        between = text[one.end() : after.start()]
        return text[: one.start()] + after[0] + between + one[0] + text[after.end() :]
    other = pieces[number % len(pieces)]
    instead = {"left out": "", "doubled": f"{one[0]} {one[0]}", "replaced": other[0]}[KINDS[kind]]
    return text[: one.start()] + instead + text[one.end() :]
