"""Volumes of NIfTI: where their voxels lie, masks that lie elsewhere, and masks that predict writes."""

import gzip
import itertools
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
from nibabel.affines import apply_affine
from PIL import Image
from support.tables import refused

from app.data.config import VolumeData
from app.data.volumes import mask_files
from app.data.volumes.pairs import read_image, read_mask
from app.data.volumes.volumes import load
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("data_cache")
SIDES = (12, 10, 8)
VALUES = np.random.default_rng(0).integers(0, 2, SIDES).astype(np.uint8)
MIRRORS = {"RAS": (1, 1, 1), "LPS": (-1, -1, 1), "LAS": (-1, 1, 1), "RPI": (1, -1, -1)}


def affine_of(codes="RAS", spacing=(1, 1, 1), origin=(0, 0, 0), turn=0.0, shear=0.0):
    """Return an affine: axes along +-x, y, z, then turned about z by degrees, and sheared."""
    c, s = np.cos(np.radians(turn)), np.sin(np.radians(turn))
    affine = np.eye(4)
    turned = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]) @ np.array([[1, shear, 0], [0, 1, 0], [0, 0, 1]])
    affine[:3, :3] = turned @ np.diag(np.multiply(MIRRORS[codes], spacing))
    affine[:3, 3] = origin
    return affine


def save(file, values, sform=None, qform=None, unit="mm", scaling=None, kind=nibabel.Nifti1Image):
    """Write a volume with the forms that are given; None: none, code 0."""
    file.parent.mkdir(parents=True, exist_ok=True)
    image = kind(values, None)
    for setting, affine in ((image.set_sform, sform), (image.set_qform, qform)):
        setting(affine, code=0 if affine is None else 1)
    if sform is None and qform is not None:
        image = kind(values, qform, image.header)
    image.header.set_xyzt_units(unit)
    if scaling:
        image.header.set_slope_inter(*scaling)
    nibabel.save(image, file)


def pair(folder, image=None, mask=None, ending="nii.gz"):
    """Write two images and their masks, each as `save` takes it."""
    for index in range(2):
        save(folder / f"image/{index}.{ending}", (VALUES * 100).astype(np.int16), **(image or {}))
        save(folder / f"label/{index}.{ending}", VALUES, **(mask or {}))
    return folder


def loaded(folder):
    patches, sets, _ = load(VolumeData(path=str(folder), dims=3, patch=(4,)))
    return patches, sets[""]


SCANNED = affine_of("LPS", (0.7, 0.8, 3), (90, 120, -40), 12)
ALIKE = {
    "the same": ({"sform": SCANNED}, {"sform": SCANNED}),
    "both forms, and the first alone": ({"sform": SCANNED, "qform": SCANNED}, {"sform": SCANNED}),
    "one form each": ({"qform": SCANNED}, {"sform": SCANNED}),
    "rounded": ({"sform": SCANNED}, {"sform": np.round(SCANNED, 3)}),
    "no orientation in both": ({}, {}),
    "a unit in one": ({"sform": SCANNED}, {"sform": SCANNED, "unit": "unknown"}),
    "sheared": ({"sform": affine_of(shear=0.3)}, {"sform": affine_of(shear=0.3)}),
}


@pytest.mark.parametrize("name", ALIKE)
def test_masks_that_lie_where_their_images_do(name, tmp_path):
    _, cases = loaded(pair(tmp_path, *ALIKE[name]))
    row = cases[0]
    assert np.array_equal(row["image"][0] > 0, row["mask"][0] == 1)


APART = {
    "orientation": ({"sform": affine_of("LPS")}, {"sform": np.eye(4)}, ["is LPS", "is RAS"]),
    "a mirrored axis": ({"qform": affine_of("LAS")}, {"qform": affine_of("RAS")}, ["is LAS", "is RAS"]),
    "spacing": (
        {"sform": affine_of(spacing=(1, 1, 2))},
        {"sform": np.eye(4)},
        ["spacing 1 x 1 x 2", "spacing 1 x 1 x 1"],
    ),
    "a little spacing": ({"sform": affine_of(spacing=(1, 1, 1.05))}, {"sform": np.eye(4)}, ["1.05", "0.333 voxels"]),
    "origin": ({"sform": affine_of(origin=(5, 0, 0))}, {"sform": np.eye(4)}, ["origin 5, 0, 0", "origin 0, 0, 0"]),
    "half a voxel": ({"sform": affine_of(origin=(0, 0.5, 0))}, {"sform": np.eye(4)}, ["0.5 voxels apart"]),
    "a turn": ({"sform": affine_of(turn=4)}, {"sform": np.eye(4)}, ["is RAS", "voxels apart"]),
    "a shear": ({"sform": affine_of(shear=0.2)}, {"sform": np.eye(4)}, ["voxels apart"]),
    "the second form alone": (
        {"sform": SCANNED, "qform": SCANNED},
        {"sform": SCANNED, "qform": affine_of()},
        ["By the qform"],
    ),
    "no orientation in the mask": ({"sform": SCANNED}, {}, ["has no orientation in its header", "is LPS"]),
    "no orientation in the image": ({}, {"qform": affine_of()}, ["has no orientation in its header", "is RAS"]),
    "units": ({"sform": SCANNED}, {"sform": SCANNED, "unit": "micron"}, ["in mm", "in micron"]),
}


@pytest.mark.parametrize("name", APART)
def test_masks_that_lie_elsewhere_are_refused(name, tmp_path):
    image, mask, says = APART[name]
    with refused("image/0.nii.gz", "label/0.nii.gz", "image.header", *says):
        loaded(pair(tmp_path, image, mask))


def test_spacing_alone_is_compared_where_headers_have_no_orientation(tmp_path):
    pair(tmp_path)
    image = nibabel.load(tmp_path / "label/0.nii.gz")
    image.header.set_zooms((1, 1, 4))
    nibabel.save(nibabel.Nifti1Image(VALUES, None, image.header), tmp_path / "label/0.nii.gz")
    with refused("label/0.nii.gz", "spacing 1 x 1 x 4", "spacing 1 x 1 x 1"):
        loaded(tmp_path)


def test_a_mask_that_is_stored_the_other_way_round_but_lies_in_its_place_is_read(tmp_path):
    """Both are turned to one orientation, each by its own header."""
    pair(tmp_path, {"sform": affine_of("LPS")})
    ends = (-(SIDES[0] - 1), -(SIDES[1] - 1), 0)
    for index in range(2):
        save(tmp_path / f"label/{index}.nii.gz", VALUES[::-1, ::-1], sform=affine_of("RAS", origin=ends))
    _, cases = loaded(tmp_path)
    assert np.array_equal(cases[0]["image"][0] > 0, cases[0]["mask"][0] == 1)


@pytest.mark.parametrize(("scaling", "says"), [((0.5, 0), "by 0.5"), ((2, 0), "by 2"), ((1, 3), "adds 3")])
def test_masks_with_scaled_values_are_refused(scaling, says, tmp_path):
    with refused("label/0.nii.gz", "scales the values", says, "whole numbers"):
        loaded(pair(tmp_path, {"sform": SCANNED}, {"sform": SCANNED, "scaling": scaling}))


def test_images_with_scaled_values_are_read_as_their_header_says(tmp_path):
    pair(tmp_path, {"sform": SCANNED, "scaling": (0.5, -7)}, {"sform": SCANNED})
    stored = nibabel.load(tmp_path / "image/0.nii.gz").get_fdata()
    assert {*np.unique(stored)} == {-7, 43} or {*np.unique(read_image(tmp_path / "image/0.nii.gz")[0])} == {0, 100}
    assert {*np.unique(read_image(tmp_path / "image/0.nii.gz")[0])} == {*np.unique(stored)}


def test_a_picture_is_no_mask_of_a_volume(tmp_path):
    for index in range(2):
        save(tmp_path / f"image/{index}.nii.gz", VALUES[..., :1].repeat(1, 2), sform=SCANNED)
        (tmp_path / "label").mkdir(exist_ok=True)
        Image.fromarray(VALUES[..., 0]).save(tmp_path / f"label/{index}.png")
    with refused("image/0.nii.gz", "label/0.png", "the other a picture"):
        load(VolumeData(path=str(tmp_path), patch=(4,)))
    (tmp_path / "image").rename(tmp_path / "was")
    (tmp_path / "label").rename(tmp_path / "image")
    (tmp_path / "was").rename(tmp_path / "label")
    with refused("image/0.png", "label/0.nii.gz", "the other a picture"):
        load(VolumeData(path=str(tmp_path), patch=(4,)))


OBLIQUE = affine_of("LPS", (0.7, 0.8, 3), (90, 120, -40), 25)
ACROSS = OBLIQUE[:, [2, 0, 1, 3]]  # slices are the first stored axis
WRITTEN = {
    "oblique LPS": (SIDES, {"sform": OBLIQUE, "qform": OBLIQUE}),
    "axes in another order": (SIDES, {"sform": ACROSS}),
    "qform alone": (SIDES, {"qform": OBLIQUE, "unit": "micron"}),
    "forms that differ": (SIDES, {"sform": OBLIQUE, "qform": affine_of()}),
    "no orientation": (SIDES, {}),
    "sheared": (SIDES, {"sform": affine_of("LAS", shear=0.3)}),
    "two dimensions": (SIDES[:2], {"sform": OBLIQUE}),
    "two dimensions, a coronal slice": (SIDES[:2], {"sform": OBLIQUE[:, [0, 2, 1, 3]]}),
    "a single slice": ((*SIDES[:2], 1), {"sform": ACROSS}),
    "a single slice across": ((1, *SIDES[:2]), {"sform": OBLIQUE}),
    "channels": ((*SIDES, 2), {"sform": OBLIQUE}),
}


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_mask_is_written_with_the_header_of_its_image(name, kind, tmp_path):
    """Found again at the same place of the world, in the orientation of the image, by whoever reads either form."""
    sides, forms = WRITTEN[name]
    values = np.random.default_rng(1).integers(0, 90, sides).astype(np.int16)
    save(tmp_path / "image.nii.gz", values, **forms, kind=kind)
    image, _ = read_image(tmp_path / "image.nii.gz")
    mask_files.write_mask(tmp_path / "mask.nii.gz", (image[0] > 40).astype(np.int64), tmp_path / "image.nii.gz")
    like, mask = (nibabel.load(tmp_path / f"{name}.nii.gz") for name in ("image", "mask"))
    assert type(mask) is kind and mask.get_data_dtype() == np.uint8 and mask.shape == sides[:3]
    assert np.allclose(mask.affine, like.affine)
    for form in ("sform", "qform"):
        own, given = (getattr(each, f"get_{form}")(coded=True) for each in (mask, like))
        assert own[1] == given[1] and (own[0] is given[0] is None or np.allclose(own[0], given[0]))
    assert mask.header.get_xyzt_units()[0] == like.header.get_xyzt_units()[0]
    assert np.allclose(mask.header.get_zooms(), like.header.get_zooms()[: mask.ndim])
    first = values[..., 0] if values.ndim == 4 else values
    brightest = np.argwhere(first > 40)
    world = apply_affine(like.affine, np.pad(brightest, ((0, 0), (0, 3 - brightest.shape[1]))))
    back = np.round(apply_affine(np.linalg.inv(mask.affine), world)).astype(int)
    found = np.asanyarray(mask.dataobj).reshape(*sides[:3], *[1] * (3 - len(sides[:3])))
    assert found.sum() == len(back) and (found[tuple(back.T)] == 1).all()
    assert np.array_equal(read_mask(tmp_path / "mask.nii.gz"), image[0] > 40)
    mask_files.write_shares(
        tmp_path / "shares.npy", np.stack([image[0] > 40, image[0] <= 40]), tmp_path / "image.nii.gz"
    )
    assert np.array_equal(np.load(tmp_path / "shares.npy"), [mask.dataobj, 1 - np.asanyarray(mask.dataobj)])


def test_what_speaks_of_the_images_values_is_not_said_of_the_mask(tmp_path):
    image = nibabel.Nifti1Image((VALUES * 100).astype(np.int16), OBLIQUE)
    image.header["cal_max"] = 1000
    image.header.set_slope_inter(0.5, 0)
    image.header.set_intent("t test", (9,))
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"name of a patient"))
    nibabel.save(image, tmp_path / "image.nii")
    mask_files.write_mask(tmp_path / "mask.nii", read_image(tmp_path / "image.nii")[0][0] > 9, tmp_path / "image.nii")
    mask = nibabel.load(tmp_path / "mask.nii")
    assert not mask.header.extensions and mask.header["cal_max"] == 0 and mask.header.get_intent()[0] == "none"
    assert np.array_equal(np.asanyarray(mask.dataobj), VALUES)


def test_predict_refuses_nothing_of_a_lone_image(tmp_path):
    """A volume whose forms differ has no mask to be compared with, and its mask gets both forms."""
    from app.commands.predict.masks import _case

    save(tmp_path / "one.nii.gz", VALUES, sform=OBLIQUE, qform=affine_of())
    assert _case(tmp_path / "one.nii.gz", SimpleNamespace(dims=3, card={"channels": 1})).mask.shape == SIDES


def odd_files(folder):
    """Write files that are NIfTI by name alone, or hold what is no image."""
    cifti = nibabel.cifti2
    axes = (cifti.ScalarAxis(["a"]), cifti.BrainModelAxis.from_mask(np.ones((2, 2, 2)), name="thalamus_left"))
    colour = np.zeros((4, 4, 4), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    nibabel.save(cifti.Cifti2Image(np.ones((1, 8)), axes), folder / "cifti.nii")
    nibabel.save(nibabel.Nifti1Image(colour, np.eye(4)), folder / "colour.nii")
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, 4), np.complex64), np.eye(4)), folder / "complex.nii")
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, 4, 1, 2), np.uint8), np.eye(4)), folder / "five.nii")
    nibabel.save(nibabel.Nifti1Image(np.zeros(4, np.uint8), np.eye(4)), folder / "one.nii")
    for name, bad in (("singular", np.diag([1.0, 1, 0, 1])), ("nan", np.diag([1, np.nan, 1, 1]))):
        image = nibabel.Nifti1Image(VALUES, np.eye(4))
        image.header["srow_x"], image.header["srow_y"], image.header["srow_z"] = bad[:3]
        (folder / f"{name}.nii").write_bytes(nibabel.Nifti1Image(VALUES, None, image.header).to_bytes())
    (folder / "folder.nii").mkdir()
    (folder / "text.nii").write_text("no volume")
    (folder / "text.nii.gz").write_text("no volume")
    (folder / "empty.nii.gz").write_bytes(b"")
    (folder / "empty.nii").write_bytes(b"")
    (folder / "nothing.nii.gz").write_bytes(gzip.compress(b""))


def test_files_that_are_no_images_are_refused_by_name(tmp_path):
    odd_files(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 13
    for file, read in itertools.product([*files, tmp_path / "missing.nii"], (read_image, read_mask)):
        with refused(file.name):
            read(file)


@pytest.mark.parametrize("ending", ["nii", "nii.gz"])
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_volume_is_refused_by_name(ending, tmp_path):
    """Cut or with a byte changed: one line with its name; and no other voxels where a checksum tells."""
    file = tmp_path / f"one.{ending}"
    save(file, (VALUES * 100).astype(np.int16), sform=OBLIQUE)
    data, whole = file.read_bytes(), read_image(file)[0]
    places = range(0, len(data), 1 if ending == "nii.gz" else 5)
    cut = [data[:place] for place in places if place % 7 == 0]
    flipped = [data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :] for place in places]
    for index, harmed in enumerate([*cut, *flipped]):
        file.write_bytes(harmed)
        for read in (read_image, read_mask):
            try:
                found = read(file)
            except UserError as error:
                assert file.name in str(error) and "\n" not in str(error)
                continue
            if read is read_image and (index < len(cut) or ending == "nii.gz"):
                assert np.array_equal(found[0], whole)
