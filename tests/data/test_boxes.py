"""Images with boxes: read from every layout, refused where a box is wrong, and moved with their images."""

import json

import numpy as np
import pytest
from PIL import Image
from support.box_files import HEIGHT, NAMES, SIDES, TRUTH, WIDTH, coco, photographs

from app.data.boxes.augment import BoxCollate, BoxDraw, moved
from app.data.boxes.detections import load_boxes, load_images_of, own_processor
from app.data.boxes.scenes import SPLITS, scene_rows
from app.data.config import BoxAugment, BoxData
from app.errors import UserError
from app.sampling.seeding import sample_generator

pytestmark = pytest.mark.usefixtures("data_cache")


def yolo(folder, truth=TRUTH, described=True):
    photographs(folder / "images" / "train", truth)
    (folder / "labels" / "train").mkdir(parents=True)
    for index, boxes in enumerate(truth):
        lines = []
        for (left, top, right, bottom), name in boxes:
            middle = f"{(left + right) / 2 / WIDTH} {(top + bottom) / 2 / HEIGHT}"
            number = NAMES.index(name) if name in NAMES else 9
            lines.append(f"{number} {middle} {(right - left) / WIDTH} {(bottom - top) / HEIGHT}\n")
        if boxes:
            (folder / "labels" / "train" / f"{index}.txt").write_text("".join(lines))
    if described:
        (folder / "data.yaml").write_text("path: .\ntrain: images/train\ntest: images/test\nnames: {0: cat, 1: dog}\n")
        return folder / "data.yaml"
    (folder / "classes.txt").write_text("cat\ndog\n")
    return folder


def voc(folder, truth=TRUTH):
    photographs(folder / "JPEGImages", truth)
    (folder / "Annotations").mkdir()
    for index, boxes in enumerate(truth):
        objects = "".join(
            f"<object><name>{name}</name><bndbox><xmin>{left}</xmin><ymin>{top}</ymin><xmax>{right}</xmax>"
            f"<ymax>{bottom}</ymax></bndbox></object>"
            for (left, top, right, bottom), name in boxes
        )
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"
        text = f"<annotation><filename>{index}.png</filename>{size}{objects}</annotation>"
        (folder / "Annotations" / f"{index}.xml").write_text(text)
    return folder


WAYS = {"coco": coco, "yolo": yolo, "yolo-folder": lambda *parts: yolo(*parts, described=False), "voc": voc}


def read(path, **flags):
    return load_boxes(BoxData(path=(str(path),), holdout=0.2, **flags))


@pytest.mark.parametrize("kind", WAYS)
def test_every_layout_gives_the_same_boxes(tmp_path, kind):
    tables, sets, names = read(WAYS[kind](tmp_path / "data"))
    assert names == NAMES and len(tables.train) == 5 and len(tables.evaluation) == 1
    found = {}
    for name, table in (("train", tables.train), ("", tables.evaluation)):
        for row in range(len(table)):
            corners, classes = sets[name].boxes.of(row)
            pixels = (corners * SIDES).round(4).tolist() if len(corners) else []
            labels = [names[label] for label in classes]
            found[table[row]["image"][-5:]] = list(zip(pixels, labels, strict=True))
    assert [found[f"{index}.png"] for index in range(6)] == TRUTH


WRONG = {
    "outside": ([30, 2, 45, 9], "cat", "ends outside its image: 30, 2, 45, 9", "are wrong. Mend the file, or"),
    "no area": ([5, 5, 5, 9], "cat", "without an area", "--data.bad-boxes mend"),
    "unknown": ([5, 5, 8, 9], "bird", "", ""),
}
PLACES = {"coco": ("annotations[1]", "boxes.json"), "yolo": ("line 2", "0.txt"), "voc": ("object 2", "0.xml")}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_box_is_named_by_its_file_and_place(tmp_path, kind, what):
    box, name, *words = WRONG[what]
    truth = [[TRUTH[0][0], (box, name)], TRUTH[1], [], [(box, name)], TRUTH[0], TRUTH[1]]
    if (kind, what) == ("voc", "unknown"):
        truth[0] = TRUTH[0]  # VOC has no list of classes; what only evaluation has is refused
    path = WAYS[kind](tmp_path / "data", truth)
    if (kind, what) == ("voc", "unknown"):
        with pytest.raises(UserError, match=r"row 3 .* none of the 2 classes.* bird"):
            read(path, classes=("cat", "dog"))
        return
    with pytest.raises(UserError) as refused:
        read(path)
    words += PLACES[kind] if what != "unknown" else (PLACES[kind][0], "category_id 99" if kind == "coco" else "class 9")
    assert all(word in str(refused.value) for word in words)


def test_wrong_boxes_are_mended_where_that_is_asked_for(tmp_path):
    truth = [[([30, 2, 45, 9], "cat"), ([5, 5, 5, 9], "dog"), ([41, 0, 60, 9], "dog"), ([1, 1, 9, 9], "dog")], *TRUTH]
    _, sets, _ = read(coco(tmp_path / "data", truth), bad_boxes="mend", eval_split="train[6:]", split="train[:6]")
    boxes = sets["train"].boxes
    corners, classes = boxes.of(0)
    assert (corners * SIDES).round(4).tolist() == [[30, 2, 40, 9], [1, 1, 9, 9]]
    assert classes.tolist() == [0, 1] and boxes.counts.tolist() == [2, 2, 1, 0, 2, 1] and boxes.mended == 3


def test_numbers_that_are_not_finite_cannot_be_mended(tmp_path):
    """And are named before the boxes that could be."""
    truth = [[([30, 2, 45, 9], "cat")], [([1, 1, float("nan"), 9], "dog")], *TRUTH]
    path = coco(tmp_path / "data", truth)
    for how in ("refuse", "mend"):
        with pytest.raises(UserError) as refused:
            read(path, bad_boxes=how, split="train[:3]", eval_split="train[3:]")
        said = str(refused.value)
        assert "annotations[1]" in said and "not finite" in said and "--data.bad-boxes" not in said
        assert "1 of the 4 boxes to train on are wrong." in said


def test_an_image_that_goes_missing_is_named(tmp_path, monkeypatch):
    """Images are next to the json: paths are not those of a table, which are relative to the current folder."""
    coco(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    read("data/boxes.json")
    (tmp_path / "data/images/3.png").unlink()
    with pytest.raises(UserError, match=r"data/images/3.png\): cannot be read: ") as refused:
        read("data/boxes.json")
    assert "relative to" not in str(refused.value)


def test_an_image_of_another_size_than_annotated_is_refused(tmp_path):
    path = voc(tmp_path / "data")
    Image.new("RGB", (HEIGHT, WIDTH)).save(tmp_path / "data" / "JPEGImages" / "1.png")
    with pytest.raises(UserError, match=r"1.xml says that .*1.png is 40 x 20 pixels, and it is 20 x 40"):
        read(path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "labels/train/1.txt").write_text("0 0.5 0.5\n"), "line 1 of .*1.txt is '0 0.5 0.5'"),
        (lambda folder: (folder / "data.yaml").write_text("names: [a]\n"), "names no folder of images to train on"),
        (lambda folder: (folder / "images/train/2.png").write_text("x"), "2.png.* cannot be read"),
        (
            lambda folder: (folder / "data.yaml").write_text("train: images/train\nval: images/val\n"),
            "val is images/val, and there is no .*images/val; .*images has train/: ",
        ),
    ],
)
def test_files_that_are_wrong(tmp_path, spoil, said):
    path = yolo(tmp_path / "data")
    spoil(tmp_path / "data")
    with pytest.raises(UserError, match=said):
        read(path)


def test_labels_of_listed_images_are_read_again_when_they_change(tmp_path):
    folder = tmp_path / "data"
    path = yolo(folder)
    path.write_text("train: train.txt\nnames: [cat, dog]\n")
    (folder / "train.txt").write_text("".join(f"./images/train/{index}.png\n" for index in range(6)))
    counts = [read(path, split="train[:4]", eval_split="train[4:]")[1]["train"].boxes.counts.tolist()]
    for name in ("0.txt", "2.txt"):  # one that was there, and a new one
        (folder / "labels/train" / name).write_text("0 0.5 0.5 0.5 0.5\n")
        counts.append(read(path, split="train[:4]", eval_split="train[4:]")[1]["train"].boxes.counts.tolist())
    assert counts == [[2, 1, 0, 2], [1, 1, 0, 2], [1, 1, 1, 2]]


@pytest.mark.parametrize(
    ("key", "place", "change", "said"),
    [
        ("images", 2, {"id": 10}, r"images\[2\] of .*boxes.json has the id 10, which images\[0\] has too"),
        ("categories", 1, {"id": 7}, r"categories\[1\] of .*boxes.json has the id 7, which categories\[0\] has too"),
        ("images", 1, {"id": None}, r"images\[1\] of .*boxes.json has no id"),
        ("images", 0, {"file_name": None}, r"images\[0\] of .*boxes.json has no file_name"),
        ("categories", 0, {"id": None}, r"categories\[0\] of .*boxes.json has no id"),
        ("categories", 0, {"name": None}, r"categories\[0\] of .*boxes.json has no name"),
        ("categories", 1, {"id": "8"}, r"categories\[1\] of .*json has the id '8', and categories\[0\] 7: give"),
        (
            "categories",
            1,
            {"name": "cat"},
            r"categories\[1\] of .*json has the name cat, which categories\[0\] has",
        ),
        ("annotations", 1, {"image_id": [1]}, r"annotations\[1\] of .*json has the image_id \[1\], which no image"),
        ("annotations", 2, {"category_id": {}}, r"annotations\[2\] of .*json has the category_id \{\}, which no cat"),
        ("annotations", 2, "a box", r"annotations\[2\] of .*boxes.json is 'a box': give an object with a bbox"),
        ("images", 3, {"file_name": "x.png"}, r"images\[3\] of .*json, x.png, is in none of .*data/images, .*data, "),
        ("categories", None, None, r"boxes.json has no list of categories: give COCO's three lists"),
    ],
)
def test_coco_files_that_are_wrong(tmp_path, key, place, change, said):
    path = coco(tmp_path / "data")
    found = json.loads(path.read_text())
    if place is None:
        del found[key]
    elif isinstance(change, dict):
        changed = found[key][place] | change
        found[key][place] = {name: value for name, value in changed.items() if value is not None}
    else:
        found[key][place] = change
    path.write_text(json.dumps(found))
    with pytest.raises(UserError, match=said):
        read(path)


def test_a_table_of_the_hub_has_its_own_columns(tmp_path):
    import datasets

    photographs(tmp_path / "images")
    rows = {
        "image": [str(tmp_path / "images" / f"{index}.png") for index in range(6)],
        "bbox": [[[l, t, r - l, b - t] for (l, t, r, b), _ in boxes] for boxes in TRUTH],  # noqa: E741
        "category": [[name for _, name in boxes] for boxes in TRUTH],
    }
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    flags = {"boxes": "bbox", "label": "category", "box_format": "size"}
    _, sets, names = read(tmp_path / "rows.parquet", **flags)
    assert names == NAMES and len(sets["train"].boxes.corners) + len(sets[""].boxes.corners) == 6
    with pytest.raises(UserError, match=r"box 1 .counted from 0. of row 0"):
        read(tmp_path / "rows.parquet", **flags | {"box_format": "corners"})


def test_scenes_to_evaluate_on_have_digits_of_their_own():
    first = next(scene_rows("train")), next(scene_rows("test"))
    assert first[0]["image"].tobytes() != first[1]["image"].tobytes()
    assert SPLITS["train"][1].stop == SPLITS["test"][1].start
    for row in first:
        pixels = np.asarray(row["image"])
        for left, top, right, bottom in np.array(row["boxes"], int):
            assert pixels[top:bottom, left:right].max() > 2 * np.median(pixels)


def drawn(settings, seed=0):
    """A white rectangle on black, changed; and the box that should be around it."""
    pixels = np.zeros((3, 96, 96), np.uint8)
    pixels[:, 30:60, 40:70] = 255
    row = {
        "pixels": pixels,
        "corners": np.array([[40, 30, 70, 60]], np.float32) / 96,
        "classes": np.array([1]),
        "weight": 1.0,
    }
    row = BoxDraw(settings)(row, sample_generator(seed, 0, 0))

    class Plain:
        def __call__(self, rows):
            from app.data.images.augment import ImageCollate

            return ImageCollate([0.0] * 3, [1.0] * 3, 1 / 255)(rows)

    inputs = BoxCollate(Plain())([row])
    return inputs["pixel_values"][0, 0].numpy(), row["corners"]


@pytest.mark.parametrize("seed", range(6))
def test_boxes_move_with_their_images(seed):
    pixels, corners = drawn(BoxAugment(flip=0.5, shift=0.15, zoom=0.3, rotate=90 * (seed % 2), colour=0), seed)
    ys, xs = np.nonzero(pixels > 0.5)
    shown = np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]) / 96
    assert len(corners) == 1 and np.abs(corners[0] - shown).max() < 2 / 96


def test_boxes_that_leave_the_image_are_left_out():
    away = np.array([[1.0, 0, 1.6], [0, 1, 0]])  # shows what is far to the right
    corners = np.array([[0.0, 0, 0.5, 0.5], [0.7, 0.7, 1.0, 1.0], [0.82, 0.2, 0.9, 0.4]], np.float32)
    places, kept = moved(corners, away, 100, 100)
    assert kept.tolist() == [False, True, True] and np.allclose(places[2], [0.02, 0.2, 0.1, 0.4])
    assert np.allclose(places[1], [0.0, 0.7, 0.2, 1.0])


def test_an_image_counts_its_boxes_and_at_least_one(tmp_path):
    path = coco(tmp_path / "data")
    _, sets, _ = read(path, split="train[:5]", eval_split="train[5:]", size=64)
    processor = own_processor(sets["train"].column, 64)
    rows = load_images_of(sets["train"], processor, BoxData())
    assert rows.weights.tolist() == [2, 1, 1, 2, 1] and rows[0]["pixels"].shape == (3, 64, 64)
    assert rows.fingerprint != load_images_of(sets[""], processor, BoxData()).fingerprint
