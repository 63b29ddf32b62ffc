"""Images with their classes: loading them, bringing them to one size, and keeping them decoded for all runs."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from app.config.needs import EVERYTHING, Needs
from app.data.cache import cache_folder, made_once, using_cache, with_labels
from app.data.config import ClassData
from app.data.images.image_column import ImageColumn
from app.data.images.processor import ImageProcessor
from app.data.loading import Tables, load_tables
from app.data.mixtures.joined import MixedRows
from app.data.rows import Rows
from app.data.streams.samples import StreamedSamples
from app.data.tables.columns import check_columns, held, is_text
from app.data.tables.labels import SINGLE, Labels, only_of_their_class, read_labels, streamed_classes
from app.distributed.environment import is_main_process
from app.errors import UserError
from app.sampling.hashing import hash_of_bytes, key_of

if TYPE_CHECKING:
    from datasets import Dataset

# Part of the cache's key: raise it when the stored pixels change.
FORMAT = 2
# Files of a folder of the cache.
PIXELS, HASH = "pixels.npy", "hash"
ROWS_AT_ONCE = 512
# Models from scratch take images of a side between these, in pixels.
SMALLEST, LARGEST = 32, 224
# Rows on which mean and deviation of the pixels are measured.
MEASURED = 10_000


class _Wanted(NamedTuple):
    """The flags that app.data.tables.labels needs."""

    label: tuple[str, ...]
    classes: tuple[str, ...] = ()
    problem: str = SINGLE


def load_labelled(config: ClassData, needs: Needs = EVERYTHING) -> tuple[Tables, Labels]:
    """Load the tables to train and to evaluate on, and the classes of their rows.

    Args:
        needs: of the run, `run.needs`.
    """
    wanted = _Wanted((config.label,), config.classes)

    def needed(table: "Dataset", out: np.ndarray) -> np.ndarray:
        _check_label(table, config.label)
        return only_of_their_class(table, out, wanted)

    tables = load_tables(config, needed, columns=(config.image, config.label), needs=needs)
    for table in (tables.train, *tables.sets.values()):
        _check_label(table, config.label)
    if tables.streams:
        wanted = wanted._replace(classes=streamed_classes(tables.train, wanted))
    labels = read_labels(tables.train, tables.evaluation, wanted, tables.others)
    return tables, replace(labels, streamed=tables.streams)


def _check_label(table: "Dataset", name: str) -> None:
    import pyarrow.types as types

    check_columns(table, [name], "label")
    kind = table.data.schema.field(name).type
    if not (is_text(kind) or types.is_integer(kind) or types.is_boolean(kind)):
        raise UserError(f"--data.label {name} of {held(table, name)}: classes are integers or strings")


def describe(tables: Tables, labels: Labels, train: "TrainingImages", eval_sets: "dict[str, Images]") -> str:
    """Describe the data: a line of numbers, one of classes, one for each further set, and what to know of splits."""
    height, width = train.shape[2:]
    size = f"brought to {height} x {width}"
    trained = f"{len(train.rows):,} training images{tables.streamed} {size}, " if tables.has_training_rows else ""
    count = f"{trained}{len(eval_sets['']):,} {tables.to_evaluate_on('images')}{'' if trained else ' ' + size}"
    more = tables.describe_others({name: f"{len(images):,} images" for name, images in eval_sets.items()})
    return "\n".join([count, labels.summary(), *more, *tables.notes()])


def own_processor(column: ImageColumn, size: int) -> ImageProcessor:
    """Make the image processor of a model from scratch; its mean and deviation must still be set."""
    from transformers import ViTImageProcessorPil

    if not size:
        size = min(max(*column.read(0).size, SMALLEST), LARGEST)
    return cast(ImageProcessor, ViTImageProcessorPil(size={"height": size, "width": size}))


class Images:
    """Images: a row is a dict of `pixels`, uint8 [channels, height, width], and `labels`, if there are any."""

    def __init__(
        self,
        read: Callable[[Sequence[int]], Iterable[np.ndarray]],
        shape: tuple[int, ...],
        labels: np.ndarray | None = None,
    ):
        """Take images from `read`, which takes row numbers.

        Args:
            shape: of all images together: [rows, channels, height, width].
            labels: class of each row.
        """
        self.read, self.shape, self.labels = read, tuple(shape), labels
        self.fingerprint: str | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows with these numbers, in this order."""
        samples = [{"pixels": pixels} for pixels in self.read(rows)]
        if self.labels is not None:
            for row, label in zip(samples, self.labels[rows], strict=True):
                row["labels"] = label
        return samples

    @property
    def example(self) -> dict[str, Any]:
        """Return the first row."""
        return self[0]

    def some(self, most: int) -> Iterator[np.ndarray]:
        """Yield the pixels of at most `most` images, spread evenly over the data, some at a time."""
        count = min(len(self), most)
        for start in range(0, count, ROWS_AT_ONCE):
            places = np.arange(start, min(start + ROWS_AT_ONCE, count)) * len(self) // count
            yield np.stack(list(self.read(places.tolist())))

    def statistics(self, scale: float) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation of each channel's pixels times `scale`, over at most 10,000 images.

        Sums are of integers, and so exact and the same everywhere.
        """
        total, sums = 0, np.zeros((2, self.shape[1]), np.int64)
        for pixels in self.some(MEASURED):
            wide = pixels.astype(np.int64)
            sums += [wide.sum((0, 2, 3)), np.square(wide).sum((0, 2, 3))]
            total += wide.size // self.shape[1]
        mean = sums[0] / total
        deviation = np.sqrt(np.maximum(sums[1] / total - mean**2, 0))
        # If all images are the same, there is nothing to scale.
        return (mean * scale).tolist(), (np.where(deviation > 0, deviation, 1.0) * scale).tolist()


class TrainingImages(NamedTuple):
    """Images to train on, and those that are looked at before."""

    rows: Images | StreamedSamples | MixedRows
    """Rows as those of Images; those of streamed data are decoded when they are read."""
    known: Images
    """All of them; or, of streamed data, some, of which all others have the size."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of all images together, [rows, channels, height, width]."""
        return (len(self.rows), *self.known.shape[1:])

    @property
    def example(self) -> dict[str, Any]:
        """Return some row, without a fetch of its chunk."""
        return self.known.example

    def statistics(self, scale: float) -> tuple[list[float], list[float]]:
        """Return what Images.statistics does, over the known images."""
        return self.known.statistics(scale)


def training_images(
    tables: Tables, config: ClassData, processor: ImageProcessor, labels: Labels, measured: bool
) -> TrainingImages:
    """Return the images to train on, with their classes; those of streamed data are decoded when they are read.

    Args:
        measured: whether their statistics are asked for.
    """
    column = ImageColumn(tables.train, config.image)
    limit = config.cache_gb if measured or not tables.streams else 0.0  # of streamed data, else only a row is read
    known = load_images(column, processor, limit, labels.train_values)
    wanted, shape = _Wanted((config.label,), tuple(labels.names)), known.shape[1:]

    def made(table: "Dataset") -> Rows:
        decode = _Decode(ImageColumn(table, config.image), processor, shape)
        _check_label(table, config.label)
        return Images(decode, (len(table), *shape), read_labels(tables.train, table, wanted).eval_values)

    decided_by = [FORMAT, column.name, column.mode, *_Decode(column, processor, shape).identity()]
    return TrainingImages(tables.samples(lambda: known, made, [*decided_by, *wanted]), known)


def load_images(
    column: ImageColumn, processor: ImageProcessor, cache_gb: float, labels: np.ndarray | None = None
) -> Images:
    """Bring images to the size that a processor gives them, once for all runs if they fit into the cache.

    Args:
        processor: its resizing and cropping are done here, its scaling and normalising by ImageCollate.
        cache_gb: size of all pixels, in GB, up to which they are kept on disk.
        labels: class of each row.
    """
    decode = _Decode(column, processor)
    shape = (len(column), *decode.shape)
    if np.prod(shape, dtype=np.int64) > cache_gb * 1e9:
        return Images(decode, shape, labels)
    key = key_of(FORMAT, column.identity(), column.name, column.mode, *decode.identity())
    with using_cache():
        folder = made_once(cache_folder() / f"images-{key}", lambda draft: _write(draft, shape, decode))
    images = Images(_Mapped(folder / PIXELS), shape, labels)
    images.fingerprint = with_labels((folder / HASH).read_text(), labels)
    return images


class _Decode:
    """Decode rows of a column and bring them to a processor's size."""

    def __init__(self, column: ImageColumn, processor: ImageProcessor, shape: tuple[int, ...] = ()):
        """Decode images, all of one shape; by default, of the shape of the first one."""
        self.column, self.processor = column, processor
        self.shape = shape or self._one(0).shape

    def __call__(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Return the pixels of rows, uint8 [channels, height, width]."""
        return [self._one(row) for row in rows]

    def _one(self, row: int) -> np.ndarray:
        image = self.column.read(row)
        made = self.processor(image, do_rescale=False, do_normalize=False, do_convert_rgb=False, return_tensors="np")
        (pixels,) = made["pixel_values"]
        if pixels.shape != getattr(self, "shape", pixels.shape):
            raise UserError(
                f"the model's image processor brings images to several sizes, {pixels.shape[1:]} and "
                f"{self.shape[1:]}: give --data.size"
            )
        return pixels

    def identity(self) -> list[str]:
        """Return what decides the pixels, apart from the files."""
        import PIL
        import transformers

        settings = {k: str(v) for k, v in self.processor.to_dict().items() if not k.startswith("image_")}
        return [json.dumps(settings, sort_keys=True), PIL.__version__, transformers.__version__]


class _Mapped:
    """Rows of a file that all processes of a machine map into memory; loading processes are sent its path."""

    def __init__(self, path: Path):
        self.path, self.pixels = path, np.load(path, mmap_mode="r")

    def __call__(self, rows: Sequence[int]) -> np.ndarray:
        return self.pixels[rows]

    def __reduce__(self):
        return _Mapped, (self.path,)


def _write(folder: Path, shape: tuple, decode: _Decode) -> None:
    """Decode all rows into a file in a folder, and write the hash of their pixels next to it."""
    from tqdm import tqdm

    pixels = np.lib.format.open_memmap(folder / PIXELS, "w+", np.uint8, shape)
    with tqdm(total=len(pixels), desc="Decoding", disable=None if is_main_process() else True) as bar:

        def written() -> Iterator[np.ndarray]:
            for number, rows in enumerate(_in_threads(decode, len(pixels))):
                start = number * ROWS_AT_ONCE
                pixels[start : start + len(rows)] = rows
                bar.update(len(rows))
                yield rows

        digest = hash_of_bytes(written())
    pixels.flush()
    (folder / HASH).write_text(digest)


def _in_threads(decode: _Decode, count: int) -> Iterator[np.ndarray]:
    """Yield the pixels of all rows, some at a time. Threads help, because image decoders release the GIL."""
    with ThreadPoolExecutor() as pool:
        for start in range(0, count, ROWS_AT_ONCE):
            rows = range(start, min(start + ROWS_AT_ONCE, count))
            yield np.concatenate(list(pool.map(lambda row: decode([row]), rows)))
