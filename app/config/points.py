"""Points of a schedule: places in a run, each with a factor of the peak learning rate."""

import re
from typing import NamedTuple

from app.config.text_files import UNREADABLE, open_text, why
from app.errors import UserError

_POINT = re.compile(r"\s*([\d.]+)(%?)\s*[:,\s]\s*([\d.]+(?:[eE][-+]?\d+)?)\s*")


class Point(NamedTuple):
    """A place, in steps or in percent of the run, and the factor there."""

    place: float
    percent: bool
    factor: float
    text: str

    @classmethod
    def parse(cls, text: str) -> "Point":
        """Read `200:0.5` or `10%:1`.

        Raises:
            UserError: it is something else.
        """
        try:
            if (parts := _POINT.fullmatch(text)) is None:
                raise ValueError
            place, percent, factor = parts.groups()
            if not percent and not float(place).is_integer():
                raise ValueError
            return cls(float(place), bool(percent), float(factor), text)
        except ValueError:
            raise UserError(
                f"--optim.points {text!r} is no point: give STEP:FACTOR or PERCENT%:FACTOR, for example 200:1 or 10%:1"
            ) from None

    def step(self, total_steps: int) -> float:
        """Return its step, counted from 0; 100% is the last one."""
        return self.place / 100 * (total_steps - 1) if self.percent else self.place


def read(words: tuple[str, ...]) -> tuple[str, ...]:
    """Read points, or the file that the only word names, with a point in each line.

    Raises:
        UserError: there is no such file, or something in it is no point.
    """
    if len(words) != 1 or _POINT.fullmatch(words[0]):
        return words
    try:
        with open_text(words[0]) as stream:
            lines = stream.read().split("\n")
    except UNREADABLE as error:
        raise UserError(
            f"--optim.points {words[0]}: {why(error)}: give points, such as 0:0 10%:1 100%:0, or a file with one in "
            "each line"
        ) from None
    points = [text for line in lines if (text := line.partition("#")[0].strip())]
    if points and not re.search(r"\d", points[0]):
        points = points[1:]  # the names of columns
    return tuple(re.sub(r"\s*[:,\s]\s*", ":", point) for point in points)
