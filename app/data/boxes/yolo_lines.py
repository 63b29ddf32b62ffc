"""What a line of YOLO's labels means: a box, a polygon, an oriented box, or a box with key points.

Only the number of values tells these apart, and not always. Where that leaves a choice, data.yaml has to say which one
it is (`kpt_shape`, or `task`); nothing is guessed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from app.data.reading import read_lines

TASKS = ("detect", "segment", "obb", "pose")
# Values of a line: the class and a box; the class and four corners.
BOX, ORIENTED = 5, 9
# Larger ones are no fractions of an image's sides, not even of a box that ends a little outside.
LARGEST = 2.0
# Polygons are told from key points if this share of them, or more, can be none.
SHARE = 0.2
SLACK = 0.02

Corners = list[float]


class Meaning(NamedTuple):
    """What is known of the lines of a data set."""

    classes: int = 0
    """How many there are; 0: nothing says so."""
    task: str = ""
    """One of TASKS; empty: data.yaml does not say."""
    points: tuple[int, int] = (0, 0)
    """Key points of an object, and values of each: kpt_shape."""

    def box_of(self, line: str, place: str, polygons: Callable[[], bool]) -> tuple[int, Corners]:
        """Read a line: the class; and left, top, right and bottom of the box, in fractions of the image.

        Args:
            place: the line, for errors.
            polygons: tells, by all labels of the data set, whether longer lines are polygons beyond doubt.

        Raises:
            ValueError: the line is none of the task's, or may be of several tasks.
        """
        fields = line.split()
        label, values = _numbers(fields, place)
        if self.classes and label >= self.classes:
            raise ValueError(
                f"{place} has the class {label}, and there are {self.classes} names, for 0 to {self.classes - 1}"
            )
        self._check_count(len(fields), place, polygons)
        has_corners = len(fields) > BOX and not self.points[0]
        values = values if has_corners else values[:4]
        if large := next((value for value in values if abs(value) > LARGEST), None):
            raise ValueError(
                f"{place} has {large:g}, which is no fraction of an image's side: divide pixels by the width or height "
                "of the image"
            )
        if has_corners:
            return label, [min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])]
        x, y, width, height = values
        return label, [x - width / 2, y - height / 2, x + width / 2, y + height / 2]

    def _check_count(self, count: int, place: str, polygons: Callable[[], bool]) -> None:
        """Refuse a line whose number of values is not that of the task; or of one that nobody knows."""
        if self.points[0]:
            long = BOX + math.prod(self.points)
            if count not in (BOX, long):
                raise ValueError(
                    f"{place} has {count} values, and kpt_shape {list(self.points)} means {long}: class, box, key "
                    "points; correct the line, or kpt_shape in data.yaml"
                )
            return
        allowed = {
            "detect": count == BOX,
            "obb": count == ORIENTED,
            "segment": count == BOX or (count > BOX + 1 and count % 2 == 1),
        }
        if self.task:
            if not allowed[self.task]:
                raise ValueError(
                    f"{place} has {count} values, and task: {self.task} in data.yaml means "
                    f"{_of_task(self.task)}; it looks like {' or '.join(readings(count))}"
                )
        elif count != BOX and not (count > BOX + 1 and count % 2 == 1 and polygons()):
            raise ValueError(f"{place} has {count} values: it may be {', or '.join(readings(count))}")


def meaning_of(task: str, points: object, classes: int, file: Path) -> Meaning:
    """Read what data.yaml says: `task`, and `kpt_shape` as a list of texts.

    Raises:
        ValueError: they say nothing that is known.
    """
    shape = (0, 0)
    if points:
        sizes = [int(size) for size in points if str(size).isdigit()] if isinstance(points, list) else []
        if len(sizes) != 2 or sizes[0] < 1 or sizes[1] not in (2, 3):
            raise ValueError(
                f"{file}: kpt_shape is {points}: give the number of key points, and 2 for x and y or 3 with visibility"
            )
        shape = (sizes[0], sizes[1])
    if task and task not in TASKS:
        raise ValueError(f"{file}: task is {task}: boxes are learnt of {', '.join(TASKS)}")
    if task == "pose" and not points:
        raise ValueError(f"{file}: task is pose, and nothing says kpt_shape: add, for example, kpt_shape: [17, 3]")
    if points and task not in ("", "pose"):
        raise ValueError(f"{file}: task is {task}, and kpt_shape is for pose: leave one of them out")
    return Meaning(classes, task, shape)


def readings(count: int) -> list[str]:
    """Name what a line of so many values may be, and what to do in each case."""
    if count < BOX:
        return ["a box that is cut: write the class's number, and x and y of the middle, width and height of the box"]
    advice = []
    if count == BOX:
        advice.append("a box (task: detect)")
    if count == BOX + 1:
        advice += [
            "a box with a confidence, as predictions are saved, or with a track's number: leave the sixth value out",
            "an oriented box with an angle: write its four corners",
        ]
    if count == BOX + 2:
        advice.append("a box with a confidence and a track's number: leave these out")
    if count == ORIENTED:
        advice.append("an oriented box (say task: obb in data.yaml)")
    for values in (2, 3):
        if count > BOX + 1 and (count - BOX) % values == 0:
            points = (count - BOX) // values
            advice.append(f"a box with {points} key points (say kpt_shape: [{points}, {values}] in data.yaml)")
    if count > BOX + 1 and count % 2:
        advice.append(f"a polygon of {count // 2} corners (say task: segment in data.yaml)")
    if count > BOX + 2 and count % 2 == 0:
        advice.append("a polygon with a confidence at its end: leave that out, and say task: segment in data.yaml")
    return advice


def are_polygons(files: Iterable[Path]) -> bool:
    """Tell whether the longer lines of labels are polygons beyond doubt, where nothing says so.

    Oriented boxes and key points have one number of values in all lines. And of polygons many can be no box with key
    points, which would end outside of the image, or have its points elsewhere.
    """
    counts, strange, total = set(), 0, 0
    for values in _long_lines(files):
        counts.add(len(values))
        total += 1
        strange += not may_be_points(values)
    return len(counts) > 1 and strange >= SHARE * total


def may_be_points(values: Sequence[float]) -> bool:
    """Tell whether values can be a box inside the image, and points of which most are in the box."""
    x, y, width, height = values[:4]
    if min(width, height) <= 0 or any(
        side < -SLACK or side > 1 + SLACK for side in (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    ):
        return False
    for size in (2, 3):
        points = [values[start : start + 2] for start in range(4, len(values), size)]
        marked = [point for point in points if len(point) == 2 and any(point)]
        inside = [
            abs(across - x) <= width / 2 + SLACK and abs(down - y) <= height / 2 + SLACK for across, down in marked
        ]
        if (len(values) - 4) % size == 0 and 2 * sum(inside) >= len(marked):
            return True
    return False


def _long_lines(files: Iterable[Path]) -> Iterator[list[float]]:
    """Yield the values after the class of all lines that are longer than a box's."""
    for file in files:
        for line in read_lines(file):
            fields = line.split()
            if len(fields) > BOX + 1 and len(fields) % 2:
                yield _numbers(fields, str(file))[1]


def _of_task(task: str) -> str:
    return {"detect": str(BOX), "obb": str(ORIENTED), "segment": "5, or the class and three corners or more"}[task]


def _numbers(fields: list[str], place: str) -> tuple[int, list[float]]:
    """Read the class, which some tools write as 0.0, and the values after it."""
    try:
        number, values = float(fields[0]), [float(field) for field in fields[1:]]
    except ValueError:
        number, values = -1.0, []
    if not (math.isfinite(number) and number >= 0 and number == int(number)) or len(values) < BOX - 1:
        raise ValueError(
            f"{place} is {' '.join(fields)[:60]!r}: write the class's number, and x and y of the middle, width and "
            "height of the box, in fractions of the image"
        )
    return int(number), values
