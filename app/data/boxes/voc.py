"""Pascal VOC's xml files: one for each image, with its objects."""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from app.data.boxes.files import Row, SplitFiles, size_of
from app.data.boxes.image_files import ImageFiles
from app.data.folders import is_hidden, split_in
from app.data.reading import naming, read_lines

ANNOTATIONS = ("Annotations", "annotations", "xml", "labels", "")
FOLDERS = ("JPEGImages", "images", "Images", "")
SIDES = ("xmin", "ymin", "xmax", "ymax")
OTHER_SHAPES = {
    "robndbox": "a turned box, as roLabelImg writes: write the upright box around it as bndbox",
    "polygon": "a polygon: write the box around it as bndbox",
}


def parts(path: Path) -> dict[str, SplitFiles]:
    """Return the splits of a folder of xml files: by ImageSets/Main, by folders train and val, or one for all.

    Raises:
        ValueError: lists say what to evaluate on, but not what to train on.
    """
    if not path.is_dir():
        return {}
    if (folder := _xml_in(path)) is not None:
        sets = _lists_in(path / "ImageSets" / "Main")
        if not sets:
            return {"train": SplitFiles(rows, str(folder), more=(str(path),), watched=(str(path),))}
        return {
            split: SplitFiles(rows, str(folder), more=(str(path), str(file)), watched=(str(path),))
            for split, file in sets.items()
        }
    part_by_split: dict[str, SplitFiles] = {}
    for inner in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        if (split := split_in(inner.name)) and (folder := _xml_in(inner)) is not None:
            if split in part_by_split:
                first = part_by_split[split].more[0]
                raise ValueError(f"{first} and {inner} are both for {split}: join them, or rename one")
            part_by_split[split] = SplitFiles(rows, str(folder), more=(str(inner),), watched=(str(inner),))
    return part_by_split


def _lists_in(folder: Path) -> dict[str, Path]:
    """Return the lists of the splits; what `trainval` lists is trained on if there is no list of what to train on."""
    # Other lists there are of one class: aeroplane_train.txt.
    lists = {file.stem.lower(): file for file in sorted(folder.glob("*.txt")) if "_" not in file.stem}
    sets = {split: file for name, file in lists.items() if (split := split_in(name))}
    if "train" not in sets and "trainval" in lists:
        sets = {"train": lists["trainval"], **{split: file for split, file in sets.items() if split == "test"}}
    if sets and "train" not in sets:
        raise ValueError(
            f"{folder} has {next(iter(sets.values())).name}, but no train.txt: list there what to train on"
        )
    return sets


def rows(source: str, names: tuple[str, ...], more: tuple[str, ...]) -> Iterator[Row]:
    """Yield the images whose xml files are in a folder, in the order of these files' names.

    Args:
        more: the folder of the data set; and a txt file that lists the names to take, if not all.

    Raises:
        ValueError: a file is none of this kind, its image is missing, or an object is of another shape.
    """
    folder, root = Path(source), Path(more[0])
    images = ImageFiles([*(root / inner for inner in FOLDERS), folder])
    files = [file for file in sorted(folder.glob("*.xml")) if not is_hidden(file.name)]
    if len(more) > 1:
        lines = enumerate(read_lines(more[1]), 1)
        files = [_listed(folder, line, f"line {number} of {more[1]}") for number, line in lines if line.strip()]
    for file in files:
        with naming(file, ElementTree.ParseError, LookupError):  # the latter for an encoding that is unknown
            top = ElementTree.parse(file).getroot()
        if top.tag != "annotation":
            raise ValueError(
                f"{file} begins with <{top.tag}>, and Pascal VOC's files with <annotation>: export it as VOC"
            )
        boxes, classes, places = [], [], []
        for number, thing in enumerate(top.iter("object"), 1):
            place = f"object {number}"
            boxes.append(_box_of(thing, f"{place} of {file}"))
            if not (name := (thing.findtext("name") or "").strip()):
                raise ValueError(f"{place} of {file} has no name")
            classes.append(name)
            places.append(place)
        yield {
            "image": str(images.once(_image_of(file, (top.findtext("filename") or "").strip(), images), str(file))),
            "boxes": boxes,
            "classes": classes,
            "relative": False,
            "size": size_of({side: top.findtext(f"size/{side}") for side in ("width", "height")}, str(file)),
            "file": str(file),
            "places": places,
        }


def _xml_in(path: Path) -> Path | None:
    return next((path / name for name in ANNOTATIONS if any((path / name).glob("[!.]*.xml"))), None)


def _listed(folder: Path, line: str, place: str) -> Path:
    """Return the xml file that a line names: by its name, which may have blanks, or before a mark such as 1 or -1.

    Raises:
        ValueError: there is none.
    """
    name = line.strip()
    for stem in (name, Path(name).stem, name.split()[0]):
        if (file := folder / f"{stem}.xml").is_file():
            return file
    raise ValueError(
        f"{place} is {name!r:.60}, and there is no {folder / name}.xml: put it there, or take the line out"
    )


def _box_of(thing: ElementTree.Element, place: str) -> list[float]:
    if thing.find("bndbox") is None and (
        shape := next((kind for kind in OTHER_SHAPES if thing.find(kind) is not None), "")
    ):
        raise ValueError(f"{place} has no bndbox, but {OTHER_SHAPES[shape]}")
    try:
        return [float(thing.findtext(f"bndbox/{side}") or "") for side in SIDES]
    except ValueError:
        raise ValueError(f"{place} has no bndbox with the numbers {', '.join(SIDES)}") from None


def _image_of(file: Path, name: str, images: ImageFiles) -> Path:
    """Find an image by the name that its xml file says, or by the file's own.

    Raises:
        ValueError: there is none, or there is one of each name.
    """
    named, namesake = images.named(name), images.of_stem(file.stem)
    if named and namesake and named != namesake:
        raise ValueError(f"{file} says that its image is {named}, and there is {namesake} too: correct its filename")
    if image := named or namesake:
        return image
    raise ValueError(
        f"{file}: its image {name or file.stem} is in none of {', '.join(map(str, images.folders))}: put it into one"
    )
