"""Images and their boxes as samples of a detector: loading them, and bringing them to one size."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from app.config.needs import EVERYTHING, Needs
from app.data.boxes.checks import Boxes, numbered, read_boxes
from app.data.config import BoxData
from app.data.images.image_column import ImageColumn
from app.data.images.labeled_images import Images, load_images
from app.data.images.processor import ImageProcessor
from app.data.loading import Tables, load_tables
from app.data.tables.classes import coded, some
from app.data.tables.columns import name_of
from app.errors import UserError
from app.sampling.hashing import hash_of_bytes

if TYPE_CHECKING:
    from datasets import Dataset

# Sides of images must be a multiple of this: the coarsest features of the models have this stride.
STRIDE = 32
LARGEST = 640


class Table:
    """A table whose boxes are read and checked."""

    def __init__(self, table: "Dataset", config: BoxData, use: str):
        self.column = ImageColumn(table, config.image)
        self.boxes, self.labels = read_boxes(table, self.column, config, use)


class Detections(Sequence):
    """Images with boxes.

    A row is a dict of `pixels`, uint8 [channels, height, width]; `corners`, float32 [boxes, 4]: left, top, right and
    bottom in fractions of the image's sides; `classes`, int64 [boxes]; and `weight`, see `weights`.
    """

    def __init__(self, images: Images, boxes: Boxes):
        self.images, self.boxes = images, boxes
        self.weights = np.maximum(boxes.counts, 1).astype(np.float64)
        """What each image counts in a step's loss: its boxes; an image without any counts as one box."""
        image_hash = images.fingerprint
        parts = [boxes.corners, boxes.classes, boxes.ends]
        self.fingerprint = image_hash and f"{image_hash}-{hash_of_bytes(parts, bits=64)}"

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]  # no slices
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows with these numbers, in this order."""
        rows = self.images.__getitems__(indices)
        for row, index in zip(rows, indices, strict=True):
            row["corners"], row["classes"] = self.boxes.of(index)
            row["weight"] = self.weights[index]
        return rows


def load_boxes(config: BoxData, needs: Needs = EVERYTHING) -> tuple[Tables, dict[str, Table], list[str]]:
    """Load the tables of images, and read their boxes.

    Args:
        needs: of the run, `run.needs`.

    Returns:
        The tables; each with its boxes, by the name of the set, the one to train on as `train`; and the classes.
    """
    if config.size < 0 or config.size % STRIDE:
        raise UserError(f"--data.size {config.size}: must be a multiple of {STRIDE}, for example 320")
    tables = load_tables(config, columns=(config.image, config.boxes, config.label), needs=needs)
    evaluated = {name: Table(table, config, "to evaluate on") for name, table in tables.sets.items()}
    trained = Table(tables.train, config, "to train on") if tables.has_training_rows else evaluated[""]
    sets = {"train": trained, **evaluated}
    names, _, codes = coded([each.labels for each in sets.values()], config.classes)
    each = list({id(one): (one.boxes, code) for one, code in zip(sets.values(), codes, strict=True)}.values())
    numbered([boxes for boxes, _ in each], [code for _, code in each])
    if not len(sets["train"].boxes.corners):
        raise UserError(f"{name_of(tables.train)} has no box in any image: there is nothing to find")
    return tables, sets, names


def own_processor(column: ImageColumn, size: int) -> ImageProcessor:
    """Make the image processor of a model from scratch; its mean and deviation must still be set.

    Its `post_process_object_detection` is for models with a sigmoid for each class.
    """
    from transformers import DeformableDetrImageProcessorPil

    longer = min(max(column.size(0)), LARGEST)
    size = size or -(-longer // STRIDE) * STRIDE
    return cast(
        ImageProcessor, DeformableDetrImageProcessorPil(size=dict.fromkeys(("height", "width"), size), do_pad=False)
    )


def load_images_of(table: Table, processor: ImageProcessor, config: BoxData) -> Detections:
    """Bring the images of a table to the size of a processor; once for all runs if they fit into the cache."""
    return Detections(load_images(table.column, processor, config.cache_gb), table.boxes)


def describe(tables: Tables, names: Sequence[str], train: Detections, sets: dict[str, Detections]) -> str:
    """Describe the data: a line of numbers, one of classes, one for each further set, and what to know of boxes."""

    def amount(rows: Detections, what: str) -> str:
        return f"{len(rows):,} {what} with {len(rows.boxes.corners):,} boxes"

    height, width = train.images.shape[2:]
    first = [amount(train, "training images")] if tables.has_training_rows else []
    count = ", ".join([*first, amount(sets[""], tables.to_evaluate_on("images"))]) + f"; brought to {height} x {width}"
    bare = int(np.count_nonzero(train.boxes.counts == 0))
    mended = {name: rows.boxes.mended for name, rows in {"train": train, **sets}.items() if rows.boxes.mended}
    notes = [f"{bare:,} training images have no boxes: all of them is background"] if bare else []
    for name, rows in sets.items():
        what = f"--data.eval-sets {name}" if name else "the images to evaluate on"
        lone = int(np.count_nonzero(rows.boxes.counts == 0))
        if lone:
            none = ", so that nothing can be measured" if lone == len(rows) else ""
            notes.append(f"{lone:,} of {what} have no boxes{none}")
    notes += [f"{sum(mended.values()):,} boxes were cut off or left out (--data.bad-boxes mend)"] if mended else []
    more = tables.describe_others({name: amount(rows, "images") for name, rows in sets.items()})
    classes = f"{len(names)} {'classes' if names[1:] else 'class'}: {some(names)}"
    return "\n".join([count, classes, *more, *notes, *filter(None, [tables.note])])
