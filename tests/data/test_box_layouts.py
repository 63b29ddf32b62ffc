"""Folders of boxes as annotation tools write them: each is read as it was drawn, or refused by name."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.launching import ROOT
from support.tables import python

from app.data.boxes.detections import load_boxes
from app.data.config import BoxData
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("data_cache")
WIDTH, HEIGHT = 100, 50
SIDES = np.array([WIDTH, HEIGHT, WIDTH, HEIGHT])
NAMES = ["cat", "dog"]
# By image: left, top, right, bottom in pixels, and the class.
TRUTH = {
    "a": [([10, 5, 30, 25], "cat"), ([50, 0, 100, 50], "dog")],
    "b": [([20, 10, 60, 40], "dog")],
    "c": [([0, 0, 10, 10], "cat")],
    "d": [([70, 20, 90, 45], "cat")],
}


def photograph(file: Path):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (WIDTH, HEIGHT)).save(file)


def write(file: Path, text: str):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def fractions(box):
    left, top, right, bottom = box
    return (left + right) / 2 / WIDTH, (top + bottom) / 2 / HEIGHT, (right - left) / WIDTH, (bottom - top) / HEIGHT


def lines(name, number="{}", after=""):
    """Write the lines of an image's labels."""
    return "".join(
        f"{number.format(NAMES.index(label))} {' '.join(map(str, fractions(box)))}{after}\n"
        for box, label in TRUTH[name]
    )


def coco(names, file_name="{}.png", first=1):
    images = [{"id": i, "file_name": file_name.format(name), "width": WIDTH, "height": HEIGHT} for i, name in names]
    boxes = [
        {
            "id": number,
            "image_id": i,
            "category_id": first + NAMES.index(label),
            "bbox": [left, top, right - left, bottom - top],
            "iscrowd": 0,
        }
        for number, (i, (left, top, right, bottom), label) in enumerate(
            (i, *each) for i, name in names for each in TRUTH[name]
        )
    ]
    categories = [{"id": first + i, "name": name, "supercategory": ""} for i, name in enumerate(NAMES)]
    return {"images": images, "annotations": boxes, "categories": categories}


ALL = list(enumerate(TRUTH, 7))


def roboflow_yolo(folder, **change):
    for split, names in (("train", "abc"), ("valid", "d")):
        for name in names:
            photograph(folder / split / "images" / f"{name}_png.rf.1f.jpg")
            write(folder / split / "labels" / f"{name}_png.rf.1f.txt", lines(name))
    text = "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\nnc: 2\nnames: ['cat', 'dog']\n"
    write(folder / "data.yaml", text)
    return folder


def ultralytics(folder, yaml="path: .\ntrain: images/train\nval: images/val\nnames:\n  0: cat\n  1: dog\n", **how):
    for split, names in (("train", "abc"), ("val", "d")):
        for name in names:
            photograph(folder / "images" / split / f"{name}.png")
            write(folder / "labels" / split / f"{name}.txt", lines(name, **how))
    write(folder / "data.yaml", yaml)
    return folder


def listed(folder, prefix="./images/"):
    ultralytics(folder, "path: .\ntrain: train.txt\nval: val.txt\nnames: [cat, dog]\n")
    write(folder / "train.txt", "".join(f"{prefix}train/{name}.png\n" for name in "abc"))
    write(folder / "val.txt", f"{prefix}val/d.png")
    return folder


def several_folders(folder):
    for place, name in (("one", "a"), ("one", "b"), ("two", "c"), ("held", "d")):
        photograph(folder / place / "images" / f"{name}.png")
        write(folder / place / "labels" / f"{name}.txt", lines(name))
    write(folder / "data.yaml", "train: [one/images, two/images]\nval: held/images\nnames: {'0': cat, '1': dog}\n")
    return folder


def label_studio_yolo(folder):
    for name in TRUTH:
        photograph(folder / "images" / f"3f-{name}.jpg")
        write(folder / "labels" / f"3f-{name}.txt", lines(name))
    write(folder / "classes.txt", "cat\ndog\n")
    notes = {"categories": [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}], "info": {"version": "1.0"}}
    write(folder / "notes.json", json.dumps(notes))
    return folder


def cvat_yolo(folder):
    for name in TRUTH:
        photograph(folder / "obj_train_data" / f"{name}.png")
        write(folder / "obj_train_data" / f"{name}.txt", lines(name))
    write(folder / "obj.data", "classes = 2\ntrain = data/train.txt\nnames = data/obj.names\nbackup = backup/\n")
    write(folder / "obj.names", "cat\ndog\n")
    write(folder / "train.txt", "".join(f"data/obj_train_data/{name}.png\n" for name in TRUTH))
    return folder


def darknet(folder):
    for name in TRUTH:
        photograph(folder / f"{name}.png")
        write(folder / f"{name}.txt", lines(name))
    write(folder / "my.names", "cat\ndog\n")
    return folder


def label_img(folder):
    darknet(folder)
    (folder / "my.names").rename(folder / "classes.txt")
    return folder


def background_first(folder):
    """The first image has no objects, and an empty file that says so."""
    photograph(darknet(folder) / "Z.png")
    write(folder / "Z.txt", "")
    return folder


def darknet_splits(folder):
    for split, names in (("train", "abc"), ("valid", "d")):
        for name in names:
            photograph(folder / split / f"{name}.png")
            write(folder / split / f"{name}.txt", lines(name))
    write(folder / "classes.txt", "cat\ndog\n")
    return folder


def coco_at(file, images, name="{}.png"):
    """Lay out one file of COCO: where it is, where the images are, and what it calls them."""

    def layout(folder):
        for each in TRUTH:
            photograph(folder / images.format(each))
        write(folder / file, "\n" + json.dumps(coco(ALL, name)))
        return folder

    return layout


def roboflow_coco(folder):
    """Its first category stands for the project."""
    for split, names in (("train", "abc"), ("valid", "d")):
        found = coco(list(enumerate(names)))
        found["categories"] = [{"id": 0, "name": "pets", "supercategory": "none"}] + [
            {**each, "supercategory": "pets"} for each in found["categories"]
        ]
        for name in names:
            photograph(folder / split / f"{name}.png")
        write(folder / split / "_annotations.coco.json", json.dumps(found))
    return folder


def coco_splits(folder):
    for split, names in (("train2017", "abc"), ("val2017", "d")):
        for name in names:
            photograph(folder / split / f"{name}.png")
        write(folder / "annotations" / f"instances_{split}.json", json.dumps(coco(list(enumerate(names)), first=0)))
        write(folder / "annotations" / f"captions_{split}.json", json.dumps({"images": [], "annotations": []}))
    return folder


def fifty_one(folder):
    """A folder for each split, with images in data/."""
    for split, names in (("train", "abc"), ("validation", "d")):
        for name in names:
            photograph(folder / split / "data" / f"{name}.png")
        write(folder / split / "labels.json", json.dumps(coco(list(enumerate(names)))))
    return folder


def key_points_of_coco(folder):
    found = coco(ALL)
    for each in found["annotations"]:
        each |= {"keypoints": [1, 1, 2], "num_keypoints": 1, "iscrowd": "0"}
    for name in TRUTH:
        photograph(folder / "images" / f"{name}.png")
    write(folder / "annotations" / "person_keypoints_default.json", json.dumps(found))
    return folder


def voc(folder, said="{}.png", size=f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>", extra=""):
    for name, boxes in TRUTH.items():
        photograph(folder / "JPEGImages" / f"{name} 1.png")
        things = "".join(
            f"<object><name>{label}</name>{extra}<bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin>"
            f"<xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"
            for box, label in boxes
        )
        told = f"<filename>{said.format(f'{name} 1')}</filename>"
        write(folder / "Annotations" / f"{name} 1.xml", f"<annotation>{told}{size}{things}</annotation>")
    return folder


def voc_lists(folder):
    voc(folder)
    write(folder / "ImageSets/Main/trainval.txt", "a 1\nb 1\nc 1\n")
    write(folder / "ImageSets/Main/test.txt", "d 1\n")
    write(folder / "ImageSets/Main/cat_trainval.txt", "a 1 -1\n")
    return folder


def voc_beside(folder):
    """Images and xml files in one folder, in upper case."""
    voc(folder)
    for file in [*folder.glob("*/*")]:
        file.rename(folder / (file.name if file.suffix == ".xml" else f"{file.stem}.PNG"))
    return folder


def one_level_down(layout):
    def inner(folder):
        layout(folder / "VOC2007")
        write(folder / "__MACOSX" / "VOC2007" / "._a.png", "x")
        return folder

    return inner


LAYOUTS = {
    "yolo: roboflow": roboflow_yolo,
    "yolo: ultralytics": ultralytics,
    "yolo: classes as 0.0": lambda folder: ultralytics(folder, number="{}.0"),
    "yolo: windows": lambda folder: ultralytics(folder, "train: images\\train\nval: images\\val\nnames: [cat, dog]\n"),
    "yolo: a path of another machine": lambda folder: ultralytics(
        folder, "path: /content/datasets/pets\ntrain: images/train\nval: images/val\nnames: [cat, dog]\n"
    ),
    "yolo: another name of the yaml file": lambda folder: (ultralytics(folder) / "data.yaml").rename(
        folder / "pets.yaml"
    ),
    "yolo: lists": listed,
    "yolo: lists with a folder that is not there": lambda folder: listed(folder, "data/images/"),
    "yolo: several folders": several_folders,
    "yolo: label studio": label_studio_yolo,
    "yolo: cvat": cvat_yolo,
    "yolo: cvat, its file": lambda folder: cvat_yolo(folder) / "obj.data",
    "yolo: darknet": darknet,
    "yolo: labelimg": label_img,
    "yolo: darknet with splits": darknet_splits,
    "yolo: one level down": one_level_down(label_studio_yolo),
    "yolo: key points": lambda folder: ultralytics(
        folder,
        "train: images/train\nval: images/val\nkpt_shape: [3, 2]\nnames: [cat, dog]\n",
        after=" .5 .5 .6 .6 .1 .2",
    ),
    "yolo: key points with visibility": lambda folder: ultralytics(
        folder, "train: images/train\nval: images/val\nkpt_shape: [1, 3]\nnames: [cat, dog]\n", after=" .5 .5 2"
    ),
    "coco: label studio": coco_at("result.json", "images/{}.png", "images/{}.png"),
    "coco: label studio on windows": coco_at("result.json", "images/{}.png", "images\\{}.png"),
    "coco: label studio's uploads": coco_at("result.json", "images/{}.png", "../../label-studio/data/upload/1/{}.png"),
    "coco: cvat": coco_at("annotations/instances_default.json", "images/{}.png"),
    "coco: cvat, a folder": coco_at("annotations/instances_default.json", "images/default/{}.png"),
    "coco: absolute paths": coco_at("labels.json", "{}.png", "/home/me/pets/{}.png"),
    "coco: absolute paths of windows": coco_at("labels.json", "images/{}.png", "C:\\pets\\{}.png"),
    "coco: addresses": coco_at("labels.json", "images/{}.png", "https://pets.org/of%20all/{}.png?size=full"),
    "coco: a leading folder": coco_at("labels.json", "images/{}.png", "pets/{}.png"),
    "coco: roboflow": roboflow_coco,
    "coco: splits": coco_splits,
    "coco: fiftyone": fifty_one,
    "coco: key points": key_points_of_coco,
    "coco: one level down": one_level_down(coco_splits),
    "voc": voc,
    "voc: no extension": lambda folder: voc(folder, "{}"),
    "voc: another name": lambda folder: voc(folder, "IMG_{}.jpg"),
    "voc: a path": lambda folder: voc(folder, "C:\\me\\{}.png"),
    "voc: no size": lambda folder: voc(folder, size=""),
    "voc: size 0": lambda folder: voc(folder, size="<size><width>0</width><height>0</height></size>"),
    "voc: polygons too": lambda folder: voc(folder, extra="<polygon><x1>1</x1></polygon>"),
    "voc: lists": voc_lists,
    "voc: beside": voc_beside,
    "voc: one level down": one_level_down(voc_lists),
}


def read(path, **flags):
    """Return the boxes of each image by the first letter of its name."""
    tables, sets, names = load_boxes(BoxData(path=(str(path),), holdout=0.25, **flags))
    found = {}
    for name, table in (("train", tables.train), ("", tables.evaluation)):
        for row in range(len(table)):
            corners, classes = sets[name].boxes.of(row)
            key = re.search(r"(\w)( 1)?(_png.rf.1f)?\.\w+$", table[row]["image"])[1]
            found[key] = [
                (np.round(box, 3).tolist(), names[label]) for box, label in zip(corners * SIDES, classes, strict=True)
            ]
    return found


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_tools_folder_is_read_as_it_was_drawn(tmp_path, kind):
    path = LAYOUTS[kind](tmp_path / "data")
    assert read(path) == TRUTH


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_name_that_is_not_utf8_is_named(tmp_path, kind):
    """A zip file of another system unpacks to such names."""
    path = LAYOUTS[kind](tmp_path / "caf\udce9")
    with pytest.raises(UserError, match=r"'.*caf\\udce9.*' has letters that are not UTF-8: rename the file or folder"):
        read(path)


def test_an_image_of_a_format_that_is_not_read_is_named(tmp_path):
    folder = labels(tmp_path / "data")
    image = next(folder.glob("images/train/a.*"))
    image.rename(image.with_suffix(".HEIC"))
    with pytest.raises(UserError, match=r"a.txt has boxes, and .*a.HEIC is of a format that is not read: convert it"):
        read(folder)
    image.with_suffix(".HEIC").rename(image.with_suffix(".mpo"))
    assert read(folder)["a"] == TRUTH["a"]


POLYGONS = {"a": ("0 .1 .1 .3 .1 .3 .5 .1 .5", "1 .5 0 1 0 1 1"), "b": ("1 .2 .2 .6 .2 .6 .8 .4 .8 .2 .8",)}


def labels(folder, of="", described="", **more):
    """Write a set of four images, with other labels for some of them, and other things in data.yaml."""
    ultralytics(folder, f"train: images/train\nval: images/val\nnames: [cat, dog]\n{described}")
    for name, own in {**({"a": [of]} if of else {}), **more}.items():
        place = "val" if name == "d" else "train"
        write(folder / "labels" / place / f"{name}.txt", "".join(f"{line}\n" for line in own))
    return folder


@pytest.mark.parametrize("described", ["", "task: segment\n"])
def test_boxes_are_those_around_polygons(tmp_path, described):
    assert read(labels(tmp_path / "data", described=described, **POLYGONS)) == TRUTH


def values(count, box=(0.2, 0.2, 0.2, 0.4)):
    """A line of so many values; after the box there are points in it."""
    return " ".join(map(str, ([0, *box] + [0.2] * 15)[:count]))


@pytest.mark.parametrize("count", range(1, 21))
@pytest.mark.parametrize("others", [False, True])
def test_lines_of_any_number_of_values_are_boxes_or_refused(tmp_path, count, others):
    """Whether all lines are such, or one; and no advice would train on what is no box."""
    line = values(count)
    more = {} if others else {name: [line] for name in "bcd"}
    folder = labels(tmp_path / "data", line, **more)
    if count == 5:
        assert read(folder)["a"] == [([10, 0, 30, 20], "cat")]
        return
    with pytest.raises(UserError) as refused:
        read(folder)
    said = str(refused.value)
    assert "line 1 of" in said and "a.txt" in said and "bad-boxes" not in said
    if count > 5:
        assert f"has {count} values" in said
        points = {(count - 5) // size: size for size in (2, 3) if (count - 5) % size == 0 and count > 6}
        assert all(f"kpt_shape: [{number}, {size}]" in said for number, size in points.items())
        assert ("task: obb" in said) == (count == 9) and ("task: segment" in said) == (count > 6)


@pytest.mark.parametrize("count", range(5, 21))
def test_key_points_are_what_data_yaml_says(tmp_path, count):
    """Lines of another number of values are refused by it."""
    folder = labels(tmp_path / "data", values(count), "kpt_shape: [2, 3]\n")
    if count in (5, 11):
        assert read(folder)["a"] == [([10, 0, 30, 20], "cat")]
        return
    with pytest.raises(UserError, match=rf"line 1 of .*a.txt has {count} values, and kpt_shape \[2, 3\] means 11"):
        read(folder)


def test_oriented_boxes_are_those_that_data_yaml_says(tmp_path):
    every = {"b": ["1 .2 .4 .4 .2 .6 .6 .4 .8"], "c": ["0 0 .1 .05 0 .1 .1 .05 .2"], "d": ["0 .7 .6 .8 .4 .9 .6 .8 .9"]}
    folder = labels(tmp_path / "data", "0 .1 .3 .2 .1 .3 .3 .2 .5", **every, described="task: obb\n")
    assert read(folder)["b"] == [([20, 10, 60, 40], "dog")]
    with pytest.raises(UserError, match=r"line 1 of .*a.txt has 9 values: it may be an oriented box .* or a polygon"):
        read(labels(tmp_path / "data", "0 .1 .3 .2 .1 .3 .3 .2 .5", **every))
    folder = labels(tmp_path / "data", described="task: obb\n")
    with pytest.raises(UserError, match=r"a.txt has 5 values, and task: obb .*means 9; it looks like a box"):
        read(folder)


def test_a_key_point_less_is_no_polygon(tmp_path):
    """Two lengths alone do not show polygons: one line may be cut."""
    every = {name: [values(11), values(11)] for name in "bcd"}
    with pytest.raises(UserError, match=r"has 9 values: it may be .*kpt_shape: \[2, 2\]"):
        read(labels(tmp_path / "data", values(9), **every))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"of": "0 20 10 20 20"}, r"line 1 of .*a.txt has 20, which is no fraction of an image's side: divide pixels"),
        ({"of": "0.5 .1 .1 .1 .1"}, r"line 1 of .*a.txt is '0.5 .1 .1 .1 .1': write the class's number"),
        ({"of": "nan .1 .1 .1 .1"}, "write the class's number"),
        ({"of": "cat .1 .1 .1 .1"}, "write the class's number"),
        ({"of": "-1 .1 .1 .1 .1"}, "write the class's number"),
        ({"of": "2 .1 .1 .1 .1"}, "has the class 2, and there are 2 names"),
        ({"described": "nc: 3\n"}, r"data.yaml: nc is 3, and names has 2"),
        ({"described": "nc: two\n"}, r"data.yaml: nc is two"),
        ({"described": "kpt_shape: 3\n"}, r"data.yaml: kpt_shape is 3: give the number of key points"),
        ({"described": "kpt_shape: [3, 4]\n"}, r"data.yaml: kpt_shape is \['3', '4'\]: give"),
        ({"described": "task: pose\n"}, r"data.yaml: task is pose, and nothing says kpt_shape"),
        ({"described": "task: classify\n"}, r"data.yaml: task is classify: boxes are learnt of detect"),
        ({"described": "task: obb\nkpt_shape: [1, 2]\n"}, r"task is obb, and kpt_shape is for pose"),
        ({"described": "test: images/train\n"}, r"train and test are both .*images/train"),
    ],
)
def test_labels_that_are_wrong(tmp_path, change, said):
    with pytest.raises(UserError, match=said):
        read(labels(tmp_path / "data", **change))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("{0: cat, 2: dog}", "names has the numbers 0, 2: number the classes from 0"),
        ("{0: cat, x: dog}", "names has the numbers 0, x: number the classes from 0"),
        ("[cat, cat]", "the classes 0 and 1 have one name, cat"),
        ("[cat, '']", "the class 1 has no name"),
    ],
)
def test_names_that_are_wrong(tmp_path, names, said):
    with pytest.raises(UserError, match=rf"data.yaml: {said}"):
        read(ultralytics(tmp_path / "data", f"train: images/train\nval: images/val\nnames: {names}\n"))


def test_images_without_boxes_are_counted(tmp_path):
    from app.data.boxes.detections import Detections, describe

    folder = background_first(tmp_path / "data")
    tables, sets, names = load_boxes(BoxData(path=(str(folder),), split="train[1:]", eval_split="train[:1]"))

    class Images:
        fingerprint, shape = "", (1, 3, 64, 64)

        def __init__(self, count):
            self.count = count

        def __len__(self):
            return self.count

    rows = {name: Detections(Images(len(table.column)), table.boxes) for name, table in sets.items()}
    said = describe(tables, names, rows.pop("train"), rows)
    assert "1 of the images to evaluate on have no boxes, so that nothing can be measured" in said
    assert "training images have no boxes" not in said


def test_names_are_what_is_written(tmp_path):
    """YAML reads `no` as false."""
    folder = ultralytics(tmp_path / "data", "train: images/train\nval: images/val\nnames: [no, 1.10]\n")
    assert load_boxes(BoxData(path=(str(folder),)))[2] == ["no", "1.10"]
    folder = ultralytics(tmp_path / "data", "train: images/train\nval: images/val\nnc: 3\n")
    assert load_boxes(BoxData(path=(str(folder),)))[2] == ["0", "1", "2"]


def test_what_has_no_other_half_is_named(tmp_path):
    folder = ultralytics(tmp_path / "yolo")
    (folder / "images/train/b.png").unlink()
    with pytest.raises(UserError, match=r"labels/train/b.txt has boxes, and .*images/train no image of that name"):
        read(folder)
    photograph(folder / "images/train/b.png")
    photograph(folder / "images/train/b.jpg")
    with pytest.raises(UserError, match=r"b.jpg and b.png share the labels .*b.txt"):
        read(folder)
    folder = listed(tmp_path / "list")
    (folder / "images/train/c.png").unlink()
    with pytest.raises(UserError, match=r"line 3 of .*train.txt, ./images/train/c.png, is in none of"):
        read(folder)
    folder = voc_lists(tmp_path / "voc")
    write(folder / "ImageSets/Main/test.txt", "d 1\ne 1\n")
    with pytest.raises(UserError, match=r"line 2 of .*test.txt is 'e 1', and there is no .*e 1.xml"):
        read(folder)
    (folder / "ImageSets/Main/trainval.txt").unlink()
    with pytest.raises(UserError, match=r"Main has test.txt, but no train.txt"):
        read(folder)


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        ("<robndbox><cx>1</cx></robndbox>", r"object 1 of .*a 1.xml has no bndbox, but a turned box, as roLabelImg"),
        ("<polygon><x1>1</x1></polygon>", r"object 1 of .*a 1.xml has no bndbox, but a polygon"),
        ("", r"object 1 of .*a 1.xml has no bndbox with the numbers"),
    ],
)
def test_shapes_of_voc_that_are_no_boxes(tmp_path, thing, said):
    folder = voc(tmp_path / "data")
    write(folder / "Annotations/a 1.xml", f"<annotation><object><name>cat</name>{thing}</object></annotation>")
    with pytest.raises(UserError, match=said):
        read(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<annotations><image/></annotations>", r"a 1.xml begins with <annotations>, and Pascal VOC's files"),
        ("<annotation><size><width>x</width></size></annotation>", r"a 1.xml has the width and height \['x', 0\]"),
        (
            "<annotation><filename>b 1.png</filename></annotation>",
            r"its image is .*b 1.png, and there is .*a 1.png too",
        ),
    ],
)
def test_files_of_voc_that_are_wrong(tmp_path, text, said):
    folder = voc(tmp_path / "data")
    write(folder / "Annotations/a 1.xml", text)
    with pytest.raises(UserError, match=said):
        read(folder)


@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        (
            "annotations",
            {"bbox": None, "segmentation": {"counts": "x"}},
            r"annotations\[0\] of .*json has no bbox: give",
        ),
        ("annotations", {"bbox": []}, r"annotations\[0\] of .*json has no bbox"),
        ("annotations", {"iscrowd": "maybe"}, r"annotations\[0\] of .*json has the iscrowd 'maybe': give 0 or 1"),
        ("annotations", {"image_id": "7"}, r"image_id '7', which no image has, but one has 7: write both alike"),
        ("annotations", {"category_id": "1"}, r"category_id '1', which no category has, but one has 1"),
        ("images", {"file_name": "b.png"}, r"images\[0\] of .* and images\[1\] of .* are both for .*b.png: join"),
        ("images", {"file_name": 5}, r"images\[0\] of .*json, 5, is in none of"),
        ("images", {"id": 7.5}, r"images\[0\] of .*json has the id 7.5: give a whole number or a text"),
        ("images", {"width": "wide"}, r"images\[0\] of .*json has the width and height \['wide', 50\]: give numbers"),
        ("images", {"width": [1]}, r"images\[0\] of .*json has the width and height \[\[1\], 50\]: give numbers"),
        ("images", {"width": 50, "height": 100}, r"is 50 x 100 pixels, and it is 100 x 50"),
        ("categories", {"id": "1"}, r"categories\[1\] of .*json has the id 2, and categories\[0\] '1'"),
    ],
)
def test_coco_that_is_wrong(tmp_path, key, change, said):
    folder = coco_at("labels.json", "images/{}.png")(tmp_path / "data")
    found = json.loads((folder / "labels.json").read_text())
    found[key][0] |= change
    if key == "categories":
        found["annotations"][0]["category_id"] = "1"
    write(folder / "labels.json", json.dumps(found))
    with pytest.raises(UserError, match=said):
        read(folder)


def test_several_data_sets_in_a_folder_are_named(tmp_path):
    voc(tmp_path / "VOC2007")
    voc(tmp_path / "VOC2012")
    with pytest.raises(UserError, match=r"VOC2007 and .*VOC2012 are data sets of their own: give one of them"):
        read(tmp_path)


def test_numbers_of_another_meaning_are_not_to_be_mended(tmp_path):
    """Where all boxes fit their images when read in another way, that is what the message advises."""
    import datasets

    boxes = [[[60.0, 10.0, 90.0, 40.0], [50.0, 5.0, 95.0, 30.0]]] * 4
    photograph(tmp_path / "1.png")
    for name, (given, other) in {"corners": ("size", "corners"), "size": ("corners", "size")}.items():
        kept = boxes if name == "corners" else [[[x, y, u - x, v - y] for x, y, u, v in row] for row in boxes]
        rows = {"image": [str(tmp_path / "1.png")] * 4, "boxes": kept, "classes": [["cat", "dog"]] * 4}
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / f"{name}.parquet")
        with pytest.raises(UserError, match=rf"All boxes fit .*: give --data.box-format {other}$"):
            read(tmp_path / f"{name}.parquet", box_format=given)
    every = {name: [f"0 {' '.join(str(n / s) for n, s in zip(boxes[0][0], SIDES, strict=True))}"] * 2 for name in TRUTH}
    with pytest.raises(UserError, match=r"are wrong. All boxes fit if .* left, top, right, bottom: convert the file"):
        read(labels(tmp_path / "yolo", **every))
    folder = coco_at("labels.json", "images/{}.png")(tmp_path / "coco")
    found = json.loads((folder / "labels.json").read_text())
    found["annotations"] = [{**each, "bbox": boxes[0][0]} for each in found["annotations"]] * 2
    write(folder / "labels.json", json.dumps(found))
    with pytest.raises(UserError, match=r"All boxes fit if .* left, top, right, bottom: convert the file"):
        read(folder)


@pytest.mark.parametrize("bad", ["refuse", "mend"])
@pytest.mark.parametrize("kind", ["coco", "voc", "size", "corners"])
def test_fractions_are_no_pixels(tmp_path, kind, bad):
    """Whoever wrote them: as pixels they are all valid, in the first one."""
    import datasets

    size, corners = [0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.4, 0.6]
    if kind == "coco":
        path = coco_at("labels.json", "images/{}.png")(tmp_path / "data")
        found = json.loads((path / "labels.json").read_text())
        found["annotations"] = [{**each, "bbox": size} for each in found["annotations"]]
        write(path / "labels.json", json.dumps(found))
    elif kind == "voc":
        path = voc(tmp_path / "data")
        for file in path.rglob("*.xml"):
            text = file.read_text()
            for side, value in zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True):
                text = re.sub(f"<{side}>[^<]*<", f"<{side}>{value}<", text)
            file.write_text(text)
    else:
        photograph(tmp_path / "1.png")
        boxes = [size if kind == "size" else corners]
        rows = {"image": [str(tmp_path / "1.png")] * 4, "boxes": [boxes] * 4, "classes": [["cat"]] * 4}
        path = tmp_path / "rows.parquet"
        datasets.Dataset.from_dict(rows).to_parquet(path)
    flags = {"box_format": kind} if kind in ("size", "corners") else {}
    with pytest.raises(UserError, match=r"has the box 0.1, 0.2, 0.4, 0.6 .*in an image of 100 x 50.* fractions of the"):
        read(path, bad_boxes=bad, **flags)


def test_every_process_knows_the_same_table(tmp_path):
    """Else each run and each process would read it, and decode all images, anew."""
    kinds = ["yolo: roboflow", "coco: cvat", "voc"]
    folders = [str(LAYOUTS[kind](tmp_path / f"data-{index}")) for index, kind in enumerate(kinds)]
    code = (
        "from app.data.boxes.files import box_tables; "
        f"print([[t._fingerprint for t in box_tables('--data.path', [each]).values()] for each in {folders}])"
    )
    own = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    assert python(code, **own) == python(code, **own)
