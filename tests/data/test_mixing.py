"""Mixup, cutmix and RandAugment: functions of a sample's generator alone, with labels that say what is shown."""

import numpy as np
import pytest
import torch

from app import UserError
from app.data.config import Augment
from app.data.images.augment import Draw, ImageCollate, augmentation
from app.data.images.operations import MOST, OPERATIONS, Operations

PLAIN = {"shift": 0.0, "zoom": 0.0, "rotate": 0.0}
RANDOM = np.random.default_rng(0)
ROWS = [{"pixels": np.full((3, 8, 10), 10 * i, np.uint8), "labels": i} for i in range(9)]
COLLATE = ImageCollate([0.0] * 3, [1.0] * 3, 1.0)


def batch(settings: Augment, ids: list[int], rows=ROWS) -> dict[str, torch.Tensor]:
    change = augmentation(settings, rows)
    return COLLATE([change(rows[i], np.random.default_rng(i)) for i in ids])


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
def test_labels_say_what_is_shown(way):
    """Images are of one colour each, ten times their label."""
    found = batch(Augment(**PLAIN, **{way: 1.0}), list(range(9)))
    shown = found["pixel_values"].mean((1, 2, 3))
    told = 10 * (found["share"] * found["labels"] + (1 - found["share"]) * found["other_labels"])
    torch.testing.assert_close(shown, told, atol=1e-3, rtol=1e-4)
    assert (found["labels"] == torch.arange(9)).all() and found["other_labels"].unique().numel() > 3
    assert found["share"].min() < 0.5 < found["share"].max()
    colours = [image.unique().numel() for image in found["pixel_values"]]
    assert max(colours) == (1 if way == "mixup" else 2)


def test_a_sample_does_not_depend_on_the_others():
    settings = Augment(mixup=0.3, cutmix=1.0, operations=2, flip=0.5)
    pixels = RANDOM.integers(0, 256, (9, 3, 16, 16), np.uint8)
    rows = [{"pixels": pixels[i], "labels": i} for i in range(9)]
    whole = batch(settings, list(range(9)), rows)
    for ids in ([3], [8, 3, 0]):
        part = batch(settings, ids, rows)
        for name, tensor in part.items():
            torch.testing.assert_close(tensor, whole[name][ids])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_keep_what_an_image_is(name, channels, monkeypatch):
    pixels = RANDOM.integers(0, 256, (channels, 12, 16), np.uint8)
    monkeypatch.setattr("app.data.images.operations.OPERATIONS", {name: OPERATIONS[name]})
    row = Operations(Augment(operations=1, magnitude=MOST), Draw(Augment(**PLAIN)))({"pixels": pixels}, RANDOM)
    assert row["pixels"].shape == pixels.shape and row["pixels"].dtype == np.uint8
    unchanged = name == "identity" or (name == "color" and channels == 1)
    assert np.array_equal(row["pixels"], pixels) == unchanged or name in ("autocontrast", "equalize")


def test_nothing_is_mixed_by_default():
    assert type(augmentation(Augment(), ROWS)) is Draw
    assert batch(Augment(), [1]).keys() == {"pixel_values", "labels"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mixup": -0.1}, "--augment.mixup -0.1"),
        ({"cutmix": float("nan")}, "--augment.cutmix nan"),
        ({"operations": -1}, "--augment.operations -1"),
        ({"operations": 1, "magnitude": 31.0}, "--augment.magnitude 31: must be from 0 to 30"),
    ],
)
def test_settings_out_of_range(fields, said):
    with pytest.raises(UserError, match=said):
        augmentation(Augment(**fields), ROWS)
