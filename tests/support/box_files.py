"""Photographs with boxes, and the file of boxes that COCO has."""

import json

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 40, 20
SIDES = np.array([WIDTH, HEIGHT, WIDTH, HEIGHT])
# For each image: boxes as left, top, right, bottom, in pixels, and their classes.
TRUTH = [[([2, 4, 10, 12], "dog"), ([20, 0, 40, 20], "cat")], [([0, 0, 8, 5], "cat")], []] * 2
NAMES = ["cat", "dog"]


def photographs(folder, truth=TRUTH):
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for index in range(len(truth)):
        Image.fromarray(random.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)).save(folder / f"{index}.png")


def coco(folder, truth=TRUTH, categories=NAMES):
    photographs(folder / "images", truth)
    found = {
        "images": [
            {"id": 10 + index, "file_name": f"{index}.png", "width": WIDTH, "height": HEIGHT}
            for index in range(len(truth))
        ],
        "categories": [{"id": 7 + index, "name": name} for index, name in enumerate(categories)],
        "annotations": [
            {
                "image_id": 10 + index,
                "category_id": 7 + NAMES.index(name) if name in NAMES else 99,
                "bbox": [left, top, right - left, bottom - top],
                "iscrowd": 0,
            }
            for index, boxes in enumerate(truth)
            for (left, top, right, bottom), name in boxes
        ],
    }
    found["annotations"].append({"image_id": 10, "category_id": 7, "bbox": [0, 0, 1, 1], "iscrowd": 1})
    (folder / "boxes.json").write_text(json.dumps(found))
    return folder / "boxes.json"
