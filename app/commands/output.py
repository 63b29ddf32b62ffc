"""What commands print and write at their end: a plain table, a JSON file for programs, sizes in words."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.config import finite
from app.errors import UserError, printable
from app.storage.addresses import address


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """Lay out rows under a head, each column as wide as its widest cell.

    Args:
        right: the columns to align on the right, which hold numbers.

    Cells may hold texts of others, such as names of classes: they are made printable.
    """
    texts = [[printable(str(cell)) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head) - 1)]
    widths.append(len(head[-1]))  # the last column may hold long texts

    def line(row: list[str]) -> str:
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    return "\n".join([line(texts[0]), "  ".join("-" * width for width in widths), *map(line, texts[1:])])


def check_local(flag: str, place: str | Path) -> None:
    """Refuse a URL where a command writes to a disk.

    Raises:
        UserError: it is one.
    """
    if url := address(place):
        raise UserError(f"{flag} {url}: this is written to a disk: give a file or a folder of this machine")


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write the file that --json names; without a name, do nothing.

    Raises:
        UserError: the file cannot be written.
    """
    if not path:
        return
    check_local("--json", path)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(finite(content), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}; give a file that can be written") from None


def size(count: float) -> str:
    """Format a number of bytes with about three digits: `0 B`, `812 B`, `1.5 GB`. Units are powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 99.5 else f"{count:.3g} {unit}"
