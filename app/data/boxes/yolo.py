"""YOLO's folders: a txt file for each image, with `class x y width height` in each line, in fractions of the image."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from app.data.boxes.files import Part, Row, images_in, split_of
from app.data.reading import naming, near, read_lines, read_whole

LISTS = ("classes.txt", "obj.names", "labels/classes.txt")


def parts(path: Path) -> dict[str, Part]:
    """Return the splits of a data.yaml, or of a folder with one or with `images` and `labels`; else none."""
    if path.is_file():
        return _of_yaml(path) if path.suffix.lower() in (".yaml", ".yml") else {}
    described = [*sorted(path.glob("data.y*ml")), *sorted(path.glob("dataset.y*ml"))]
    if described:
        return _of_yaml(described[0])
    names = _listed(path)
    found = {
        split: _part(folder, names)
        for folder in [*sorted(path.glob("images/*/")), *sorted(path.glob("*/images/"))]
        if (split := split_of(folder.name) or split_of(folder.parent.name)) and _labels_of(folder).is_dir()
    }
    if not found and (path / "images").is_dir() and any((path / "labels").glob("*.txt")):
        found = {"train": _part(path / "images", names)}
    return found


def rows(source: str, names: tuple[str, ...], more: tuple[str, ...]) -> Iterator[Row]:
    """Yield the images of a folder, or of a txt file that lists them, sorted.

    An image without a file of labels has no boxes.

    Raises:
        ValueError: a line is none of a box, or its class has no name.
    """
    for image in _images_of(Path(source)):
        labels = _labels_file(image)
        boxes, classes, places = [], [], []
        lines = read_lines(labels) if labels.is_file() else []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            label, box = _box_of(line.split(), f"line {number} of {labels}", names)
            boxes.append(box)
            classes.append(label)
            places.append(f"line {number}")
        yield {
            "image": str(image),
            "boxes": boxes,
            "classes": classes,
            "relative": True,
            "size": [],
            "file": str(labels),
            "places": places,
        }


def _images_of(place: Path) -> list[Path]:
    """List the images of a folder, or those that a txt file names."""
    if place.is_dir():
        return images_in(place)
    return [Path(os.path.normpath(place.parent / line.strip())) for line in read_lines(place) if line.strip()]


def _box_of(fields: list[str], place: str, names: tuple[str, ...]) -> tuple[int, list[float]]:
    """Read a line: the class and a box, or the class and the corners of a polygon."""
    try:
        label, values = int(fields[0]), [float(field) for field in fields[1:]]
    except ValueError:
        label, values = -1, []
    if label < 0 or not (len(values) == 4 or (len(values) >= 6 and len(values) % 2 == 0)):
        raise ValueError(
            f"{place} is {' '.join(fields)[:60]!r}: write the class's number, and x and y of the middle, width and "
            "height of the box, in fractions of the image"
        )
    if names and label >= len(names):
        raise ValueError(f"{place} has the class {label}, and there are {len(names)} names, for 0 to {len(names) - 1}")
    if len(values) > 4:
        return label, [min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])]
    x, y, width, height = values
    return label, [x - width / 2, y - height / 2, x + width / 2, y + height / 2]


def _of_yaml(file: Path) -> dict[str, Part]:
    with naming(file, yaml.YAMLError):
        found = yaml.safe_load(read_whole(file))
    if not isinstance(found, dict) or "train" not in found:
        raise ValueError(f"{file} names no folder of images to train on: add train: images/train, and names: [...]")
    root, names = Path(os.path.expanduser(str(found.get("path") or ""))), _names(found.get("names"), file)
    parts = {}
    for split in ("train", "val", "test"):
        given = found.get(split)
        if not given:
            continue
        if isinstance(given, list):
            if len(given) != 1:
                raise ValueError(
                    f"{file}: {split} lists {len(given)} folders: give one folder, or a txt file of images"
                )
            given = given[0]
        # Relative paths start at `path`, or where the file is; Roboflow's start one folder too high.
        places = [file.parent / root / given, root / given, file.parent / str(given).removeprefix("../")]
        there = next((place for place in places if place.exists()), None)
        if there is None:
            if split == "test":
                continue  # published sets often name one that is a download of its own
            fix = f": put it there, or take the line {split} out" if split == "val" else ""
            raise ValueError(f"{file}: {split} is {given}, and there is no {places[0]}{near(str(places[0]))}{fix}")
        parts[split] = _part(there, names)
    return parts


def _names(given: Any, file: Path) -> tuple[str, ...]:
    if isinstance(given, dict):
        if sorted(given) != list(range(len(given))):
            raise ValueError(f"{file}: names has the numbers {sorted(given)}: number the classes from 0, without a gap")
        given = [given[number] for number in range(len(given))]
    return tuple(str(name) for name in given or ())


def _listed(folder: Path) -> tuple[str, ...]:
    """Return the names in a file of them, if the folder has one."""
    file = next((folder / name for name in LISTS if (folder / name).is_file()), None)
    if file is None:
        return ()
    return tuple(line.strip() for line in read_lines(file) if line.strip())


def _part(place: Path, names: tuple[str, ...]) -> Part:
    """Describe a folder of images, or a txt file that lists them; the cache watches their labels too."""
    labels = [_labels_of(place)] if place.is_dir() else map(_labels_file, _images_of(place))
    return Part(rows, str(place), names, numbered=not names, more=tuple(str(each) for each in labels if each.exists()))


def _labels_file(image: Path) -> Path:
    return _labels_of(image).with_suffix(".txt")


def _labels_of(images: Path) -> Path:
    """Return where the labels of an image or of a folder are: the last `images` in its path becomes `labels`."""
    parts = list(images.parts)
    last = max((index for index, part in enumerate(parts) if part == "images"), default=None)
    if last is not None:
        parts[last] = "labels"
    return Path(*parts)
