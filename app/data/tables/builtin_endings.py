"""How functions of Python's library go on, the right way and another one: a task of preferences."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from app.data.tables.python_library import functions_of, stdlib_files
from app.sampling.hashing import key_of

LINES = 4
"""Lines of the shortest function that is taken."""
CHARACTERS = 600
"""Characters of the longest one."""


def ending_rows(root: str) -> Iterator[dict[str, str]]:
    """Yield first halves of functions as `prompt`, second halves as `chosen`, and other functions' as `rejected`.

    Each function is in one row only: it is either asked about, or its end is the rejected one, as a hash decides. Both
    ends have about the same number of characters. So neither an end alone nor its length tells which one is right.
    """
    texts = {text for file in stdlib_files(Path(root)) for text in functions_of(Path(root) / file)}
    taken = [text for text in texts if len(text) <= CHARACTERS and text.count("\n") + 1 >= LINES]
    halves = sorted((_halves(text) for text in taken), key=lambda pair: (len(pair[1]), key_of(*pair)))
    pairs = [(a, b) for i, (a, b) in enumerate(pairwise(halves)) if i % 2 == 0 and a[1] != b[1]]
    for one, other in sorted(pairs, key=lambda pair: key_of(*pair[0])):
        if int(key_of(*one, *other), 16) % 2:
            one, other = other, one
        yield {"prompt": one[0], "chosen": one[1], "rejected": other[1]}


def _halves(text: str) -> tuple[str, str]:
    """Cut a function between two lines; the first half ends with the end of its last line."""
    lines = text.split("\n")
    middle = (len(lines) + 1) // 2
    return "\n".join(lines[:middle]) + "\n", "\n".join(lines[middle:])
