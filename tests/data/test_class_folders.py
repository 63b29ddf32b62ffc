"""Folders of images: the first folder below the split is the class, and what cannot be told is refused by name."""

import os
import unicodedata
from pathlib import Path

import pytest
from PIL import Image

from app.data.config import ClassData, ImageData
from app.data.images.labeled_images import load_labelled
from app.data.loading import load_tables, open_source
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("data_cache")


def lay(folder: Path, *files: str) -> Path:
    """Write small images, and other files, at these paths; a path that ends with / is an empty folder."""
    for file in files:
        path = folder / file
        (path if file.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if path.suffix in (".png", ".jpg", ".JPG"):
            Image.new("RGB", (8, 8)).save(path)
        elif not file.endswith("/"):
            path.write_text("x")
    return folder


def read(folder: Path, **flags):
    """Return the class of each image, by split and path; the classes; and what the run says of it."""
    source = open_source("--data.path", [str(folder)], txt="images")
    found = {}
    for split, table in source.tables.items():
        names = table.features["label"].names if "label" in table.features else None
        for image, row in zip(table.data.column("image").to_pylist(), range(len(table)), strict=True):
            label = names[table.data.column("label")[row].as_py()] if names else None
            found[split, os.path.relpath(image["path"], folder)] = label
    return found, source.note


PAIR = ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")


def truth(split, before, classes=("cat", "dog")):
    return {(split, f"{before}{name}/{i}.png"): name for name in classes for i in (1, 2)}


def below(folder, files=PAIR):
    return [f"{folder}/{file}" for file in files]


LEFT_BY_SYSTEMS = (
    *(".DS_Store", "cat/Thumbs.db", "__MACOSX/cat/._1.png", ".ipynb_checkpoints/1.png", "dog/.hidden.png"),
    *("cat/.ipynb_checkpoints/1-checkpoint.png", "desktop.ini", "dog/._1.png", "@eaDir/cat/1.png", "README.md"),
)
LAYOUTS = {
    "plain": (PAIR, truth("train", "")),
    "train and val": ([*below("train"), *below("val")], truth("train", "train/") | truth("validation", "val/")),
    "other names": (
        [*below("Training"), *below("valid"), *below("Test Set")],
        truth("train", "Training/") | truth("validation", "valid/") | truth("test", "Test Set/"),
    ),
    "validation": (
        below("validation") + below("training"),
        truth("train", "training/") | truth("validation", "validation/"),
    ),
    "names that share a word": (
        [*below("seg_train/seg_train"), *below("seg_test/seg_test")],
        truth("train", "seg_train/seg_train/") | truth("test", "seg_test/seg_test/"),
    ),
    "images of splits": (
        below("train_images") + below("testImages"),
        truth("train", "train_images/") | truth("test", "testImages/"),
    ),
    "one level down": (
        [*below("pets/train"), *below("pets/dev")],
        truth("train", "pets/train/") | truth("validation", "pets/dev/"),
    ),
    "classes one level down": (below("pets/images"), truth("train", "pets/images/")),
    "a split in a split": (
        below("train/train") + below("val/val"),
        truth("train", "train/train/") | truth("validation", "val/val/"),
    ),
    "splits that files are named like": (
        ("cat/train_1.png", "cat/test.png", "dog/val-2.png", "dog/dev.png"),
        {("train", f): f[:3] for f in ("cat/train_1.png", "cat/test.png", "dog/val-2.png", "dog/dev.png")},
    ),
    "classes that splits are in": (
        ("train station/1.png", "test tube/1.png", "dev board/1.png"),
        {("train", f"{name}/1.png"): name for name in ("train station", "test tube", "dev board")},
    ),
    "what systems leave": (
        (*PAIR, *LEFT_BY_SYSTEMS),
        truth("train", ""),
    ),
    "no classes in test": (
        [*below("train"), "test/1.png", "test/2.png"],
        truth("train", "train/") | {("test", f"test/{i}.png"): None for i in (1, 2)},
    ),
    "no classes": (("1.png", "2.png"), {("train", "1.png"): None, ("train", "2.png"): None}),
    "upper case": (("cat/1.JPG", "dog/1.jpg"), {("train", "cat/1.JPG"): "cat", ("train", "dog/1.jpg"): "dog"}),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_first_folder_is_the_class(tmp_path, kind):
    files, meant = LAYOUTS[kind]
    assert read(lay(tmp_path, *files)) == (meant, "")


def test_folders_inside_of_classes_do_not_matter(tmp_path):
    """However deep; and the run says so."""
    files = [*below("train"), "train/cat/old/3.png", "train/dog/a/b/3.png", *below("val"), "val/cat/old/3.png"]
    found, note = read(lay(tmp_path, *files))
    meant = truth("train", "train/") | truth("validation", "val/")
    meant |= {("train", "train/cat/old/3.png"): "cat", ("train", "train/dog/a/b/3.png"): "dog"}
    assert found == meant | {("validation", "val/cat/old/3.png"): "cat"}
    assert note == "3 images lie in folders inside of their class's, such as train/cat/old/3.png"


def test_what_is_left_out_is_said(tmp_path):
    found, note = read(lay(tmp_path, *PAIR, "dog/3.heic", "labels.csv", "bird/"))
    assert found == truth("train", "")
    assert note == "2 files are left out that are no images, such as labels.csv; without images, and so no class: bird"
    tables, labels = load_labelled(ClassData(path=(str(tmp_path),), holdout=0.25))
    assert "labels.csv" in tables.note and labels.names == ["cat", "dog"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([*PAIR, "stray.png"], "stray.png lies beside the folders of classes (cat, dog): put each image into"),
        ([*PAIR, "a.png", "b.png"], "a.png and 1 more images lie beside the folders of classes"),
        ([*below("train"), "train/x.jpg", *below("val")], "train/x.jpg lies beside"),
        ([*below("train"), *below("val"), "val/x.jpg"], "val/x.jpg lies beside"),
        ([*below("train"), *below("bus")], "train/ is named like a split, and bus/ lies beside it"),
        ([*below("train"), "x.png"], "train/ is named like a split, and x.png lies beside it"),
        ([*PAIR, *below("val")], "val/ is named like a split, and cat/ lies beside it"),
        ([*PAIR, *below("test_images")], "test_images/ is named like a split, and cat/ lies beside it"),
        ([*below("train"), *below("val"), *below("valid")], "val/ and valid/ are both for validation"),
        (["cat/train/1.png", "cat/val/1.png", "dog/train/1.png"], "cat/train is a split inside of a class: put splits"),
        (["cat/1.png", "Cat/2.png", "dog/1.png"], "the folders Cat and cat have one name but for its spelling"),
        (
            [unicodedata.normalize("NFC", "café/1.png"), unicodedata.normalize("NFD", "café/2.png"), "dog/1.png"],
            "have one name but for its spelling",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path, files, said):
    with pytest.raises(UserError) as refused:
        read(lay(tmp_path, *files))
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["cat/caf\udce9.png", "caf\udce9/1.png"])
def test_a_name_that_is_not_utf8_is_named(tmp_path, name):
    """A zip file of another system unpacks to such names."""
    with pytest.raises(UserError, match=r"'.*caf\\udce9.*' has letters that are not UTF-8: rename the file or folder"):
        read(lay(tmp_path, *PAIR, name))


def test_splits_have_the_classes_of_training(tmp_path):
    """Two ways to write a letter are one class; what only evaluation has is refused, and what only training has not."""
    names = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    lay(
        tmp_path,
        f"train/{names[0]}/1.png",
        "train/bar/1.png",
        "train/inn/1.png",
        f"val/{names[1]}/1.png",
        "val/bar/1.png",
    )
    _, labels = load_labelled(ClassData(path=(str(tmp_path),)))
    assert labels.names == ["bar", names[0], "inn"] and labels.eval_values.tolist() == [0, 1]
    lay(tmp_path, "val/Bar/1.png")
    with pytest.raises(UserError, match=r"val/Bar and val/bar have one name|val/bar and val/Bar have one name"):
        load_labelled(ClassData(path=(str(tmp_path),)))
    os.rename(tmp_path / "val/Bar", tmp_path / "val/pub")
    with pytest.raises(UserError, match=r"split validation has the label 'pub', which no training row has"):
        load_labelled(ClassData(path=(str(tmp_path),)))


def test_linked_classes_are_followed(tmp_path):
    lay(tmp_path, "other/cats/1.png", "other/cats/2.png", "data/dog/1.png", "data/dog/2.png")
    (tmp_path / "data/cat").symlink_to(tmp_path / "other/cats")
    (tmp_path / "data/dog/again").symlink_to(tmp_path / "data")
    assert read(tmp_path / "data") == (truth("train", ""), "")


def test_rows_have_the_order_of_datasets(tmp_path):
    """So that a run of an earlier version goes on."""
    import datasets

    lay(tmp_path, *PAIR, "cat b/1.png", "cat-a/1.png", "dog/10.png", "dog/1 b.png")
    theirs = datasets.load_dataset("imagefolder", data_dir=str(tmp_path), split="train")
    ours = open_source("--data.path", [str(tmp_path)], txt="images").tables["train"]
    assert theirs.data.column("image").to_pylist() == ours.data.column("image").to_pylist()
    assert theirs["label"] == ours["label"] and theirs.features == ours.features


def test_images_without_classes_may_lie_anywhere(tmp_path):
    """Where nobody asks for classes, as for a GAN or for predictions."""
    lay(tmp_path, *PAIR, "stray.png", "dog/a/b/1.png")
    assert len(load_tables(ImageData(path=(str(tmp_path),), holdout=0.3)).train) == 4


def test_an_archive_next_to_its_images_is_left_out(tmp_path):
    import zipfile

    lay(tmp_path, *PAIR)
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        archive.write(tmp_path / "cat/1.png", "cat/1.png")
    found, note = read(tmp_path)
    assert found == truth("train", "") and note == "images.zip is left out, as it is no image"
