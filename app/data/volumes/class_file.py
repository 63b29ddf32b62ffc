"""The classes of masks as a file lists them: their names, and the colours that stand for them."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.data.reading import near, read_text
from app.errors import UserError

COLOURED = re.compile(r"(\d+)[\s,]+(\d+)[\s,]+(\d+)[\s,]+(\S.*)")


class Classes(NamedTuple):
    """Classes, numbered from 0 by their lines."""

    names: tuple[str, ...]
    colours: np.ndarray | None
    """uint8 [classes, 3]: red, green and blue; None if the file has names alone."""


def read_classes(path: str) -> Classes:
    """Read a file that has a class in each line: `R G B name`, or its name alone. Empty lines and # lines are left out.

    Raises:
        UserError: it cannot be read, or lines contradict each other.
    """
    file, named = Path(path).expanduser(), f"--data.classes {path}"
    if not file.is_file():
        raise UserError(f"{named}: no such file{near(str(file))}")
    numbered = [(number, line.strip()) for number, line in enumerate(read_text("--data.classes", file).split("\n"), 1)]
    lines = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    parts = [COLOURED.fullmatch(line) for _, line in lines]
    if not lines:
        raise UserError(f"{named} is empty: give a class in each line, as R G B name, or as its name alone")
    for (number, line), part in zip(lines, parts, strict=True):
        if bool(part) != bool(parts[0]):
            raise UserError(f"{named}: line {number} ({line}): give all lines as R G B name, or all as names alone")
    _refuse_twice(named, [part[4] if part else line for part, (_, line) in zip(parts, lines, strict=True)], "name")
    if parts[0] is None:
        return Classes(tuple(line for _, line in lines), None)
    triples = [tuple(int(part[channel]) for channel in (1, 2, 3)) for part in parts if part]
    for (number, line), triple in zip(lines, triples, strict=True):
        if max(triple) > 255:
            raise UserError(f"{named}: line {number} ({line}): red, green and blue are from 0 to 255")
    _refuse_twice(named, [" ".join(map(str, triple)) for triple in triples], "colour")
    return Classes(tuple(part[4] for part in parts if part), np.array(triples, np.uint8))


def _refuse_twice(named: str, values: list[str], what: str) -> None:
    if twice := [value for value in values if values.count(value) > 1]:
        raise UserError(f"{named} has the {what} {twice[0]} in two lines: give each class its own")


def numbers_of(coloured: np.ndarray, colours: np.ndarray, file: Path) -> np.ndarray:
    """Return the number of each pixel's class.

    Args:
        coloured: uint8 [*sides, 3].
        colours: of the classes, uint8 [classes, 3].
        file: the mask, for errors.

    Raises:
        UserError: a pixel has a colour that no class has.
    """
    wanted, codes = (array.astype(np.int64) @ (65536, 256, 1) for array in (coloured, colours))
    order = np.argsort(codes)
    places = np.searchsorted(codes[order], wanted).clip(max=len(codes) - 1)
    numbers = order[places]
    if (unknown := codes[numbers] != wanted).any():
        colour = " ".join(map(str, coloured[unknown][0]))
        raise UserError(
            f"{file} has the colour {colour}, which --data.classes has no line for: add the line `{colour} name`; "
            "the number of that line, counted from 0, with --data.ignore leaves the class out"
        )
    return numbers


def numbers_of_palette(mask: np.ndarray, palette: np.ndarray, colours: np.ndarray, file: Path) -> np.ndarray:
    """Return the number of each pixel's class, of a mask with a palette.

    Some tools write a class's number into a palette; others store a coloured picture with a palette of its colours in
    any order. So numbers count where the colours agree with them or are of other classes than the file's, and colours
    count where all of them have a line.

    Args:
        mask: [*sides], numbers of the palette.
        palette: uint8 [colours, 3].
        colours: of the classes, uint8 [classes, 3].
        file: the mask, for errors.

    Raises:
        UserError: some colours are those of other lines than their numbers, and some have no line.
    """
    used = np.unique(mask)
    shown = palette[used]
    same = [np.flatnonzero((colours == colour).all(1)).tolist() for colour in shown]
    grey = (shown == used[:, None]).all()  # as a picture of one channel
    if grey or all(lines in ([], [number]) for number, lines in zip(used.tolist(), same, strict=True)):
        return mask
    if all(same):
        return numbers_of(palette[mask], colours, file)
    number, colour = next((n, c) for n, c, lines in zip(used, shown, same, strict=True) if not lines)
    raise UserError(
        f"{file} has a palette with colours of --data.classes under other numbers, and with the colour "
        f"{' '.join(map(str, colour))} (number {number}), which has no line: add the line, or save the mask without a "
        "palette"
    )
