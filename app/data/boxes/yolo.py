"""YOLO's folders: a txt file of labels for each image, laid out as by ultralytics, darknet and annotation tools.

What a line of labels means is in yolo_lines.
"""

import glob
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from app.data.boxes.files import Row, SplitFiles, images_in, is_image
from app.data.boxes.image_files import ImageFiles
from app.data.boxes.yolo_lines import Meaning, are_polygons, meaning_of
from app.data.folders import split_in
from app.data.reading import is_number, naming, near, read_lines, read_whole
from app.data.tables.splits import split_of

LISTS = ("classes.txt", "obj.names", "labels/classes.txt", "labels.txt", "predefined_classes.txt")
# Values that YAML reads as nothing.
NOTHING = ("", "~", "null", "Null", "NULL")


class Layout(NamedTuple):
    """A data set: where the images of each split are, and what is known of their labels."""

    places: dict[str, list[Path]]
    """Of each split: folders of images, or txt files that list them."""
    names: tuple[str, ...]
    meaning: Meaning
    described: str = ""
    """The file that says so, if any."""
    root: Path = Path()
    """Where the paths of lists may begin."""


def parts(path: Path) -> dict[str, SplitFiles]:
    """Return the splits of a data.yaml or obj.data, or of a folder in one of the known layouts; else none."""
    layout = _layout(path)
    if layout is None:
        return {}
    watched = list(filter(None, [layout.described]))
    for place in (place for places in layout.places.values() for place in places):
        labels = [_labels_of(place)] if place.is_dir() else map(labels_file, _images_of(place, layout.root))
        watched += [str(each) for each in (place, *labels) if each.exists()]
    return {
        split: SplitFiles(
            rows,
            str(path),
            layout.names,
            numbered=not layout.names,
            more=(split,),
            watched=tuple(dict.fromkeys(watched)),
        )
        for split in layout.places
    }


def rows(source: str, names: tuple[str, ...], more: tuple[str, ...]) -> Iterator[Row]:
    """Yield the images of a split, sorted. An image without a file of labels has no boxes.

    Args:
        source: as `parts` takes it.
        more: the name of the split; default: train.

    Raises:
        ValueError: a line is none of a box, or may mean several things; or labels belong to no image.
    """
    layout = _layout(Path(source))
    if layout is None:
        raise ValueError(f"{source} is no data set of YOLO any more")
    split = more[0] if more else "train"
    images = {name: _images(layout, name) for name in layout.places}
    _refuse_lone_labels(layout.places[split], [image for every in images.values() for image in every])

    @cache
    def polygons() -> bool:
        every = (labels_file(image) for images_of_split in images.values() for image in images_of_split)
        return are_polygons(file for file in every if file.is_file())

    owners: dict[Path, Path] = {}
    for image in images[split]:
        labels = labels_file(image)
        if (other := owners.setdefault(labels, image)) != image:
            raise ValueError(f"{other} and {image.name} share the labels {labels}: rename one of the images")
        boxes, classes, places = [], [], []
        for number, line in enumerate(read_lines(labels) if labels.is_file() else [], 1):
            if not line.strip():
                continue
            label, box = layout.meaning.box_of(line, f"line {number} of {labels}", polygons)
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


def labels_file(image: Path) -> Path:
    """Return the file of an image's labels: in the folder of labels, or next to the image where that one has it."""
    file, beside = (place.with_suffix(".txt") for place in (_labels_of(image), image))
    return beside if not file.is_file() and beside.is_file() else file


def _labels_of(images: Path) -> Path:
    """Return where the labels of an image or of a folder are: the last `images` in its path becomes `labels`."""
    parts = list(images.parts)
    last = max((index for index, part in enumerate(parts) if part == "images"), default=None)
    if last is not None:
        parts[last] = "labels"
    return Path(*parts)


def _images(layout: Layout, split: str) -> list[Path]:
    images = [image for place in layout.places[split] for image in _images_of(place, layout.root)]
    if not images:
        raise ValueError(f"{', '.join(map(str, layout.places[split]))}: there is no image for {split} in it")
    return list(dict.fromkeys(images))


def _images_of(place: Path, root: Path) -> list[Path]:
    """List the images of a folder, or those that a txt file names."""
    if place.is_dir():
        return images_in(place)
    files = ImageFiles([place.parent, root])
    return [
        Path(os.path.normpath(files.find(line.strip(), f"line {number} of {place}")))
        for number, line in enumerate(read_lines(place), 1)
        if line.strip()
    ]


def _refuse_lone_labels(places: Iterable[Path], images: Iterable[Path]) -> None:
    """Refuse labels in the folders of labels of some folders of images that none of the images has."""
    used = {labels_file(image) for image in images}
    for place in filter(Path.is_dir, places):
        labels = _labels_of(place)
        lone = [file for file in sorted(labels.rglob("[!.]*.txt")) if file not in used and file.name not in LISTS]
        if labels != place and (file := next(filter(_has_lines, lone), None)):
            there = place / file.relative_to(labels).parent
            other = next((each for each in sorted(there.glob(f"{glob.escape(file.stem)}.*"))), None)
            if other:
                raise ValueError(
                    f"{file} has boxes, and {other} is of a format that is not read: convert it to JPEG or PNG"
                )
            raise ValueError(
                f"{file} has boxes, and {place} no image of that name: put the image there, or take the file away"
            )


def _has_lines(file: Path) -> bool:
    return any(line.strip() for line in read_lines(file))


def _layout(path: Path) -> Layout | None:
    """Find out how a data set is laid out; none if it is something else."""
    if path.is_file():
        kind = path.suffix.lower()
        return _of_yaml(path) if kind in (".yaml", ".yml") else _of_darknet(path) if kind == ".data" else None
    if file := _description_in(path):
        return _of_yaml(file)
    if files := sorted(path.glob("*.data")):
        return _of_darknet(files[0])
    names = _listed(path)
    places: dict[str, list[Path]] = {}
    for folder in [*sorted(path.glob("images/*/")), *sorted(path.glob("*/images/"))]:
        split = split_in(folder.name) or split_in(folder.parent.name)
        if split and _labels_of(folder).is_dir():
            places.setdefault(split, []).append(folder)
    if not places and (path / "images").is_dir() and any((path / "labels").rglob("*.txt")):
        places = {"train": [path / "images"]}
    if not places:
        folders = [(split_in(folder.name), folder) for folder in sorted(path.glob("*/"))]
        places = {split: [folder] for split, folder in folders if split and _has_labels(folder)}
        if not places and (labelled := [each for each in (path, path / "obj_train_data") if _has_labels(each)]):
            places = {"train": labelled[:1]}
    return Layout(places, names, Meaning(len(names)), _names_file(path) or "", path) if places else None


def _has_labels(folder: Path) -> bool:
    """Tell whether a folder has images with labels next to them, as darknet and LabelImg have."""
    for file in sorted(folder.glob("*.txt")) if folder.is_dir() else ():
        if file.name not in LISTS and any(is_image(other.name) for other in folder.glob(f"{glob.escape(file.stem)}.*")):
            fields = next((line.split() for line in read_lines(file) if line.strip()), [])
            if fields:  # an image without objects has an empty file
                return len(fields) > 4 and all(map(is_number, fields))
    return False


def _description_in(folder: Path) -> Path | None:
    """Return the yaml file of a folder that describes the data: data.yaml, dataset.yaml, or the only one that does."""
    usual = [*sorted(folder.glob("data.y*ml")), *sorted(folder.glob("dataset.y*ml"))]
    if usual:
        return usual[0]
    files = [file for file in sorted(folder.glob("*.y*ml")) if {"train", "names"} <= _read_yaml(file).keys()]
    if len(files) > 1:
        raise ValueError(f"{files[0]} and {files[1]} both describe data: name one of them instead of their folder")
    return files[0] if files else None


def _read_yaml(file: Path) -> dict[str, Any]:
    """Read a yaml file in which everything is text, as written: `no` is the name of a class, and 1.10 another one."""
    with naming(file, yaml.YAMLError, RecursionError):
        fields = yaml.load(read_whole(file), yaml.BaseLoader)
    return fields if isinstance(fields, dict) else {}


def _of_yaml(file: Path) -> Layout:
    fields = {key: value for key, value in _read_yaml(file).items() if value not in NOTHING}
    if "train" not in fields:
        raise ValueError(f"{file} names no folder of images to train on: add train: images/train, and names: [...]")
    names = _names(fields, file)
    meaning = meaning_of(fields.get("task", ""), fields.get("kpt_shape"), len(names), file)
    root = Path(os.path.expanduser(str(fields.get("path", ""))))
    places: dict[str, list[Path]] = {}
    for key, value in fields.items():
        listed = value if isinstance(value, list) else [value]
        if split := split_of(key):
            there = [_place(file, root, key, str(each)) for each in listed]
            places[split] = [place for place in there if place is not None]
    for split in places.keys() - {"train"}:
        if same := set(places[split]) & set(places["train"]):
            raise ValueError(
                f"{file}: train and {split} are both {same.pop()}, so that the images to evaluate on would be trained "
                f"on: take the line {split} out, and a part is held out"
            )
    places = {split: there for split, there in places.items() if there}
    return Layout(places, names, meaning, str(file), file.parent)


def _place(file: Path, root: Path, key: str, written: str) -> Path | None:
    """Return a folder of images, or a list of them, that a yaml file names; none if it is a test split elsewhere."""
    plain = written if "\\" not in written or (file.parent / written).exists() else written.replace("\\", "/")
    # Relative paths start at `path`, or where the file is; Roboflow's start one folder too high.
    places = [file.parent / root / plain, root / plain, file.parent / plain.removeprefix("../")]
    there = next((place for place in places if place.exists()), None)
    if there is None and key != "test":  # published sets often name one that is a download of its own
        fix = f": put it there, or take the line {key} out" if key != "train" else ""
        raise ValueError(f"{file}: {key} is {written}, and there is no {places[0]}{near(str(places[0]))}{fix}")
    return there and Path(os.path.normpath(there))


def _names(fields: dict[str, Any], file: Path) -> tuple[str, ...]:
    """Return the names of the classes, in the order of their numbers; their numbers if there is only `nc`."""
    class_names, count = fields.get("names") or (), fields.get("nc", "")
    if isinstance(class_names, dict):
        numbers = [int(key) if key.isdigit() else key for key in class_names]
        if sorted(map(str, numbers)) != sorted(map(str, range(len(class_names)))):
            raise ValueError(
                f"{file}: names has the numbers {', '.join(map(str, numbers))}: number the classes from 0, without a "
                "gap"
            )
        class_names = [name for _, name in sorted(zip(numbers, class_names.values(), strict=True))]
    if isinstance(class_names, str):
        class_names = _lines_of(file.parent / class_names) if (file.parent / class_names).is_file() else [class_names]
    if count and not count.isdigit():
        raise ValueError(f"{file}: nc is {count}: give the number of classes")
    if count and class_names and int(count) != len(class_names):
        raise ValueError(f"{file}: nc is {count}, and names has {len(class_names)}: correct one of them")
    return _checked(class_names or [str(number) for number in range(int(count or 0))], file)


def _checked(names: Iterable[Any], file: Path | str) -> tuple[str, ...]:
    number_by_name: dict[str, int] = {}
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{file}: the class {number} has no name: {name!r:.60}")
        if (first := number_by_name.setdefault(name.strip(), number)) != number:
            raise ValueError(f"{file}: the classes {first} and {number} have one name, {name}: give each one its own")
    return tuple(number_by_name)


def _of_darknet(file: Path) -> Layout:
    """Read an obj.data of darknet, as CVAT writes it too: lines such as `train = data/train.txt`."""
    lines = [line.partition("=") for line in read_lines(file) if "=" in line]
    fields = {key.strip(): value.strip() for key, _, value in lines}
    if "train" not in fields:
        raise ValueError(f"{file} names no list of images to train on: add train = train.txt")
    files = ImageFiles([file.parent])
    names: tuple[str, ...] = ()
    if "names" in fields:
        listed = files.find(fields["names"], f"names of {file}")
        names = _checked(_lines_of(listed), listed)
    if names and fields.get("classes", "").isdigit() and int(fields["classes"]) != len(names):
        raise ValueError(f"{file}: classes is {fields['classes']}, and {listed} has {len(names)} names: correct one")
    places = {
        split: [files.find(listing, f"{key} of {file}")]
        for key, listing in fields.items()
        if listing and (split := split_of(key))
    }
    return Layout(places, names, Meaning(len(names)), str(file), file.parent)


def _names_file(folder: Path) -> str | None:
    files = [folder / name for name in LISTS] + sorted(folder.glob("*.names"))
    return next((str(file) for file in files if file.is_file()), None)


def _listed(folder: Path) -> tuple[str, ...]:
    """Return the names in a file of them, if the folder has one."""
    file = _names_file(folder)
    return _checked(_lines_of(Path(file)), file) if file else ()


def _lines_of(file: Path) -> list[str]:
    return [line.strip() for line in read_lines(file) if line.strip()]
