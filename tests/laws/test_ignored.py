"""Laws 3 and 5 of recipes/seg.py where voxels are ignored: the same bits in exact mode on any layout."""

import numpy as np
import pytest
from PIL import Image
from support.launching import ROOT, furthest_loss, saved_state, scores, steps, train_many

RECIPE = ROOT / "recipes" / "seg.py"
LAYOUTS = {"one": ("cpu", 1), "ddp2": ("ddp_cpu", 2), "fsdp2": ("fsdp_cpu", 2)}
STEPS = 4
COLOURS = np.array([(0, 0, 0), (64, 128, 64), (192, 0, 128), (9, 9, 9)], np.uint8)
VOID = 3


def write(root):
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
    return root


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data_cache):
    """Give the folder of runs with each loss on each layout, and of one run that ignores nothing."""
    root = tmp_path_factory.mktemp("ignored")
    data = write(root / "data")
    common = ["--data.path", data, "--data.classes", data / "classes.txt", "--data.patch", 16]
    common += ["--run.global-batch", 10, "--run.micro-batch", 4, "--run.exact", "true", "--scratch.channels", 4, 8]
    common += ["--run.steps", STEPS, "--run.eval-every", 2, "--run.log-every", 1, "--run.trackers"]
    for layout, (profile, processes) in LAYOUTS.items():
        commands = [
            [*common, "--loss", loss, "--data.ignore", VOID, "--run.dir", root / layout / loss]
            for loss in ("ce-dice", "bce-dice")
        ]
        if layout == "one":
            commands.append([*common, "--run.dir", root / layout / "nothing"])
        train_many(profile, processes, RECIPE, commands, root, timeout=400)
    return root


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
@pytest.mark.parametrize("loss", ["ce-dice", "bce-dice"])
def test_ignored_voxels_weigh_the_same_on_every_layout(runs, loss, layout):
    reference, other = runs / "one" / loss, runs / layout / loss
    assert steps(other) == steps(reference) and len(steps(reference)) == STEPS
    assert scores(other) == scores(reference)
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)


def test_what_is_ignored_changes_the_run(runs):
    """A control: without --data.ignore the losses are others, and the fourth class has a score."""
    ignored, counted = (runs / "one" / name for name in ("ce-dice", "nothing"))
    assert furthest_loss(steps(ignored), steps(counted)) > 1e-3
    assert "eval/dice_class 3" in scores(counted)[-1] and "eval/dice_class 3" not in scores(ignored)[-1]
    assert scores(ignored)[-1]["eval/samples"] == 5
