"""COCO's json files: images, categories, and annotations with a box each (cocodataset.org)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.data.boxes.files import Part, Row, load_json, split_of

KEYS = ("images", "annotations", "categories")
ROBOFLOW = "_annotations.coco.json"
# A file of captions or key points lies next to that of the boxes.
OTHERS = re.compile(r"captions|keypoints|panoptic|stuff|image_info")


def parts(path: Path) -> dict[str, Part]:
    """Return the splits of a COCO file, or of a folder with such files; none if it is something else."""
    if path.is_file():
        return {"train": _part(path)} if path.suffix.lower() == ".json" and _is_coco(path) else {}
    found: dict[str, Part] = {}
    files = sorted([*path.glob(f"*/{ROBOFLOW}"), *path.glob("annotations/*.json"), *path.glob("*.json")])
    for file in files:
        split = split_of(file.parent.name if file.name == ROBOFLOW else file.stem)
        if file.name == ROBOFLOW and file.parent == path:
            split = "train"
        if not split or OTHERS.search(file.stem) or not _is_coco(file):
            continue
        if split in found:
            raise ValueError(f"{found[split].source} and {file} are both for {split}: name one of them instead")
        found[split] = _part(file)
    return found


def rows(source: str, names: tuple[str, ...], more: tuple[str, ...] = ()) -> Iterator[Row]:
    """Yield the images of a file in its order.

    Raises:
        ValueError: an annotation names an image or a category that is not there, images or categories cannot be told
            apart, or an image file is missing.
    """
    file = Path(source)
    found = _load(file)
    number_of = {category["id"]: index for index, category in enumerate(_categories(found))}
    by_image: dict[Any, list[tuple[list[float], int, str]]] = {image["id"]: [] for image in found["images"]}
    for index, annotation in enumerate(found["annotations"]):
        place = f"annotations[{index}]"
        if annotation.get("iscrowd"):
            continue
        if annotation.get("image_id") not in by_image:
            raise ValueError(f"{place} of {file} has the image_id {annotation.get('image_id')}, which no image has")
        if annotation.get("category_id") not in number_of:
            raise ValueError(
                f"{place} of {file} has the category_id {annotation.get('category_id')}, which no category has"
            )
        box = annotation.get("bbox")
        if not isinstance(box, list) or len(box) != 4 or not all(isinstance(value, int | float) for value in box):
            raise ValueError(f"{place} of {file} has the bbox {box}: give [left, top, width, height], in pixels")
        left, top, width, height = map(float, box)
        corners = [left, top, left + width, top + height]
        by_image[annotation["image_id"]].append((corners, number_of[annotation["category_id"]], place))
    folder = _folder_of(file, found["images"])
    for image in found["images"]:
        own = by_image[image["id"]]
        stated = [float(image["width"]), float(image["height"])] if image.get("width") and image.get("height") else []
        yield {
            "image": str(folder / image["file_name"]),
            "boxes": [box for box, _, _ in own],
            "classes": [number for _, number, _ in own],
            "relative": False,
            "size": stated,
            "file": str(file),
            "places": [place for _, _, place in own],
        }


def _is_coco(file: Path) -> bool:
    with file.open("rb") as stream:
        begins = stream.read(1)
    found = load_json(file) if begins in (b"{", b"\xef") else None
    return isinstance(found, dict) and all(isinstance(found.get(key), list) for key in KEYS)


def _part(file: Path) -> Part:
    return Part(rows, str(file), tuple(str(each["name"]) for each in _categories(_load(file))))


def _load(file: Path) -> dict[str, Any]:
    """Read a file whose images and categories have an id of their own and a name."""
    found = load_json(file)
    for key, name in (("images", "file_name"), ("categories", "name")):
        places: dict[Any, int] = {}
        for index, each in enumerate(found[key]):
            place = f"{key}[{index}] of {file}"
            if not isinstance(each, dict):
                raise ValueError(f"{place} is {each!r:.60}: give an object with id and {name}")
            for needed in ("id", name):
                if not isinstance(each.get(needed), int | str):
                    raise ValueError(f"{place} has no {needed}")
            if (first := places.setdefault(each["id"], index)) != index:
                raise ValueError(
                    f"{place} has the id {each['id']}, which {key}[{first}] has too: give each one an id of its own"
                )
    return found


def _categories(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the categories in the order of their ids; Roboflow's first one, which no box has, is left out."""
    used = {annotation.get("category_id") for annotation in found["annotations"]}
    parents = {category.get("supercategory") for category in found["categories"]}
    return sorted(
        (each for each in found["categories"] if each["id"] in used or each["name"] not in parents),
        key=lambda each: each["id"],
    )


def _folder_of(file: Path, images: list[dict[str, Any]]) -> Path:
    """Find the folder of the images: next to the file, or in a folder that is named as usual."""
    if not images:
        return file.parent
    stem = re.sub(r"^(instances|annotations)_", "", file.stem)
    roots = [file.parent, file.parent.parent]
    folders = [root / inner for root in roots for inner in ("", "images", stem, f"images/{stem}")]
    first = images[0]["file_name"]
    for folder in folders:
        if (folder / first).is_file():
            return folder
    looked = ", ".join(dict.fromkeys(str(folder) for folder in folders))
    raise ValueError(f"{file}: its first image {first} is in none of {looked}: put the images into one of them")
