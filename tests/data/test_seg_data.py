"""Images with masks: which files belong together, what is in them, and the patches that are cut from them."""

import hashlib

import nibabel
import numpy as np
import pytest
from PIL import Image

from app.data.config import VolumeData
from app.data.rows import IGNORED, stack
from app.data.volumes.grains import grain, grains
from app.data.volumes.volumes import load
from app.errors import UserError
from app.sampling.seeding import sample_generator

pytestmark = pytest.mark.usefixtures("data_cache")
SIDES = [(40, 30), (33, 64), (20, 20)]


def image_of(mask, generator):
    """Make an image that is bright where the mask is not 0."""
    return (60 + 120 * (mask > 0) + generator.integers(0, 20, mask.shape)).astype(np.uint8)


@pytest.fixture
def write(tmp_path):
    """Give a function that writes image/ and label/ with some files each, and returns their folder."""

    def write(name="data", sides=SIDES, extension="png", values=(0, 255), mask_extension=""):
        folder, generator = tmp_path / name, np.random.default_rng(0)
        for index, shape in enumerate(sides):
            mask = np.array(values, np.uint8)[generator.integers(0, len(values), shape)]
            save(folder / "image" / f"{index}.{extension}", image_of(mask, generator))
            save(folder / "label" / f"{index}.{mask_extension or extension}", mask)
        return folder

    return write


def save(file, array):
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.name.endswith((".nii", ".nii.gz")):
        nibabel.save(nibabel.Nifti1Image(array, np.diag([-1, 1, 1, 1])), file)
    elif array.ndim == 3 and array.shape[-1] != 3:
        pages = [Image.fromarray(page) for page in array]
        pages[0].save(file, save_all=True, append_images=pages[1:])
    else:
        Image.fromarray(array).save(file)


def loaded(path, **flags):
    patches, sets, about = load(VolumeData(path=str(path), **{"patch": (16,), **flags}))
    return patches, sets[""], about


def refused(*parts, path, **flags):
    with pytest.raises(UserError) as error:
        loaded(path, **flags)
    for part in parts:
        assert str(part) in str(error.value)


def test_grains_have_the_same_bits_everywhere():
    digest = hashlib.sha256()
    for dims in (2, 3):
        image, mask = grain(1, dims)
        digest.update(image.tobytes() + mask.tobytes())
        assert image.shape == mask.shape == {2: (128, 128), 3: (48, 48, 48)}[dims]
        assert 0.1 < mask.mean() < 0.3 and set(np.unique(mask)) == {0, 1}
        assert image[mask == 1].mean() < image[mask == 0].mean() - 15
    assert digest.hexdigest()[:16] == "6f6a53dfba30c26b"
    assert np.array_equal(grains(2)[0][1], grain(0, 2)[0])


def test_folders_of_images_and_masks(write):
    patches, cases, about = loaded(write())
    assert (len(patches), len(cases)) == (8, 1)
    assert "2 training images, 1 held out" in about and "2 classes (value in the masks): 0, 255" in about
    row = cases[0]
    assert row["image"].shape == row["mask"].shape
    assert (row["image"].dtype, row["mask"].dtype) == (np.float32, np.int64)
    assert abs(row["image"].mean()) < 1e-5 and abs(row["image"].std() - 1) < 1e-4
    assert np.array_equal(row["image"] > 0, row["mask"] == 1)


def test_masks_elsewhere_and_splits(write, tmp_path):
    folder = write()
    (folder / "label").rename(tmp_path / "truth")
    patches, _, _ = loaded(folder / "image", masks=str(tmp_path / "truth"))
    assert len(patches) == 8
    refused("--data.masks", "imagesTr and labelsTr", path=folder / "image")
    write("split/train")
    write("split/val", sides=SIDES[:2])
    patches, cases, _ = loaded(tmp_path / "split")
    assert (len(patches), len(cases)) == (12, 2)
    _, cases, _ = loaded(tmp_path / "split" / "train", eval_path=str(tmp_path / "split" / "val"))
    assert len(cases) == 2


def test_files_without_partner_are_named(write):
    folder = write()
    (folder / "label" / "1.png").unlink()
    refused(folder / "image" / "1.png", "has no mask", "label", path=folder)
    (folder / "image" / "1.png").unlink()
    (folder / "image" / "0.png").unlink()
    refused(folder / "label" / "0.png", "has no image", path=folder)
    refused("--data.path", "no such file", path=folder / "images")


@pytest.mark.parametrize("extension", ["tif", "nii.gz", "nii"])
def test_volumes_and_their_slices(write, extension):
    folder = write(sides=[(4, 18, 20), (5, 18, 20), (6, 17, 20)], extension=extension)
    _, cases, _ = loaded(folder, dims=3, patch=(4, 16, 16))
    volume = cases[0]
    assert volume["image"].shape[1] in (4, 5, 6) and np.array_equal(volume["image"] > 0, volume["mask"] == 1)
    _, slices, _ = loaded(folder, dims=2)
    axis = 1 if extension == "tif" else 3
    assert len(slices) == volume["image"].shape[axis]
    assert np.array_equal(slices[1]["mask"], np.take(volume["mask"], 1, axis))
    assert np.array_equal(slices[1]["image"], np.take(volume["image"], 1, axis))


def test_nifti_is_turned_to_one_orientation(write):
    folder = write(sides=[(6, 7, 8)] * 2, extension="nii.gz")
    stored = np.asanyarray(nibabel.load(folder / "label" / "0.nii.gz").dataobj)
    patches, cases, _ = loaded(folder, dims=3, patch=(4,))
    both = [cases[0]["mask"][0], patches.cases[0]["mask"][0]]
    assert any(np.array_equal(mask == 1, stored[::-1] == 255) for mask in both)


def test_nifti_of_two_dimensions_is_an_image(write):
    _, cases, _ = loaded(write(sides=[(18, 20)] * 3, extension="nii.gz"))
    assert cases[0]["image"].shape == (1, 18, 20)
    assert np.array_equal(cases[0]["image"] > 0, cases[0]["mask"] == 1)


def test_one_volume_is_held_out_by_slices(write):
    folder = write(sides=[(10, 20, 20)], extension="tif")
    patches, cases, _ = loaded(folder / "image" / "0.tif", masks=str(folder / "label" / "0.tif"))
    assert (len(patches), len(cases)) == (32, 2)
    refused("--data.eval-path", path=folder, dims=3, patch=(8,))


def test_masks_that_are_none_are_refused(write):
    folder = write()
    good = np.asarray(Image.open(folder / "label" / "0.png"))
    for bad, says in {
        "0 coloured": np.stack([good, good // 2, good], axis=-1),
        "1 the same size": good[:, 1:],
        "2 only the value": None,
    }.items():
        if says is not None:
            Image.fromarray(says).save(folder / "label" / "0.png")
        else:
            for file in (folder / "label").iterdir():
                Image.fromarray(np.zeros_like(np.asarray(Image.open(file)))).save(file)
        if says is None:
            Image.fromarray(np.zeros_like(good)).save(folder / "label" / "0.png")
        refused(bad[2:], path=folder)
    palette = Image.fromarray(good // 255, mode="P")
    palette.putpalette([0, 0, 0, 200, 0, 0])
    palette.save(folder / "label" / "0.png")
    for index in (1, 2):
        mask = np.asarray(Image.open(folder / "image" / f"{index}.png")) > 100
        Image.fromarray(mask.astype(np.uint8)).save(folder / "label" / f"{index}.png")
    assert "(value in the masks): 0, 1" in loaded(folder)[2]


def test_values_that_no_mask_to_train_on_has(write, tmp_path):
    folder = write()
    other = write("other", values=(0, 7))
    refused("has the value 7", path=folder, eval_path=str(other))
    refused("--data.eval-path", "is trained on", path=folder, eval_path=f"{folder}/../{folder.name}")
    refused("--data.names a b c", path=folder, names=("a", "b", "c"))
    assert "0 membrane, 255 cell" in loaded(folder, names=("membrane", "cell"))[2]
    volumes = write("float", sides=[(8, 8, 8)] * 2, extension="nii")
    save(volumes / "label" / "0.nii", np.full((8, 8, 8), 0.5, np.float32))
    refused("0.nii", "0.5", "whole numbers", path=volumes, dims=3, patch=(8,))
    save(volumes / "label" / "0.nii", np.zeros((8, 8, 8), np.float32))
    save(volumes / "image" / "0.nii", np.full((8, 8, 8), np.nan, np.float32))
    refused("0.nii", "NaN", path=volumes, dims=3, patch=(8,))


def test_flags_that_do_not_fit(write):
    folder = write()
    refused("--data.patch 8 8 8", "--data.dims 2", path=folder, patch=(8, 8, 8))
    refused("--data.dims 2", path=folder, dims=3)
    refused("--data.overlap 1", path=folder, overlap=1)
    refused("--data.patches-per-image 0", path=folder, patches_per_image=0)
    refused("--data.holdout 1.5", path=folder, holdout=1.5)
    refused("builtin:grains", path="builtin:grain")


def test_patches_follow_from_seed_epoch_and_sample(write):
    patches, _, _ = loaded(write())

    def cut(epoch, sample):
        return patches.cut(patches[sample], sample_generator(0, epoch, sample))["image"]

    assert np.array_equal(cut(0, 1), cut(0, 1))
    different = [cut(epoch, sample) for epoch in (0, 1) for sample in (0, 1, 2, 3)]
    assert all(not np.array_equal(a, b) for i, a in enumerate(different) for b in different[:i])


@pytest.mark.parametrize("sides", [(40, 30), (9, 30)])
def test_masks_go_where_images_go(write, sides):
    """Cropped, mirrored, turned and, where the image is smaller than the patch, mirrored at its edges."""
    patches, _, _ = loaded(write(sides=[sides] * 3), augment=("flip", "rotate"))
    rows = [patches.cut(patches[i], sample_generator(0, 0, i)) for i in range(len(patches))]
    batch = stack(rows)
    assert batch["image"].shape == (8, 1, 16, 16)
    assert ((batch["image"] > 0) == (batch["mask"] == 1)).all()
    _, _, plain = loaded(write(sides=[sides] * 3), augment=())
    assert plain


def test_turns_stay_in_planes_with_equal_sides():
    patches, _, _ = load(VolumeData(dims=3, patch=(16, 16, 8)))
    shapes = {patches.cut(patches[0], sample_generator(0, e, 0))["image"].shape for e in range(20)}
    assert shapes == {(1, 16, 16, 8)}


def test_fingerprint_tells_contents_apart(write):
    first, again = loaded(write())[0], loaded(write())[0]
    assert first.fingerprint == again.fingerprint
    folder = write()
    mask = np.array(Image.open(folder / "label" / "0.png"))
    mask[0, 0] = 255 - mask[0, 0]
    Image.fromarray(mask).save(folder / "label" / "0.png")
    changed = loaded(folder)
    assert (changed[0].fingerprint, changed[1].fingerprint) != (first.fingerprint, loaded(write("b"))[1].fingerprint)


def write_camvid(root, splits=("train", "val", "test"), values=(0, 1, 2, 11)):
    """Write images and masks as SegNet ships CamVid: train/ and trainannot/ and so on."""
    generator = np.random.default_rng(0)
    for split in splits:
        for index in range(3):
            mask = np.array(values, np.uint8)[generator.integers(0, len(values), (20, 24))]
            save(root / split / f"{index}.png", image_of(mask, generator))
            save(root / f"{split}annot" / f"{index}.png", mask)
    return root


def test_camvids_layout(tmp_path):
    patches, cases, about = loaded(write_camvid(tmp_path / "camvid"), ignore=(11,))
    assert (len(patches), len(cases)) == (12, 3)
    assert "3 classes (value in the masks): 0, 1, 2; ignored: 11\nevaluated on val, not on test" in about
    for index, case in enumerate(cases.cases):
        stored = np.asarray(Image.open(tmp_path / "camvid" / "valannot" / f"{index}.png"))
        row = cases.read(case)["mask"][0]
        assert np.array_equal(row, np.where(stored == 11, IGNORED, stored.astype(int)))
    _, cases, about = loaded(write_camvid(tmp_path / "alone", splits=("train",)), ignore=(11,))
    assert len(cases) == 1 and "evaluated" not in about


@pytest.mark.parametrize("names", [("training", "validation"), ("train", "dev"), ("train", "valid"), ("train", "test")])
@pytest.mark.parametrize("inside", [True, False])
def test_splits_by_their_usual_names(write, tmp_path, names, inside):
    """Folders of splits that hold images and masks, or folders of images and masks that hold splits, as ADE has."""
    for name, sides in zip(names, (SIDES, SIDES[:2]), strict=True):
        folder = write(f"split/{name}", sides=sides)
        for kind, plural in (("image", "images"), ("label", "annotations")) if not inside else ():
            (tmp_path / "other" / plural).mkdir(parents=True, exist_ok=True)
            (folder / kind).rename(tmp_path / "other" / plural / name)
    patches, cases, about = loaded(tmp_path / ("split" if inside else "other"))
    assert (len(patches), len(cases)) == (12, 2)
    assert "evaluated on" not in about


def test_a_test_split_without_masks_is_left_out(write, tmp_path):
    write("split/train")
    folder = write("split/test")
    for file in (folder / "label").iterdir():
        file.unlink()
    (folder / "label").rmdir()
    patches, cases, about = loaded(tmp_path / "split")
    assert (len(patches), len(cases)) == (8, 1) and "test has no masks and is left out" in about
    write("split/val", sides=SIDES[:2])
    _, cases, about = loaded(tmp_path / "split")
    assert len(cases) == 2 and "test has no masks and is left out" in about


def test_ignored_values_are_no_classes(write):
    folder = write(values=(0, 7, 255))
    _, cases, about = loaded(folder, ignore=(255, 9))
    assert cases.names == ["0", "7"] and "ignored: 255, 9 (no mask to train on has 9)" in about
    assert loaded(folder, ignore=(255,), names=("a", "b"))[1].names == ["a", "b"]
    assert IGNORED in cases[0]["mask"] and {*np.unique(cases[0]["mask"])} == {IGNORED, 0, 1}
    refused("--data.names a b c", "2 values: 0, 7", path=folder, ignore=(255,), names=("a", "b", "c"))
    refused("only the value 0", "--data.ignore 7 255", path=folder, ignore=(7, 255))
    refused("no value", "--data.ignore 0 7 255", path=folder, ignore=(0, 7, 255))
    other = write("other", values=(0, 7, 8))
    refused("has the value 8", "--data.ignore 8", path=folder, eval_path=str(other))
    assert len(loaded(folder, eval_path=str(other), ignore=(8,))[1]) == 3


def test_classes_and_their_colours_from_a_file(write, tmp_path):
    """Masks in colours, which a jpg-like RGB file stores, become the numbers of the file's lines."""
    listed = "# CamVid's first ones\n64 128 64\tAnimal\n192 0 128\tArchway \n\n0,128,192,Bicycle rider\n0 0 0 Void\n"
    file, folder = tmp_path / "label_colors.txt", write(values=(0, 1, 3))
    file.write_text(listed)
    colours = np.array([(64, 128, 64), (192, 0, 128), (0, 128, 192), (0, 0, 0)], np.uint8)
    numbers = [np.asarray(Image.open(folder / "label" / f"{index}.png")) for index in range(3)]
    for index, mask in enumerate(numbers):
        Image.fromarray(colours[mask]).save(folder / "label" / f"{index}.png")
    refused("is coloured", "--data.classes", path=folder)
    patches, cases, about = loaded(folder, classes=str(file), ignore=(3,))
    assert "3 classes (value in the masks): 0 Animal, 1 Archway, 2 Bicycle rider; ignored: 3 Void" in about
    assert cases.names == ["Animal", "Archway", "Bicycle rider"] and np.array_equal(cases.palette, colours[:3])
    for case in [*cases.cases, *patches.cases.cases]:
        expected = numbers[int(case.name)].astype(int)
        assert np.array_equal(cases.read(case)["mask"][0], np.where(expected == 3, IGNORED, expected))
    file.write_text(listed.replace("0 0 0 Void", "0 0 1 Void"))
    refused("label", "the colour 0 0 0", "`0 0 0 name`", path=folder, classes=str(file))


def test_names_from_a_file_are_those_of_the_values(write, tmp_path):
    file, folder = tmp_path / "classes.txt", write(values=(0, 2))
    file.write_text("sky\nroad\ntall building\n")
    _, cases, _ = loaded(folder, classes=str(file))
    assert cases.names == ["sky", "road", "tall building"] and cases.palette is None
    assert {*np.unique(cases[0]["mask"])} == {0, 2}
    refused("has the value 255", "no line for", path=write("large"), classes=str(file))
    refused("--data.classes and --data.names", path=folder, classes=str(file), names=("a", "b"))
    refused("--data.classes", "no such file", path=folder, classes=str(tmp_path / "classes"))
    for text, says in {
        "": "is empty",
        "0 0 0 sky\nroad\n": "line 2 (road)",
        "0 0 256 sky\n": "line 1 (0 0 256 sky)",
        "sky\nsky\n": "the name sky in two lines",
        "1 2 3 sky\n1 2 3 road\n": "the colour 1 2 3 in two lines",
    }.items():
        file.write_text(text)
        refused("--data.classes", says, path=folder, classes=str(file))
