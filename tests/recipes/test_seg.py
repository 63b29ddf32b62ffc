"""recipes/seg.py: losses, scores, windows over images of several sizes, and models that others load.

Also laws 3 and 5 where voxels are ignored: the same bits in exact mode on any layout.
"""

import itertools
import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from PIL import Image
from safetensors.torch import load_file
from support.evaluating import as_it_is
from support.launching import ROOT, furthest_loss, saved_state, scores, steps, train_many
from torchmetrics.classification import MulticlassJaccardIndex

from app import UserError
from app.__main__ import main as app
from app.data.rows import IGNORED
from app.data.volumes.grains import grains
from app.data.volumes.mask_files import write_mask
from app.data.volumes.pairs import read_mask
from app.tasks.from_scratch import UNetScratch, check_unet
from app.tasks.segmentation.losses import channels_of, classes_of, dice_loss, one_hot
from app.tasks.segmentation.networks import check_patches, checked_card
from app.tasks.segmentation.panels import colours, panel
from app.tasks.segmentation.windows import passes, sliding_window
from app.training.scores.segmentation import Overlap

RECIPE = ROOT / "recipes" / "seg.py"
# Of 4 to 16 windows: on two ranks the turns of the evaluation are never alike.
SIDES = [(16, 16), (60, 70), (33, 18), (9, 40), (40, 40)]
COLOURS = np.array([(0, 0, 0), (64, 128, 64), (192, 0, 128), (9, 9, 9)], np.uint8)
VOID = 3  # the class that is ignored
LOSSES = ("ce-dice", "bce-dice")
STEPS = 4


def draw(*shape, classes=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator), torch.randint(
        classes, (shape[0], 1, *shape[2:]), generator=generator
    )


@pytest.mark.parametrize("kind", ["ce-dice", "bce-dice"])
@pytest.mark.parametrize("classes", [2, 3])
def test_loss_does_not_depend_on_how_a_batch_is_cut(kind, classes):
    channels = channels_of(kind, classes)
    logits, truth = draw(5, channels, 6, 7, classes=classes)
    truth[0] = 0  # an image without the other classes
    loss_of = dice_loss(kind, channels)
    each = torch.stack([loss_of(logits[i : i + 1], truth[i : i + 1]) for i in range(5)])
    assert torch.allclose(loss_of(logits, truth), each.mean(), rtol=1e-6)
    cut = (3 * loss_of(logits[:3], truth[:3]) + 2 * loss_of(logits[3:], truth[3:])) / 5
    assert torch.allclose(loss_of(logits, truth), cut, rtol=1e-6)
    # A control: Dice of all voxels in a batch together does depend on it.
    pooled = DiceLoss(softmax=channels > 1, sigmoid=channels == 1, batch=True)
    target = one_hot(truth, channels)
    halves = (3 * pooled(logits[:3], target[:3]) + 2 * pooled(logits[3:], target[3:])) / 5
    assert not torch.allclose(pooled(logits, target), halves, rtol=1e-4)


def test_losses_are_those_they_are_named_after():
    logits, truth = draw(2, 3, 5, 5, classes=3)
    shares = logits.softmax(1)
    entropy = -shares.gather(1, truth).log().mean()
    target = one_hot(truth, 3)
    dice = 1 - (2 * (shares * target).sum((2, 3)) / (shares + target).sum((2, 3))).mean()
    assert torch.allclose(dice_loss("ce-dice", 3)(logits, truth), entropy + dice, rtol=1e-4)
    logits = logits[:, :1]
    truth = truth.clamp(max=1)
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, truth.float())
    shares = logits.sigmoid()
    dice = 1 - (2 * (shares * truth).sum((2, 3)) / (shares + truth).sum((2, 3))).mean()
    assert torch.allclose(dice_loss("bce-dice", 1)(logits, truth), entropy + dice, rtol=1e-4)
    assert torch.equal(classes_of(logits), (shares > 0.5).long())


@pytest.mark.parametrize("kind", ["ce-dice", "bce-dice"])
@pytest.mark.parametrize("classes", [2, 3])
def test_ignored_voxels_count_nowhere_in_the_loss(kind, classes):
    """The loss and its gradient are those of the images without them; one without any other has the loss 0."""
    channels = channels_of(kind, classes)
    logits, truth = draw(4, channels, 6, 8, classes=classes)
    loss_of, plain = dice_loss(kind, channels, ignores=True), dice_loss(kind, channels)
    assert torch.allclose(loss_of(logits, truth), plain(logits, truth), rtol=1e-6)
    widths = [8, 5, 1, 0]
    for image, width in enumerate(widths):
        truth[image, ..., width:] = IGNORED
    logits.requires_grad_()
    loss = loss_of(logits, truth)
    loss.backward()
    cropped = [(logits[i : i + 1, ..., :w], truth[i : i + 1, ..., :w]) for i, w in enumerate(widths) if w]
    expected = sum(plain(*pair) for pair in cropped) / len(widths)
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert torch.allclose(logits.grad, torch.autograd.grad(expected, logits)[0], rtol=1e-4, atol=1e-9)
    assert all(not logits.grad[i, ..., w:].any() for i, w in enumerate(widths))
    cut = (3 * loss_of(logits[:3], truth[:3]) + loss_of(logits[3:], truth[3:])) / 4
    assert torch.allclose(loss, cut, rtol=1e-6)
    assert loss_of(logits[3:], truth[3:]) == 0


def test_ignored_voxels_count_nowhere_in_scores_and_pictures():
    generator = torch.Generator().manual_seed(0)
    predicted, truth = (torch.randint(3, (2, 1, 6, 8), generator=generator) for _ in range(2))
    truth[..., 5:] = IGNORED
    found, cropped = Overlap(["a", "b", "c"], ignores=True), Overlap(["a", "b", "c"])
    found.update(predicted, truth)
    cropped.update(predicted[..., :5], truth[..., :5])
    assert found.alone() == cropped.alone()
    palette = np.array([(128, 128, 128), (9, 8, 7), (0, 0, 0)], np.uint8)
    shown = panel(torch.rand(1, 6, 8), truth[0], predicted[0], 3, palette)
    masks = [shown[:, start : start + 8] for start in (12, 24)]
    for mask, labels in zip(masks, (truth, predicted), strict=True):
        assert np.array_equal(mask[:, :5], palette[labels[0, 0, :, :5].numpy()])
        assert (mask[:, 5:] == mask[0, 5]).all() and not (palette == mask[0, 5]).all(1).any()


def test_scores_are_those_of_monai_and_torchmetrics():
    generator = torch.Generator().manual_seed(0)
    own, peers = (
        Overlap(["a", "b", "c"]),
        (DiceMetric(include_background=True, num_classes=3), MulticlassJaccardIndex(3)),
    )
    batches = []
    for sides in [(5, 5), (8, 3), (4, 4)]:
        truth, predicted = (torch.randint(3, (2, 1, *sides), generator=generator) for _ in range(2))
        truth[0][truth[0] == 2] = 0  # the mean over images leaves out those without the class
        batches.append((predicted, truth))
        own.update(predicted, truth)
        peers[0](predicted, truth)
        peers[1].update(predicted, truth)
    found = own.alone()
    each = [found[f"dice_{name}"] for name in "abc"]
    assert np.allclose(each, np.nanmean(peers[0].get_buffer().numpy(), axis=0), atol=1e-6)
    assert found["dice"] == pytest.approx(np.mean(each))
    assert found["iou"] == pytest.approx(float(peers[1].compute()), abs=1e-6)
    again = Overlap(["a", "b", "c"])
    for predicted, truth in reversed(batches):
        for i in (1, 0):
            again.update(predicted[i : i + 1], truth[i : i + 1])
    assert again.alone() == found
    nothing = Overlap(["a", "b"])
    nothing.update(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))
    assert nothing.alone() == {"dice": 1.0, "iou": 1.0, "dice_a": 1.0, "iou_a": 1.0}


def test_passes_are_counted_as_monai_makes_them():
    for sides, window, overlap, at_once, count in itertools.product(
        [(5, 9), (16, 16), (17, 33), (40, 8)], [(8, 8), (16, 4)], [0.0, 0.25, 0.5, 0.9], [1, 3], [1, 2]
    ):
        made = []
        predict = lambda x: made.append(len(x)) or x.clone()  # noqa: B023, E731 - MONAI weighs in place
        images = torch.rand(count, 1, *sides)
        found = sliding_window_inference(images, window, at_once, predict, overlap, mode="gaussian")
        assert passes(count, sides, window, at_once, overlap) == len(made), (sides, window, overlap)
        assert torch.allclose(found, images, atol=1e-5)
        assert torch.equal(sliding_window(torch.clone, images, window, at_once, overlap), found)


def test_a_volume_is_shown_by_its_middle_slice():
    image, mask = torch.zeros(1, 5, 20, 30), torch.zeros(1, 5, 20, 30, dtype=torch.int64)
    mask[:, 2, :10] = 1
    shown = panel(image, mask, mask * 0, 2)
    assert shown.shape == (20, 98, 3) and shown.dtype == np.uint8
    assert (shown[:10, 34:64] == 255).all() and (shown[10:, 34:64] == 0).all() and (shown[:, 68:] == 0).all()
    assert len({tuple(colour) for colour in colours(6)}) == 6


@pytest.mark.parametrize(
    ("says", "shape", "patch"),
    [
        ("multiple of 4", UNetScratch(), (66, 64)),
        ("--scratch.units -1", UNetScratch(units=-1), (64, 64)),
        ("single voxel", UNetScratch(), (4, 4)),
        ("two or more levels", UNetScratch(channels=(4,)), (64, 64)),
        ("--scratch.dropout 1", UNetScratch(dropout=1), (64, 64)),
    ],
)
def test_shapes_that_no_unet_has(says, shape, patch):
    with pytest.raises(UserError, match=says):
        check_unet(shape, patch)


def test_a_pretrained_model_that_does_not_take_the_patches_is_refused(tmp_path):
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    shape = {"hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "depths": [1] * 4}
    model = SegformerForSemanticSegmentation(SegformerConfig(**shape, decoder_hidden_size=8)).train()
    check_patches(model, "some/model", 3, (32, 32))
    assert model.training
    with pytest.raises(UserError, match=r"--model some/model with --data.patch 4 4: .* images of 3 x 4 x 4"):
        check_patches(model, "some/model", 3, (4, 4))


def write_ignored(root):
    """Write images whose ignored parts are of all sizes, from nothing to the whole image."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 7), ("val", 5)):
        for index in range(count):
            mask = np.kron(generator.integers(0, 3, (10, 10)), np.ones((4, 4), int))
            mask[:, : 8 * index] = VOID
            for folder, array in ((split, 60 * mask + generator.integers(0, 60, mask.shape)), (f"{split}annot", mask)):
                (root / folder).mkdir(parents=True, exist_ok=True)
                picture = COLOURS[mask] if folder.endswith("annot") else array.astype(np.uint8)
                Image.fromarray(picture).save(root / folder / f"{index}.png")
    lines = [" ".join(map(str, colour)) + f" class {number}\n" for number, colour in enumerate(COLOURS)]
    (root / "classes.txt").write_text("".join(lines))


def ignoring(root, profile):
    """Return the commands that train with each loss while voxels are ignored; on one process also while none is."""
    data = root / "ignored"
    common = ["--data.path", data, "--data.classes", data / "classes.txt", "--data.patch", 16]
    common += ["--run.global-batch", 10, "--run.micro-batch", 4, "--run.exact", "true", "--scratch.channels", 4, 8]
    common += ["--run.steps", STEPS, "--run.eval-every", 2, "--run.log-every", 1, "--run.trackers"]
    ignore = ["--data.ignore", VOID]
    commands = [[*common, *ignore, "--loss", loss, "--run.dir", root / profile / loss] for loss in LOSSES]
    return [*commands, *([[*common, "--run.dir", root / profile / "nothing"]] if profile == "cpu" else [])]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data_cache):
    """Give the folder of runs on one process and on FSDP2 x2, over images of several sizes; and the data.

    And of runs that ignore voxels.
    """
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    root, generator = tmp_path_factory.mktemp("seg"), np.random.default_rng(0)
    for split, index in itertools.product(("train", "val"), range(len(SIDES))):
        mask = np.kron(generator.integers(0, 2, (18, 18)), np.ones((4, 4)))[: SIDES[index][0], : SIDES[index][1]]
        for kind, array in (("image", mask * 90 + generator.integers(0, 60, mask.shape)), ("label", mask * 255)):
            file = root / "data" / split / kind / f"{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array.astype(np.uint8)).save(file)
    shape = {"hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "depths": [1] * 4, "sr_ratios": [1] * 4}
    tiny = SegformerConfig(**shape, decoder_hidden_size=8)
    SegformerForSemanticSegmentation(tiny).save_pretrained(root / "segformer")
    write_ignored(root / "ignored")
    common = ["--data.path", root / "data", "--data.patch", 16, "--run.global-batch", 6, "--run.micro-batch", 2]
    common += ["--run.steps", STEPS, "--run.eval-every", 2, "--run.log-every", 1, "--run.trackers"]
    small = ["--scratch.channels", 8, 16, "--run.exact", "true", "--scratch.norm", "group", "--loss", "bce-dice"]
    volume = ["--data.path", "builtin:grains", "--data.dims", 3, "--data.patch", 8, 16, 16, "--data.overlap", 0]
    for profile, processes in (("cpu", 1), ("fsdp_cpu", 2)):
        commands = [[*common, *small, "--run.dir", root / profile / "sizes"]]
        commands.append([*common, "--model", root / "segformer", "--run.dir", root / profile / "segformer"])
        if profile == "cpu":
            commands.append([*common, *small, *volume, "--run.steps", 1, "--run.dir", root / profile / "volume"])
        train_many(profile, processes, RECIPE, [*commands, *ignoring(root, profile)], root, timeout=400)
    return root


@pytest.fixture(scope="module")
def under_ddp(trained):
    """Give the same folder, with runs that ignore voxels under DDP x2 too."""
    train_many("ddp_cpu", 2, RECIPE, ignoring(trained, "ddp_cpu"), trained, timeout=400)
    return trained


def check_ignored(root, profile, loss):
    reference, other = root / "cpu" / loss, root / profile / loss
    assert steps(other) == steps(reference) and len(steps(reference)) == STEPS
    assert scores(other) == scores(reference)
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)


@pytest.mark.parametrize("loss", LOSSES)
def test_ignored_voxels_weigh_the_same_under_fsdp(trained, loss):
    check_ignored(trained, "fsdp_cpu", loss)


@pytest.mark.exhaustive  # it gets the weights of micro-batches that FSDP2 gets; what it makes of them others test
@pytest.mark.parametrize("loss", LOSSES)
def test_ignored_voxels_weigh_the_same_under_ddp(under_ddp, loss):
    check_ignored(under_ddp, "ddp_cpu", loss)


def test_what_is_ignored_changes_the_run(trained):
    """A control: without --data.ignore the losses are others, and the fourth class has a score."""
    ignored, counted = (trained / "cpu" / name for name in ("ce-dice", "nothing"))
    assert furthest_loss(steps(ignored), steps(counted)) > 1e-3
    assert "eval/dice_class 3" in scores(counted)[-1] and "eval/dice_class 3" not in scores(ignored)[-1]
    assert scores(ignored)[-1]["eval/samples"] == 5


def test_images_of_several_sizes_on_fsdp(trained):
    """Ranks have another number of windows in every turn; none waits for the other, and the scores are the same."""
    one, two = (trained / profile / "sizes" for profile in ("cpu", "fsdp_cpu"))
    assert steps(one) == steps(two) and len(steps(one)) == 4
    assert scores(one) == scores(two) and scores(one)[-1]["eval/samples"] == len(SIDES)
    assert scores(one)[-1].keys() >= {"eval/dice", "eval/iou", "eval/dice_0", "eval/dice_255", "eval/loss"}


def test_the_network_is_built_again_in_three_lines(trained):
    folder = trained / "fsdp_cpu" / "sizes" / "model"
    card = json.loads((folder / "network.json").read_text())
    network = UNet(**card["arguments"])
    network.load_state_dict(load_file(folder / "model.safetensors"))
    assert network(torch.zeros(1, 1, *card["window"])).shape == (1, 1, 16, 16)
    assert card["classes"] == ["0", "255"]
    volume = json.loads((trained / "cpu" / "volume" / "model" / "network.json").read_text())
    assert volume["arguments"]["spatial_dims"] == 3 and volume["window"] == [8, 16, 16]


def test_predictions_are_shown_beside_the_truth(trained):
    shown = sorted((trained / "cpu" / "sizes" / "images" / "eval").rglob("*.png"))
    assert [str(file.relative_to(file.parents[1])) for file in shown][:2] == [
        "0/step-00000002.png",
        "0/step-00000004.png",
    ]
    truth = np.asarray(Image.open(trained / "data" / "val" / "label" / "0.png"))
    assert np.array_equal(np.asarray(Image.open(shown[0]))[:, 20:36, 0], truth)
    assert len(list((trained / "cpu" / "volume" / "images" / "eval").rglob("*.png"))) == 2


def test_a_model_of_transformers_goes_through(trained):
    from transformers import AutoModelForSemanticSegmentation

    model = AutoModelForSemanticSegmentation.from_pretrained(trained / "fsdp_cpu" / "segformer" / "model")
    assert model.config.id2label == {0: "0", 1: "255"}
    assert scores(trained / "fsdp_cpu" / "segformer")[-1]["eval/samples"] == len(SIDES)


@pytest.mark.parametrize("name", ["sizes", "segformer"])
def test_masks_are_those_that_the_run_has_scored(trained, tmp_path, name):
    """Read as an evaluation reads masks, they have the scores of the run; and its model scores as the run does."""
    run = trained / "cpu" / name
    words = [
        "predict",
        run,
        trained / "data" / "val" / "image",
        "--to",
        tmp_path / "out",
        *("--probabilities", "--overlay", "--batch", 2),  # as the run, because sums in other batches round otherwise
    ]
    assert app(list(map(str, words))) == 0
    overlap = Overlap(["0", "255"])
    for index, sides in enumerate(SIDES):
        mask, truth = (read_mask(folder / f"{index}.png") for folder in (tmp_path / "out", trained / "data/val/label"))
        shares = np.load(tmp_path / "out" / "probabilities" / f"{index}.npy")
        assert mask.shape == sides and shares.shape == (2, *sides) and np.allclose(shares.sum(0), 1, atol=1e-5)
        untied = shares[0] != shares[1]  # where logits differ in their last bit, probabilities may be equal
        assert np.array_equal(mask[untied], shares.argmax(0)[untied] * 255)
        assert np.asarray(Image.open(tmp_path / "out" / "overlays" / f"{index}.png")).shape == (*sides, 3)
        overlap.update(*(torch.from_numpy((each == 255).astype(np.int64))[None] for each in (mask, truth)))
    last = scores(run)[-1]
    assert overlap.alone() == {key: last[f"eval/{key}"] for key in overlap.alone()}
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_file()) == [
        f"{i}.png" for i in range(5)
    ]
    again = shutil.copytree(run / "model", tmp_path / "alone")
    exact = ["--run.micro-batch", 2, *(["--run.exact", "true"] if name == "sizes" else [])]
    found = as_it_is(again, trained / "data", "--data.eval-sets", f"hard={trained / 'data'}", *exact)["scores"]
    for score in ("dice", "iou", "loss", "samples"):
        assert found[f"eval/{score}"] == found[f"eval-hard/{score}"] == pytest.approx(last[f"eval/{score}"], rel=1e-6)


def test_a_picture_that_does_not_fit_says_how_far_it_came(trained, tmp_path):
    """The masks before it stay, and the same command goes on with --overwrite."""
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for name, shape in (("a", (40, 40)), ("b", (40, 40, 3))):
        Image.fromarray(np.zeros(shape, np.uint8)).save(folder / f"{name}.png")
    words = ["predict", str(trained / "cpu" / "sizes"), str(folder), "--to", str(out)]
    with pytest.raises(UserError, match=r"3 channels, .*; 1 of 2 images have their masks: repeat with --overwrite"):
        app(words)
    (folder / "b.png").unlink()
    assert app([*words, "--overwrite"]) == 0 and [path.name for path in out.iterdir()] == ["a.png"]
    with pytest.raises(UserError, match="masks are written into a folder"):
        app([*words[:-1], "masks.csv"])


def test_volumes_have_masks_of_their_own_kind(trained, tmp_path):
    """A NIfTI file that is turned has the mask of the TIFF file with the same voxels, turned in the same way."""
    image = grains(3)[0][1][:20, :24, :28]
    folder = tmp_path / "in"
    folder.mkdir()
    pages = [Image.fromarray(page) for page in image]
    pages[0].save(folder / "pages.tif", save_all=True, append_images=pages[1:])
    turned = nibabel.Nifti1Image(np.flip(image, 1).transpose(2, 0, 1), np.array(TURNED, float))
    turned.set_qform(turned.affine, code=1)
    turned.header.set_xyzt_units("mm")
    nibabel.save(turned, folder / "turned.nii.gz")
    assert app(["predict", str(trained / "cpu" / "volume"), str(folder), "--to", str(tmp_path / "out")]) == 0
    first, second = read_mask(tmp_path / "out" / "pages.tif"), nibabel.load(tmp_path / "out" / "turned.nii.gz")
    assert first.shape == image.shape and 0 < first.mean() < 1
    assert np.array_equal(second.affine, turned.affine) and second.shape == turned.shape
    kept = ("qform_code", "sform_code", "xyzt_units")
    assert [int(second.header[name]) for name in kept] == [int(turned.header[name]) for name in kept] == [1, 2, 2]
    assert np.allclose(second.get_qform(), turned.affine)
    assert np.array_equal(read_mask(tmp_path / "out" / "turned.nii.gz"), first)
    assert np.array_equal(np.asarray(second.dataobj), np.flip(first, 1).transpose(2, 0, 1))


TURNED = [[0, 2.0, 0, 1], [0, 0, -1.5, 7], [1.0, 0, 0, 0], [0, 0, 0, 1]]  # of axes z, x and y backwards


def test_coloured_masks_and_large_values(tmp_path):
    mask, colours = np.array([[0, 2], [5, 0]]), {0: [1, 2, 3], 2: [0, 0, 9], 5: [7, 7, 7]}
    write_mask(tmp_path / "a.png", mask, Path("a.jpg"), colours)
    assert np.asarray(Image.open(tmp_path / "a.png")).tolist() == [[[1, 2, 3], [0, 0, 9]], [[7, 7, 7], [1, 2, 3]]]
    write_mask(tmp_path / "b.png", mask * 100, Path("b.png"))
    assert np.array_equal(read_mask(tmp_path / "b.png"), mask * 100)
    with pytest.raises(UserError, match=r"c.png: the value -1 does not fit"):
        write_mask(tmp_path / "c.png", mask - 1, Path("c.png"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "val"], "has the images themselves"),
        (["--to", "full"], "full is not empty: .* --overwrite"),
        (["--keep", "label"], "--keep is for .*, and .* is for segmentation: leave it out"),
    ],
)
def test_masks_that_are_not_written(trained, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "0.png").write_text("precious")
    (tmp_path / "val").symlink_to(trained / "data" / "val" / "image")
    call = ["predict", str(trained / "cpu" / "sizes"), "val", *words]
    with pytest.raises(UserError, match=said):
        app(call)
    assert (tmp_path / "full" / "0.png").read_text() == "precious"


def test_a_card_of_an_earlier_version_is_refused(tmp_path):
    (tmp_path / "network.json").write_text('{"window": [16, 16], "classes": ["a", "b"], "arguments": {}}')
    with pytest.raises(UserError, match=r"of an earlier version: add the masks' values"):
        checked_card(str(tmp_path))
