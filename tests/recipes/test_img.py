"""Images: files of all kinds read, brought to one size, augmented; and what the image classifier leaves."""

import importlib.util
import io
import json
import os
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from support.launching import ROOT, saved_state, scores, steps, train_many, weights
from support.tables import refused

from app.__main__ import main as app
from app.data.config import Augment, ClassData
from app.data.fingerprint import contents, difference
from app.data.images.augment import Draw, ImageCollate
from app.data.images.image_column import ImageColumn
from app.data.images.labeled_images import Images, load_images, load_labelled, own_processor
from app.sampling.seeding import sample_generator
from app.tasks.pretrained import load_processor
from app.tasks.vision.pictures import confusion, sheet

pytestmark = pytest.mark.usefixtures("data_cache")
RECIPE = ROOT / "recipes" / "img.py"
PLAIN = Augment(shift=0.0, zoom=0.0, rotate=0.0)


def picture(value, mode="RGB", size=(40, 30)):
    return Image.new(mode, size, value)


def png(image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Give a folder with ten images of several sizes and modes in each of two classes."""
    for label, level in (("dark", 10), ("light", 240)):
        (tmp_path / label).mkdir()
        for i in range(10):
            mode, value = (("RGB", (level, level, i)), ("L", level), ("P", 7))[i % 3]
            picture(value, mode, (40 + i, 30)).save(tmp_path / label / f"{i}.png")
    return tmp_path


def load(path, **flags):
    """Load images and labels as the recipe does."""
    tables, labels = load_labelled(ClassData(path=(str(path),), **flags))
    column = ImageColumn(tables.train, "image")
    processor = own_processor(column, flags.get("size", 0))
    return load_images(column, processor, flags.get("cache_gb", 1.0), labels.train_values), labels


def test_a_folder_of_images_of_many_kinds(folder):
    """Classes are the subfolders; decoded once, mapped into memory, and the same where they are not kept."""
    rows, labels = load(folder)
    assert labels.names == ["dark", "light"] and rows.shape[1:] == (3, 40, 40) and len(rows) == 18
    anew, _ = load(folder, cache_gb=0.0)
    assert anew.fingerprint is None and rows.fingerprint
    for one, other in zip(rows.__getitems__([17, 0, 3]), anew.__getitems__([17, 0, 3]), strict=True):
        assert (one["pixels"] == other["pixels"]).all() and one["labels"] == other["labels"]
    red = [row["pixels"][0, 0, 0] for row in rows if row["labels"] == 1]
    assert set(red) <= {240, *(row["pixels"][0, 0, 0] for row in rows)} and red.count(240) >= 5
    assert len(pickle.dumps(rows)) < 3000  # a loading process is sent the path
    mean, deviation = rows.statistics(1 / 255)
    every = np.stack([row["pixels"] for row in rows]) / 255
    assert np.allclose(mean, every.mean((0, 2, 3))) and np.allclose(deviation, every.std((0, 2, 3)))
    assert load(folder, size=16)[0].shape[2:] == (16, 16)


def tell_paths(folder, **values):
    """Write a table of the paths of a folder's images, and of the columns that are given."""
    files = sorted(folder.rglob("*.png"))
    table = pd.DataFrame({"image": [str(file) for file in files], "label": [file.parent.name for file in files]})
    table.assign(**values).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet", files


def test_images_whose_paths_a_column_holds_are_decoded_again_once_they_change(folder):
    """The table stays what it was; a run's check of its data sees what the new files hold."""
    table, files = tell_paths(folder)
    rows, _ = load(table)
    again, _ = load(table)
    assert again.read.path == rows.read.path and again.fingerprint == rows.fingerprint
    before, stamp = contents(rows), files[3].stat()
    for file in files:
        picture((99, 3, 7), size=Image.open(file).size).save(file)
    changed, _ = load(table)
    assert {row["pixels"][0, 0, 0] for row in changed} == {99}
    assert changed.fingerprint != rows.fingerprint
    assert "rows that were compared differ in pixels" in difference(before, contents(changed))
    assert "the hash of all rows" in difference({**before, "rows": {}}, contents(changed))
    os.utime(files[3], ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # the time alone
    assert load(table)[0].read.path != changed.read.path


def test_embedded_images_are_known_by_their_table(folder):
    """Paths beside bytes are names: no file is looked for."""
    files = sorted(folder.rglob("*.png"))
    images = [{"bytes": file.read_bytes(), "path": str(file)} for file in files]
    table, _ = tell_paths(folder, image=images)
    rows, _ = load(table)
    for file in files:
        file.unlink()
    assert load(table)[0].read.path == rows.read.path


def test_another_run_decodes_the_same_images_meanwhile(folder, monkeypatch):
    """Two containers that share a cache may have the same process id and the same host name."""
    table, _ = tell_paths(folder, other=1)
    tables, labels = load_labelled(ClassData(path=(str(table),)))
    column = ImageColumn(tables.train, "image")
    processor, read, found = own_processor(column, 0), ImageColumn.read, []

    def interrupted(self, row):
        if row == 5 and not found:
            found.append(None)
            found[0] = load_images(ImageColumn(tables.train, "image"), processor, 1.0, labels.train_values)
        return read(self, row)

    monkeypatch.setattr(ImageColumn, "read", interrupted)
    rows = load_images(column, processor, 1.0, labels.train_values)
    expected = load_images(column, processor, 0.0)
    for some in (rows, found[0]):
        assert all((a["pixels"] == b["pixels"]).all() for a, b in zip(some, expected, strict=True))
    assert rows.fingerprint == found[0].fingerprint
    assert not list(rows.read.path.parent.parent.glob(f"{rows.read.path.parent.name}.*"))


def test_images_that_cannot_be_read_are_named(folder):
    broken = folder / "light" / "4.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with refused("light/4.png", "cannot be read", "leave it out"):
        load(folder)
    Image.fromarray(np.full((30, 40), 30000, np.uint16)).save(broken)
    with refused("light/4.png", "more than 8 bits"):
        load(folder)
    with refused("--data.label kind: no such column", "each class is a subfolder", "image, label"):
        load(folder, label="kind")
    with refused("--data.label image", "classes are integers or strings"):
        load(folder, label="image")


def test_parquet_that_says_nothing_of_images(tmp_path):
    """As pandas writes it: a struct of bytes and a path, bare bytes, or names of files."""
    images = [png(picture((i, 0, 0))) for i in range(10)]
    file = tmp_path / "one.png"
    file.write_bytes(images[3])
    frame = pd.DataFrame({"struct": [{"bytes": image, "path": None} for image in images], "bytes": images})
    frame["path"], frame["label"] = str(file), [i % 2 for i in range(10)]
    frame.to_parquet(tmp_path / "images.parquet")
    tables, _ = load_labelled(ClassData(path=(str(tmp_path / "images.parquet"),)))
    red = [ImageColumn(tables.train, name).read(5).getpixel((0, 0))[0] for name in ("struct", "bytes", "path")]
    assert red[0] == red[1] and red[2] == 3
    with refused("--data.image label", "holds int64, no images", "struct, bytes, path, label"):
        ImageColumn(tables.train, "label")
    frame.to_parquet(tmp_path / "others.parquet")
    frame.loc[2, "bytes"] = None
    frame.to_parquet(tmp_path / "images.parquet")
    train, others = (str(tmp_path / f"{name}.parquet") for name in ("images", "others"))
    tables, _ = load_labelled(ClassData(path=(train,), eval_path=others))
    with refused("row 2 (counted from 0)", "has no image"):
        ImageColumn(tables.train, "bytes").read(2)


ROWS = Images(
    lambda rows: np.stack([np.random.default_rng(row).integers(0, 256, (3, 12, 16), np.uint8) for row in rows]),
    (9, 3, 12, 16),
    np.arange(9),
)


def augmented(settings, rows, epoch=0):
    """Return the pixels of some rows, augmented as in an epoch, from 0 to 255."""
    draw = Draw(settings)
    drawn = [draw(ROWS[row], sample_generator(0, epoch, row)) for row in rows]
    return ImageCollate([0.0] * 3, [1.0] * 3, 1.0)(drawn)["pixel_values"]


def test_augmentation_belongs_to_the_sample_and_the_epoch():
    """To the bit, wherever in a micro-batch a sample stands and whatever else is in there."""
    settings = Augment(flip=0.5, erase=0.5)
    whole = augmented(settings, range(9))
    assert torch.equal(augmented(settings, [7, 2, 5]), whole[[7, 2, 5]])
    assert not torch.isclose(augmented(settings, range(9), epoch=1), whole).flatten(1).all(1).any()


def test_what_augmentation_does():
    plain = torch.stack([torch.from_numpy(ROWS[row]["pixels"]).float() for row in range(9)])
    assert torch.allclose(augmented(PLAIN, range(9)), plain, atol=1e-3)
    assert torch.allclose(augmented(Augment(1.0, 0.0, 0.0, 0.0), range(9)), plain.flip(3), atol=1e-3)
    turned = augmented(Augment(0.0, 0.0, 0.0, 180.0), range(9))
    assert not torch.allclose(turned, plain, atol=1.0)
    erased = augmented(Augment(0.0, 0.0, 0.0, 0.0, 1.0), range(9))
    gone = (erased == 0).all(1).float().mean((1, 2))
    assert ((gone > 0.04) & (gone < 0.36)).all() and len(gone.unique()) > 3
    assert torch.allclose(erased[erased != 0], plain[erased != 0], atol=1e-3)
    for name, value in {"flip": 1.5, "shift": -0.1, "zoom": 1.0, "rotate": 181.0, "erase": 2.0}.items():
        with refused(f"--augment.{name} {value}"):
            Draw(Augment(**{name: value}))


def test_pictures_of_a_confusion_matrix_and_of_images():
    drawn = confusion(np.array([[1, 0, 0], [0, 0, 0], [0, 1, 0]]), ["a", "b", "a very long name of a class"])
    assert drawn.dtype == np.uint8 and drawn.shape[0] == drawn.shape[1] and drawn.shape[2] == 3
    laid = sheet(np.full((5, 4, 6, 1), 9, np.uint8), columns=2, magnify=2)
    assert laid.shape == (3 * 9 - 1, 2 * 13 - 1, 3) and (laid == 9).sum() == 5 * 8 * 12 * 3


def test_timm_is_asked_for_where_it_is_needed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("--model timm/resnet18", "pip install timm"):
        load_processor("timm/resnet18")


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_a_folder_of_timms_says_what_it_needs(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "timm_wrapper", "architecture": "resnet18"}')
    with refused("needs what is not installed", "pip install timm"):
        load_processor(str(tmp_path))


def test_a_model_of_timm(tmp_path):
    pytest.importorskip("timm", reason="needs torchvision, and timm, which needs it")
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    config = TimmWrapperConfig(architecture="resnet10t", num_labels=3)
    TimmWrapperForImageClassification(config).save_pretrained(tmp_path)
    processor = load_processor(str(tmp_path), 32)
    assert processor(picture((1, 2, 3)), return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 32)


def test_predictions_name_the_file_of_each_image(tmp_path):
    """Of a folder with classes, of one without, and of a single photograph."""
    from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessorPil

    shape = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], id2label={0: "cat", 1: "dog"})
    ResNetForImageClassification(shape).save_pretrained(tmp_path / "model")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "model")
    files = [tmp_path / "classes" / name for name in ("cat/0.png", "cat/1.png", "dog/0.png")]
    files += [tmp_path / "flat" / name for name in ("a.jpg", "b.jpg")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10)).save(file)
    for data, expected in (("classes", files[:3]), ("flat", files[3:]), ("flat/b.jpg", files[4:])):
        to = tmp_path / f"{len(expected)}.jsonl"
        assert app(["predict", str(tmp_path / "model"), str(tmp_path / data), "--to", str(to)]) == 0
        lines = [json.loads(line) for line in to.read_text().splitlines()]
        assert [line["file"] for line in lines] == list(map(str, expected))
        assert all(line["prediction"] in ("cat", "dog") for line in lines)


# tests/laws/test_buffers.py has running statistics under FSDP2, and tests/commands/test_export.py this recipe.
SHARDED = pytest.param("fsdp_cpu", 2, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("profile", "processes"), [("cpu", 1), SHARDED])
def test_batchnorm_and_what_the_run_leaves(tmp_path, data_cache, profile, processes):
    """It trains, says what depends on the layout, resumes to the bit, and its model is what others load."""
    from transformers import AutoModelForImageClassification, pipeline

    common = ["--data.split", "train[:200]", "--data.eval-split", "train[200:260]", "--run.trackers", "--run.log-every"]
    common += [1, "--scratch.layers", 1, "--scratch.width", 8, "--run.global-batch", 20, "--run.micro-batch", 10]
    common += ["--loss.smoothing", 0, "--augment.shift", 0, "--augment.zoom", 0, "--augment.rotate", 0]
    small = [*common, "--run.steps", 4, "--run.save-every", 1, "--scratch.norm", "batch"]
    whole, stopped, group = (["--run.dir", tmp_path / name] for name in ("whole", "stopped", "group"))
    longer = [*common, "--run.steps", 40, "--optim.lr", 0.02, *group]
    commands = [[*small, *whole], [*small, *stopped, "--run.stop-at", 2], [*small, *stopped], longer]
    again = ["--run.dir", tmp_path / "again", "--model", tmp_path / "group" / "model"]
    train_many(profile, processes, RECIPE, [*commands, [*common, "--run.steps", 2, *again]], tmp_path)
    assert steps(tmp_path / "stopped") == steps(tmp_path / "whole")
    # Running statistics are the main process's on all ranks: scored with, saved, resumed, exported.
    assert scores(tmp_path / "stopped") == scores(tmp_path / "whole")
    state = saved_state(tmp_path / "whole", 4)
    assert saved_state(tmp_path / "stopped", 4) == state
    assert {name: state[f"models.0.{name}"] for name in weights(tmp_path / "whole")} == weights(tmp_path / "whole")
    assert steps(tmp_path / "again")[0]["loss"] < 0.8 * steps(tmp_path / "group")[0]["loss"]

    model = AutoModelForImageClassification.from_pretrained(tmp_path / "whole" / "model")
    assert type(model).__name__ == "ResNetForImageClassification"
    classify = pipeline("image-classification", str(tmp_path / "group" / "model"))
    tables, labels = load_labelled(ClassData(split="train[:200]", eval_split="train[200:260]"))
    truth = [labels.names[value] for value in labels.eval_values]
    hits = np.mean(
        [classify(row["image"])[0]["label"] == true for row, true in zip(tables.evaluation, truth, strict=True)]
    )
    last = scores(tmp_path / "group")[-1]
    assert last["eval/accuracy"] == pytest.approx(hits, abs=1e-6) and hits > 0.6
    assert 0 < last["eval/accuracy"] <= last["eval/top5"] <= 1
    assert list((tmp_path / "group" / "images" / "eval" / "confusion").glob("*.png"))
    assert json.loads((tmp_path / "group" / "run.json").read_text())["status"] == "finished"
