"""Pascal VOC's xml files: one for each image, with its objects."""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from app.data.boxes.files import IMAGES, Part, Row, split_of
from app.data.reading import naming, read_lines

ANNOTATIONS = ("Annotations", "annotations", "xml", "labels", "")
FOLDERS = ("JPEGImages", "images", "Images", "")
SIDES = ("xmin", "ymin", "xmax", "ymax")


def parts(path: Path) -> dict[str, Part]:
    """Return the splits of a folder of xml files: by ImageSets/Main, by folders train and val, or one for all."""
    if not path.is_dir():
        return {}
    if (folder := _xml_in(path)) is not None:
        lists = sorted((path / "ImageSets" / "Main").glob("*.txt"))
        # Other lists there are of one class: aeroplane_train.txt.
        sets = {split: file for file in lists if (split := split_of(file.stem)) and "_" not in file.stem}
        if "train" not in sets:
            return {"train": Part(rows, str(folder), more=(str(path),))}
        return {split: Part(rows, str(folder), more=(str(path), str(file))) for split, file in sets.items()}
    found = {}
    for inner in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        if (split := split_of(inner.name)) and (folder := _xml_in(inner)) is not None:
            found[split] = Part(rows, str(folder), more=(str(inner),))
    return found


def rows(source: str, names: tuple[str, ...], more: tuple[str, ...]) -> Iterator[Row]:
    """Yield the images whose xml files are in a folder, in the order of these files' names.

    Args:
        more: the folder of the data set; and a txt file that lists the names to take, if not all.

    Raises:
        ValueError: a file is none of this kind, or its image is missing.
    """
    folder, root = Path(source), Path(more[0])
    files = sorted(folder.glob("*.xml"))
    if len(more) > 1:
        files = [folder / f"{line.split()[0]}.xml" for line in read_lines(more[1]) if line.strip()]
    for file in files:
        with naming(file, ElementTree.ParseError, LookupError):  # the latter for an encoding that is unknown
            top = ElementTree.parse(file).getroot()
        boxes, classes, places = [], [], []
        for number, thing in enumerate(top.iter("object"), 1):
            place = f"object {number}"
            boxes.append(_box_of(thing, f"{place} of {file}"))
            if not (name := (thing.findtext("name") or "").strip()):
                raise ValueError(f"{place} of {file} has no name")
            classes.append(name)
            places.append(place)
        size = [float(top.findtext(f"size/{side}") or 0) for side in ("width", "height")]
        yield {
            "image": str(_image_of(file, top.findtext("filename") or "", root)),
            "boxes": boxes,
            "classes": classes,
            "relative": False,
            "size": size if all(size) else [],
            "file": str(file),
            "places": places,
        }


def _xml_in(path: Path) -> Path | None:
    return next((path / name for name in ANNOTATIONS if any((path / name).glob("*.xml"))), None)


def _box_of(thing: ElementTree.Element, place: str) -> list[float]:
    try:
        return [float(thing.findtext(f"bndbox/{side}") or "") for side in SIDES]
    except ValueError:
        raise ValueError(f"{place} has no bndbox with the numbers {', '.join(SIDES)}") from None


def _image_of(file: Path, name: str, root: Path) -> Path:
    """Find an image by the name that its xml file says, or by the file's own."""
    folders = [root / folder for folder in FOLDERS] + [file.parent]
    stems = [Path(name).name] if name else []
    for folder in folders:
        for candidate in [*stems, *(file.stem + end for end in sorted(IMAGES))]:
            if (folder / candidate).is_file():
                return folder / candidate
    raise ValueError(f"{file}: its image {name or file.stem} is in none of {', '.join(map(str, folders))}")
