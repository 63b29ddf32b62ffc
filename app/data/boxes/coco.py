"""COCO's json files: images, categories, and annotations with a box each (cocodataset.org)."""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.data.boxes.files import Row, SplitFiles, load_json, size_of
from app.data.boxes.image_files import ImageFiles
from app.data.folders import is_hidden, split_in
from app.data.reading import naming

KEYS = ("images", "annotations", "categories")
ROBOFLOW = "_annotations.coco.json"
# A file of captions or key points lies next to that of the boxes.
OTHERS = re.compile(r"captions|keypoints|panoptic|stuff|image_info")
# Crowds are left out; exporters write the mark as a number or as a word.
CROWD = {"1": True, "0": False, "true": True, "false": False, "none": False}


def parts(path: Path) -> dict[str, SplitFiles]:
    """Return the splits of a COCO file, or of a folder with such files; none if it is something else.

    Raises:
        ValueError: several files are for one split, or do not say which split they are for.
    """
    if path.is_file():
        return {"train": _part(path)} if path.suffix.lower() == ".json" and _is_coco(path) else {}
    files = sorted([*path.glob(f"*/{ROBOFLOW}"), *path.glob("annotations/*.json"), *path.glob("*.json")])
    files = [file for file in files if not is_hidden(file.name)]
    part_by_split: dict[str, SplitFiles] = {}
    for file in files:
        split = _split_of(file, path)
        if not split or OTHERS.search(file.stem) or not _is_coco(file):
            continue
        if split in part_by_split:
            raise ValueError(f"{part_by_split[split].source} and {file} are both for {split}: name one of them instead")
        part_by_split[split] = _part(file)
    if part_by_split:
        return part_by_split
    others = [file for file in files if _is_coco(file)]  # as CVAT and Label Studio name them, or of key points alone
    if len(others) > 1:
        raise ValueError(f"{' and '.join(map(str, others))}: their names say no split: name one of them instead")
    return {"train": _part(others[0])} if others else {}


def _split_of(file: Path, folder: Path) -> str:
    if file.name != ROBOFLOW:
        return split_in(file.stem)
    return "train" if file.parent == folder else split_in(file.parent.name)


def rows(source: str, names: tuple[str, ...], more: tuple[str, ...] = ()) -> Iterator[Row]:
    """Yield the images of a file in its order.

    Raises:
        ValueError: an annotation names an image or a category that is not there, images or categories cannot be told
            apart, or an image file is missing.
    """
    file = Path(source)
    content = _load(file)
    number_of = {category["id"]: index for index, category in enumerate(_categories(content, file))}
    by_image: dict[Any, list[tuple[list[float], int, str]]] = {image["id"]: [] for image in content["images"]}
    for index, annotation in enumerate(content["annotations"]):
        place = f"annotations[{index}]"
        if _is_crowd(annotation.get("iscrowd"), f"{place} of {file}"):
            continue
        for key, by_id in (("image_id", by_image), ("category_id", number_of)):
            if not _is_id(value := annotation.get(key)) or value not in by_id:
                same = next((each for each in by_id if str(each) == str(value)), None)
                hint = f", but one has {same!r}: write both alike" if same is not None else ""
                what = key.removesuffix("_id")
                raise ValueError(f"{place} of {file} has the {key} {value!r:.60}, which no {what} has{hint}")
        corners = _corners(annotation.get("bbox"), f"{place} of {file}")
        by_image[annotation["image_id"]].append((corners, number_of[annotation["category_id"]], place))
    files = ImageFiles(_folders_of(file))
    for index, image in enumerate(content["images"]):
        boxes_of_image, place = by_image[image["id"]], f"images[{index}] of {file}"
        yield {
            "image": str(files.once(files.find(str(image["file_name"]), place), place)),
            "boxes": [box for box, _, _ in boxes_of_image],
            "classes": [number for _, number, _ in boxes_of_image],
            "relative": False,
            "size": size_of(image, place),
            "file": str(file),
            "places": [place for _, _, place in boxes_of_image],
        }


def _is_crowd(mark: object, place: str) -> bool:
    if (crowd := CROWD.get(str(mark).removesuffix(".0").lower())) is None:
        raise ValueError(f"{place} has the iscrowd {mark!r:.60}: give 0 or 1")
    return crowd


def _corners(box: object, place: str) -> list[float]:
    """Return left, top, right and bottom of a bbox."""
    if not box:
        raise ValueError(
            f"{place} has no bbox: give [left, top, width, height], in pixels, of what its segmentation shows"
        )
    numbers = isinstance(box, list) and all(isinstance(value, int | float) for value in box)
    if not isinstance(box, list) or not numbers or len(box) != 4:
        raise ValueError(f"{place} has the bbox {box!r:.60}: give [left, top, width, height], in pixels")
    left, top, width, height = map(float, box)
    return [left, top, left + width, top + height]


def _is_coco(file: Path) -> bool:
    """Tell whether a file is COCO's; two of its three lists are enough to say which one is missing."""
    with naming(file), file.open("rb") as stream:
        begins = stream.read(64).removeprefix(codecs.BOM_UTF8).lstrip()
    content = load_json(file) if begins.startswith(b"{") or not begins else None
    missing = [key for key in KEYS if not (isinstance(content, dict) and isinstance(content.get(key), list))]
    if len(missing) == 1:
        raise ValueError(
            f"{file} has no list of {missing[0]}: give COCO's three lists, images, annotations and categories"
        )
    return not missing


def _part(file: Path) -> SplitFiles:
    return SplitFiles(rows, str(file), tuple(str(each["name"]) for each in _categories(_load(file), file)))


def _load(file: Path) -> dict[str, Any]:
    """Read a file whose images and categories have an id of their own and a name."""
    content = load_json(file)
    for key, needed in (("images", ("id", "file_name")), ("categories", ("id", "name")), ("annotations", ())):
        places: dict[Any, int] = {}
        for index, each in enumerate(content[key]):
            place = f"{key}[{index}] of {file}"
            if not isinstance(each, dict):
                raise ValueError(f"{place} is {each!r:.60}: give an object with {' and '.join(needed) or 'a bbox'}")
            for name in needed:
                if not _is_id(value := each.get(name)):
                    wrong = (
                        f"the {name} {value!r:.60}: give a whole number or a text"
                        if value is not None
                        else f"no {name}"
                    )
                    raise ValueError(f"{place} has {wrong}")
            if needed and (first := places.setdefault(each["id"], index)) != index:
                raise ValueError(
                    f"{place} has the id {each['id']}, which {key}[{first}] has too: give each one an id of its own"
                )
    return content


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _categories(content: dict[str, Any], file: Path) -> list[dict[str, Any]]:
    """Return the categories in the order of their ids; Roboflow's first one, which no box has, is left out.

    Raises:
        ValueError: two have one name, or there are ids of two types, which have no order.
    """
    used = {value for each in content["annotations"] if _is_id(value := each.get("category_id"))}
    parents = [category.get("supercategory") for category in content["categories"]]
    categories = {
        index: each
        for index, each in enumerate(content["categories"])
        if each["id"] in used or each["name"] not in parents
    }
    places: dict[str, int] = {}
    for index, each in categories.items():
        place, first = f"categories[{index}] of {file}", next(iter(categories))
        if isinstance(each["id"], str) != isinstance(categories[first]["id"], str):
            raise ValueError(
                f"{place} has the id {each['id']!r}, and categories[{first}] {categories[first]['id']!r}: give them "
                "all numbers, or all of them texts, and annotations the same"
            )
        if (same := places.setdefault(str(each["name"]), index)) != index:
            raise ValueError(
                f"{place} has the name {each['name']}, which categories[{same}] has too: give each one a name of its "
                "own, or the annotations of both one category_id"
            )
    return sorted(categories.values(), key=lambda each: each["id"])


def _folders_of(file: Path) -> list[Path]:
    """Return where the images of a file may be: next to it, or in a folder that is named as usual."""
    stem = re.sub(r"^(instances|annotations)_", "", file.stem)
    roots = [file.parent, file.parent.parent]
    return list(
        dict.fromkeys(root / inner for root in roots for inner in ("", "images", stem, f"images/{stem}", "data"))
    )
