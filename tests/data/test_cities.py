"""Street scenes: files in a folder for each city, as Cityscapes has them, and what is done to patches of them."""

import numpy as np
import pytest
from PIL import Image

from app.data.config import VolumeData
from app.data.rows import IGNORED
from app.data.volumes.pairs import find_pictures
from app.data.volumes.volumes import load
from app.errors import UserError
from app.sampling.seeding import sample_generator

pytestmark = pytest.mark.usefixtures("data_cache")
VOID, ROAD, SKY = 1, 7, 23
CITIES = {"train": ("aachen", "bremen"), "val": ("lindau",), "test": ("berlin",)}


@pytest.fixture
def city(tmp_path):
    """Write a small data set of streets: the sky above, the road below, the car's own front at the end."""
    for split, cities in CITIES.items():
        for name in cities:
            for number in range(2):
                mask = np.full((24, 48), SKY, np.uint8)
                mask[12 + number :], mask[22:] = ROAD, VOID
                image = np.stack([mask * 9, mask, 255 - mask], axis=-1)
                for kind, end, array in (
                    ("leftImg8bit", "leftImg8bit", image),
                    ("gtFine", "gtFine_labelIds", mask),
                    ("gtFine", "gtFine_instanceIds", mask + 1),
                ):
                    folder = tmp_path / "city" / kind / split / name
                    folder.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(array).save(folder / f"{name}_{number:06}_000019_{end}.png")
                (folder / f"{name}_{number:06}_000019_gtFine_polygons.json").write_text("{}")
    return tmp_path / "city"


def loaded(path, **flags):
    patches, sets, about = load(VolumeData(path=str(path), **{"patch": (16,), "ignore": (VOID,), **flags}))
    return patches, sets[""], about


def test_folders_of_cities(city):
    patches, cases, about = loaded(city)
    assert [case.name for case in patches.cases.cases] == [
        f"{name}_{number:06}_000019" for name in CITIES["train"] for number in range(2)
    ]
    assert "4 training images, 2 held out" in about and "evaluated on val, not on test" in about
    assert f"2 classes (value in the masks): {ROAD}, {SKY}; ignored: {VOID}" in about
    mask = cases.read(cases.cases[1])["mask"][0]
    assert (mask[:13] == 1).all() and (mask[13:22] == 0).all() and (mask[22:] == IGNORED).all()


def test_splits_of_cities_by_flags(city):
    """To evaluate on the test split, and to predict the images of one."""
    flags = {"masks": str(city / "gtFine/train"), "eval_path": str(city / "leftImg8bit/test")}
    _, cases, _ = loaded(city / "leftImg8bit/train", **flags, eval_masks=str(city / "gtFine/test"))
    assert [case.name for case in cases.cases] == ["berlin_000000_000019", "berlin_000001_000019"]
    found = find_pictures("DATA", str(city / "leftImg8bit/val"))
    assert [file.name for file in found] == [f"lindau_{n:06}_000019_leftImg8bit.png" for n in range(2)]


def test_a_street_without_its_mask_is_named(city):
    (city / "gtFine/train/bremen/bremen_000001_000019_gtFine_labelIds.png").unlink()
    with pytest.raises(UserError, match=r"bremen_000001_000019_leftImg8bit.png has no mask"):
        loaded(city)


def test_streets_are_mirrored_left_to_right_alone(city):
    """The sky stays above: other than with flip."""
    for augment, stays in ((("mirror",), True), (("flip",), False)):
        patches, _, _ = loaded(city, patch=(24, 48), augment=augment)
        rows = [patches.cut(patches[0], sample_generator(0, epoch, 0)) for epoch in range(12)]
        assert all((row["mask"][0, 0] == 1).all() for row in rows) == stays


def test_patches_of_several_sizes(city):
    """Pieces of half to twice the size of a patch; the mask has the values of classes, where the image shows them."""
    patches, _, _ = loaded(city, patch=(16, 32), augment=("scale",))
    shares, sky = set(), []
    for epoch in range(16):
        row = patches.cut(patches[0], sample_generator(0, epoch, 0))
        assert row["image"].shape == (3, 16, 32) and row["mask"].shape == (1, 16, 32)
        assert row["image"].dtype == np.float32 and row["mask"].dtype == np.int64
        assert set(np.unique(row["mask"]).tolist()) <= {0, 1, IGNORED}
        shares.add(round(float((row["mask"] == 0).mean()), 3))
        inner = row["image"][0][row["mask"][0] == 1]
        sky.append(np.median(inner) if inner.size else np.nan)
    assert len(shares) > 6 and np.nanmax(sky) - np.nanmin(sky) < 1e-4
    again = patches.cut(patches[0], sample_generator(0, 3, 0))["image"]
    assert np.array_equal(again, patches.cut(patches[0], sample_generator(0, 3, 0))["image"])
    volume, _, _ = load(VolumeData(dims=3, patch=(8,), augment=("scale",)))
    assert volume.cut(volume[0], sample_generator(0, 0, 0))["mask"].shape == (1, 8, 8, 8)
