"""Boxes of the objects in images: a line of a table for each box, or a list in the results format of COCO."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from app.commands.predict import tables
from app.data.reading import read_fields, reading
from app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

    from app.commands.predict.command import Options
    from app.data.images.image_column import ImageColumn

OVERLAYS = "overlays"
OWN = ("row", "file", "prediction", "probability", "left", "top", "right", "bottom")


class Found(NamedTuple):
    """What is found in an image: boxes [boxes, 4] as left, top, right, bottom in its pixels, with labels and scores."""

    boxes: np.ndarray
    labels: list[str]
    scores: np.ndarray


class Detector:
    """A finished detector, with the image processor that it was trained with."""

    def __init__(self, name: str):
        """Load the model.

        Raises:
            UserError: it cannot be loaded.
        """
        import torch
        from transformers import AutoModelForObjectDetection

        from app.tasks.detection.networks import detector_processor
        from app.tasks.pretrained import load_model

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.processor = detector_processor(name, 0)
        self.model = load_model(AutoModelForObjectDetection, name).eval().to(self.device)
        self.names = [str(label) for _, label in sorted(self.model.config.id2label.items())]

    def find(self, column: "ImageColumn", rows: list[int], threshold: float) -> "list[tuple[Image, Found]]":
        """Return images with what is found in them, brought to one size as in training."""
        import torch

        from app.data.images.augment import ImageCollate
        from app.data.images.labeled_images import load_images
        from app.tasks.detection.networks import found_in

        pixels = load_images(column, self.processor, 0)
        inputs = ImageCollate.of(self.processor)([pixels[row] for row in rows])
        images = [column.read(row) for row in rows]
        with torch.inference_mode():
            output = self.model(pixel_values=inputs["pixel_values"].to(self.device))
        sizes = [(image.height, image.width) for image in images]
        each = found_in(output, self.processor, sizes, threshold)
        return [(image, self._plain(detected)) for image, detected in zip(images, each, strict=True)]

    def _plain(self, tensors: dict[str, Any]) -> Found:
        values = {name: tensor.float().cpu().numpy() for name, tensor in tensors.items()}
        order = np.argsort(-values["scores"], kind="stable")
        labels = [self.names[int(label)] for label in values["labels"][order]]
        return Found(values["boxes"][order].astype(float), labels, values["scores"][order].astype(float))


def photos(data: str) -> "Dataset | None":
    """Return the pictures of a folder that holds nothing else, or a single picture; None of data of another kind."""
    import datasets

    from app.data.boxes.files import images_in, is_image
    from app.data.folders import files_below

    place = Path(data).expanduser()
    if place.is_dir():
        files = images_in(place)
        only = files and len(files) == sum(1 for _ in files_below(str(place)))
    else:
        files, only = [place], place.is_file() and is_image(place.name)
    return datasets.Dataset.from_dict({"image": list(map(str, files))}) if only else None


class Ids:
    """Numbers of images and of classes in COCO's results: those of an annotation file, or else counted."""

    def __init__(self, file: str, names: list[str]):
        """Read them.

        Args:
            file: with annotations in COCO's format; empty: images are counted from 0, classes from 1.
            names: of the model's classes.

        Raises:
            UserError: the file cannot be read, or lacks a class.
        """
        self.file = file
        self._images: dict[str, Any] = {}
        self.classes = {name: place for place, name in enumerate(names, 1)}
        if not file:
            return
        content = read_fields("--annotations", file)
        with reading("--annotations", file, KeyError, TypeError, advice="give a file in COCO's format"):
            self._images = {Path(str(image["file_name"])).name: image["id"] for image in content["images"]}
            self.classes = {str(each["name"]): each["id"] for each in content["categories"]}
        if lost := [name for name in names if name not in self.classes]:
            there = ", ".join(self.classes)
            raise UserError(f"--annotations {file}: it has no category {lost[0]}, a class of the model; it has {there}")

    def image(self, row: int, file: str) -> Any:
        """Return the number of an image."""
        if not self.file:
            return row
        if Path(file).name not in self._images:
            raise UserError(f"--annotations {self.file}: it has no image {Path(file).name or f'for row {row}'}")
        return self._images[Path(file).name]


def main(options: "Options", model: str, data: dict[str, Any], rows: "Dataset") -> int:
    """Write what is found in each image, and return the exit status.

    Raises:
        UserError: the model cannot be loaded, an image cannot be read, or a file is there already.
    """
    from app.data.images.image_column import ImageColumn

    name = options.image or data.get("image") or "image"
    copies = tables.to_copy(rows, options.keep) if options.keep else None
    file, column, detector = Path(options.to or tables.FILE), ImageColumn(rows, name), Detector(model)
    coco = file.suffix == ".json"
    if options.annotations and not coco:
        raise UserError(f"--annotations {options.annotations} is for COCO's results: give --to NAME.json")
    ids = Ids(options.annotations, detector.names)
    pictures = _pictures(options, file)
    results, count = list[dict[str, Any]](), 0
    with tables.Writer(file) as writer:
        for row, (image, detected) in enumerate(_each(detector, column, options)):
            path = column.path(row)
            if pictures:
                _draw(image, detected, detector.names).save(pictures / f"{Path(path).stem or 'row'}-{row}.png")
            copied = copies[row] if copies else {}
            for box, label, score in zip(
                detected.boxes.tolist(), detected.labels, detected.scores.tolist(), strict=True
            ):
                count += 1
                if coco:
                    left, top, right, bottom = box
                    about = {"image_id": ids.image(row, path), "category_id": ids.classes[label]}
                    results.append({**about, "bbox": [left, top, right - left, bottom - top], "score": score})
                    continue
                corners = dict(zip(("left", "top", "right", "bottom"), box, strict=True))
                writer.add({"row": row, **copied, "file": path, "prediction": label, "probability": score, **corners})
        if coco:
            writer.whole(json.dumps(results))
    drawn = f"; drawn in {pictures}" if pictures else ""
    more = f" (no box has a score of {options.threshold:g} or more: --threshold)" if not count else ""
    images = f"{len(column):,} image{'s' * (len(column) != 1)}"
    print(f"{file}: {count:,} boxes in {images}{more}{drawn}")
    return 0


def _each(detector: Detector, column: "ImageColumn", options: "Options") -> "Iterator[tuple[Image, Found]]":
    for start in range(0, len(column), options.batch):
        rows = range(start, min(start + options.batch, len(column)))
        yield from detector.find(column, list(rows), options.threshold)


def _pictures(options: "Options", file: Path) -> Path | None:
    """Make the folder of the pictures, if they are asked for, next to the table."""
    if not options.overlay:
        return None
    folder = file.parent / OVERLAYS
    if folder.exists() and any(folder.iterdir()) and not options.overwrite:
        raise UserError(f"--overlay: {folder} is not empty: move it away, or give --overwrite to replace pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _draw(image: "Image", detected: Found, names: list[str]) -> "Image":
    """Draw what is found over the image."""
    from PIL import Image

    from app.tasks.detection.pictures import drawn

    labels = [names.index(label) for label in detected.labels]
    return Image.fromarray(drawn(np.asarray(image.convert("RGB")), detected.boxes, labels, names, detected.scores))
