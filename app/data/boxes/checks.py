"""The boxes of a table as arrays: read, checked against their images, and mended where that is asked for."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from app.data.cache import cache_folder, remember, using_cache
from app.data.config import BoxData
from app.data.images.image_column import PATHS_AT_ONCE, ImageColumn
from app.data.tables.columns import LabelColumn, check_columns, held, is_list, is_number, row_name
from app.errors import UserError
from app.sampling.hashing import key_of
from app.sampling.pieces import Pieces

if TYPE_CHECKING:
    from datasets import Dataset

# Pixels by which a box may end outside its image: annotation tools count from 0 or from 1, and round.
SLACK = 1.0
# By which fractions of an image's sides are rounded beyond 1.
EDGE = 0.01
# Part of the cache's key: raise it when sizes are measured in another way.
SIZES = 2


@dataclass
class Boxes:
    """The boxes of all images, one after the other."""

    corners: np.ndarray
    """Left, top, right, bottom in fractions of the image's sides: float32 [boxes, 4]."""
    classes: np.ndarray
    """int64 [boxes]; set once the classes of all tables are known."""
    ends: np.ndarray
    """Where the boxes of each image end, int64 [images]."""
    mended: int = 0
    """Boxes that were cut off or left out."""

    @property
    def counts(self) -> np.ndarray:
        """Return the number of boxes of each image."""
        return np.diff(self.ends, prepend=0)

    def of(self, image: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an image's corners [boxes, 4] and classes [boxes]."""
        span = slice(self.ends[image - 1] if image else 0, self.ends[image])
        return self.corners[span], self.classes[span]

    def leave_out(self, out: np.ndarray) -> None:
        """Leave out the marked boxes."""
        image = np.repeat(np.arange(len(self.ends)), self.counts)
        self.ends = np.cumsum(np.bincount(image[~out], minlength=len(self.ends)))
        self.corners, self.classes = self.corners[~out], self.classes[~out]


def read_boxes(table: "Dataset", column: ImageColumn, config: BoxData, use: str) -> tuple[Boxes, LabelColumn]:
    """Read and check the boxes of a table; and the column of their classes, which are still to be numbered.

    Args:
        use: what the table is for, to stand after the number of its boxes.

    Raises:
        UserError: a column is missing or holds something else; or a box is wrong, see `_check`.
    """
    check_columns(table, [config.boxes], "boxes")
    check_columns(table, [config.label], "label")
    labels = LabelColumn(table, config.label)
    flat, counts = _flat(table, config.boxes)
    if (labels.counts != counts).any() or not is_list(table.data.schema.field(config.label).type):
        row = int(np.flatnonzero(labels.counts != counts)[0]) if (labels.counts != counts).any() else 0
        raise UserError(
            f"--data.label {config.label}: {row_name(table, row)} has {labels.counts[row]} classes for {counts[row]} "
            "boxes: give a list with one for each"
        )
    image = np.repeat(np.arange(len(table)), counts)
    if config.box_format == "size":
        flat = np.concatenate([flat[:, :2], flat[:, :2] + flat[:, 2:]], axis=1)
    sizes = _sizes(table, column)
    _check_sizes(table, column, sizes)
    scale = np.tile(sizes[image], 2)
    is_relative = np.zeros(len(table), bool)
    if "relative" in table.column_names:
        is_relative = np.array(table.select_columns(["relative"])["relative"], bool)
        flat = np.where(is_relative[image, None], flat * scale, flat)
    _refuse_fractions(table, flat, sizes, image, is_relative, use)
    boxes = Boxes((flat / scale).astype(np.float32), np.zeros(len(flat), np.int64), np.cumsum(counts))
    boxes.mended = int(np.count_nonzero(_check(table, config, flat, sizes, image, use)))
    boxes.corners = np.clip(boxes.corners, 0, 1)
    return boxes, labels


def empty(boxes: Boxes) -> np.ndarray:
    """Mark the boxes without an area."""
    return np.any(boxes.corners[:, 2:] <= boxes.corners[:, :2], axis=1)


def _flat(table: "Dataset", name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of all boxes, float64 [boxes, 4], and how many boxes each row has."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = table.select_columns([name]).with_format("arrow")[:].column(name)
    lists = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    kind = lists.type
    if not (is_list(kind) and is_list(kind.value_type) and is_number(kind.value_type.value_type)):
        raise UserError(f"--data.boxes {name} of {held(table, name)}: give lists of boxes, each of four numbers")
    counts = np.asarray(pc.fill_null(pc.list_value_length(lists), 0), np.int64)
    boxes = lists.flatten()
    lengths = np.asarray(pc.fill_null(pc.list_value_length(boxes), 0), np.int64)
    if (lengths != 4).any():
        box = int(np.flatnonzero(lengths != 4)[0])
        row = int(Pieces.of(counts).piece_of(box))
        raise UserError(
            f"--data.boxes {name}: {row_name(table, row)} has a box of {lengths[box]} numbers: give four, see "
            "--data.box-format"
        )
    return np.asarray(boxes.flatten().cast(pa.float64())).reshape(-1, 4), counts


def _sizes(table: "Dataset", column: ImageColumn) -> np.ndarray:
    """Return width and height of each image, turned as its camera says: float64 [images, 2]. Only headers are read."""

    def measure() -> list[tuple[int, int]]:
        blocks = (range(start, min(start + PATHS_AT_ONCE, len(table))) for start in range(0, len(table), PATHS_AT_ONCE))
        with ThreadPoolExecutor() as pool:
            return [
                size for block in pool.map(lambda rows: [column.size(row) for row in rows], blocks) for size in block
            ]

    with using_cache():
        folder = cache_folder() / "sizes"
        folder.mkdir(parents=True, exist_ok=True)
        sides = remember(folder / f"{key_of('sizes', SIZES, column.identity(), column.name)}.json", measure)
    return np.array(sides, np.float64).reshape(-1, 2)


def _check_sizes(table: "Dataset", column: ImageColumn, sizes: np.ndarray) -> None:
    """Refuse a file of boxes that says another size of an image than it has: the boxes would be in other places."""
    if "size" not in table.column_names:
        return
    for row, stated in enumerate(table.select_columns(["size"])["size"]):
        if stated and tuple(stated) != tuple(sizes[row]):
            said, actual = (f"{width:g} x {height:g}" for width, height in (stated, sizes[row]))
            turn = column.turn(row)
            raise UserError(
                f"{table[row]['file']} says that {table[row]['image']} is {said} pixels, and it is {actual}"
                f"{f' {turn}' if turn else ''}: its boxes would be in wrong places; give the image that was annotated, "
                "or annotate this one"
            )


def _refuse_fractions(
    table: "Dataset", flat: np.ndarray, sizes: np.ndarray, image: np.ndarray, is_relative: np.ndarray, use: str
) -> None:
    """Refuse boxes in pixels that all lie within the first pixel of larger images: they are fractions of the sides."""
    in_pixels = np.flatnonzero(~is_relative[image])
    if not len(in_pixels) or not flat[in_pixels].any() or (sizes[image[in_pixels]] <= 1 + SLACK).any():
        return
    if not (flat[in_pixels] <= 1 + EDGE).all():
        return
    first = int(in_pixels[0])
    row = int(image[first])
    corners = ", ".join(f"{value:g}" for value in flat[first])
    raise UserError(
        f"{_place(table, row, int(np.count_nonzero(image[:first] == row)))} has the box {corners} (left, top, right, "
        f"bottom), in an image of {sizes[row][0]:g} x {sizes[row][1]:g}, and none of the {len(in_pixels):,} boxes "
        f"{use} reaches beyond the first pixel: they seem to be fractions of the image's sides, and pixels are read "
        "here; multiply them by the width and height of their image"
    )


def _check(
    table: "Dataset", config: BoxData, flat: np.ndarray, sizes: np.ndarray, image: np.ndarray, use: str
) -> np.ndarray:
    """Mark the boxes that end outside their image or have no area; those within SLACK count as inside.

    Raises:
        UserError: there is one, and --data.bad-boxes does not say to mend it, or its numbers are not finite.
    """
    bounds = np.tile(sizes[image], 2)
    kinds = {
        "with a number that is not finite": ~np.isfinite(flat).all(axis=1),
        "without an area": ~(flat[:, 2:] > flat[:, :2]).all(axis=1),
        "that ends outside its image": ((flat < -SLACK) | (flat > bounds + SLACK)).any(axis=1),
    }
    lost, *rest = kinds.values()
    wrong = np.any([lost, *rest], axis=0)
    if not wrong.any() or (config.bad_boxes == "mend" and not lost.any()):
        return wrong
    told = lost if lost.any() else wrong
    box = int(np.flatnonzero(told)[0])
    row = int(image[box])
    kind = next(kind for kind, which in kinds.items() if which[box])
    inside = int(np.count_nonzero(image[:box] == row))
    corners = ", ".join(f"{value:g}" for value in flat[box])
    fix = _other_reading(table, config, flat, bounds) or (
        "Mend the file, or give --data.bad-boxes mend to cut such boxes off, and to leave out those without an area"
    )
    raise UserError(
        f"{_place(table, row, inside)} has a box {kind}: {corners} (left, top, right, bottom, in pixels), in an image "
        f"of {sizes[row][0]:g} x {sizes[row][1]:g}; {np.count_nonzero(told):,} of the {len(flat):,} boxes {use} are "
        f"wrong. {'Give their numbers, or leave them out of the file' if lost.any() else fix}"
    )


def _other_reading(table: "Dataset", config: BoxData, flat: np.ndarray, bounds: np.ndarray) -> str:
    """Say what to do if the numbers of all boxes fit their images when they are read in another way; else nothing.

    Then none is to be mended: the boxes would stay where nothing is.
    """
    from_file = "places" in table.column_names  # read from a file of boxes and not from columns
    first, second = flat[:, :2], flat[:, 2:]
    if from_file and str(table[0]["file"]).endswith(".xml"):  # whose numbers have names
        return ""
    corners = config.box_format == "corners" and not from_file
    if corners:
        other, what = np.concatenate([first, first + second], axis=1), "left, top, width, height"
    elif from_file and table[0]["relative"]:
        other, what = np.concatenate([(first + second) / 2, second - first], axis=1), "left, top, right, bottom"
    else:
        other, what = np.concatenate([first, second - first], axis=1), "left, top, right, bottom"
    fits = (other[:, 2:] > other[:, :2]).all() and (other >= -SLACK).all() and (other <= bounds + SLACK).all()
    if not fits or len(flat) < 2:
        return ""
    fix = "convert the file" if from_file else f"give --data.box-format {'size' if corners else 'corners'}"
    return f"All boxes fit if their numbers are {what}: {fix}"


def _place(table: "Dataset", row: int, box: int) -> str:
    """Name a box by its file and its place there; or by its row."""
    if "places" in table.column_names:
        return f"{table[row]['places'][box]} of {os.path.relpath(table[row]['file'])}"
    return f"box {box} (counted from 0) of {row_name(table, row)}"


def numbered(boxes: Sequence[Boxes], codes: Sequence[np.ndarray]) -> None:
    """Set the classes of boxes, and leave out those without an area."""
    for each, values in zip(boxes, codes, strict=True):
        each.classes = values
        each.leave_out(empty(each))
