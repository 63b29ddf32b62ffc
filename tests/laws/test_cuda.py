"""The laws on GPUs, for every recipe: twice the same, on to a CPU and back, fp16, SyncBN; several GPUs where there are.

Without a GPU they are skipped; CUDA_PARTS_ON_CPU=1 runs them on a CPU all the same, to see that they run.
"""

import importlib.util
import json
import os

import pytest
import torch
import yaml

from app import rounding
from app.checkpoint import STATE
from app.grid import GRID
from launching import PROFILES, ROOT, furthest_loss, launch_all, saved_state, scores, steps
from laws.small import SMALL

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(not GPUS and "CUDA_PARTS_ON_CPU" not in os.environ, reason="needs a GPU")
NEEDS = {"seg": "monai"}
RECIPES = [name for name in SMALL if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]
STEPS, STOP = 6, 3
COMMON = ["--run.global-batch", 8, "--run.micro-batch", 4, "--run.log-every", 1, "--run.trackers"]
COMMON += ["--run.eval-every", STOP, "--run.save-every", STOP, "--run.steps", STEPS]
HALF = ["--run.stop-at", STOP]
# Kernels of two devices, or of two layouts, add in another order.
ACROSS, ALIKE = 1e-4, 1e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory, rows):
    """Train every recipe on a GPU, on a CPU, and from each on to the other; return the folder of all runs."""
    root = tmp_path_factory.mktemp("cuda")

    def profile(name: str, precision: str):
        settings = yaml.safe_load((PROFILES / f"{name}.yaml").read_text()) | {"mixed_precision": precision}
        file = root / f"{name}-{precision}.yaml"
        file.write_text(yaml.safe_dump(settings))
        return file

    def launch(name, precision, processes, commands, only=tuple(RECIPES), still=False):
        """Still: without dropout, whose random numbers are others on another kind of device."""
        words = []
        for recipe in only:
            for run, *more in commands:
                dropout = ["--scratch.dropout", 0] if still and recipe in ("cls", "lm") else []
                flags = [*SMALL[recipe].flags(rows), *COMMON, *dropout, *more, "--run.dir", root / recipe / run]
                words.append((ROOT / f"recipes/{recipe}.py", flags, None))
        launch_all(profile(name, precision), processes, words, root, timeout=600, env={"NVIDIA_TF32_OVERRIDE": "0"})

    gpu, exact = "gpu" if GPUS else "cpu", ("--run.exact", "true")
    launch(gpu, "no", 1, [("whole",), ("again",), ("stopped", *HALF), ("stopped",)])
    # Of its own: CUDA's libraries choose their kernels once.
    launch(gpu, "no", 1, [("exact", *exact), ("exact again", *exact)])
    launch(gpu, "no", 1, [("plain",), ("to cpu", *HALF)], still=True)
    launch("cpu", "no", 1, [("on cpu",), ("to cpu",), ("to gpu", *HALF)], still=True)
    launch(gpu, "no", 1, [("to gpu",)], still=True)
    launch(gpu, "fp16" if GPUS else "bf16", 1, [("half",), ("half stopped", *HALF), ("half stopped",)], ("cls", "img"))
    if GPUS:
        launch(gpu, "no", 1, [("sync-bn", "--scratch.norm", "batch", "--run.sync-bn", "true")], ("img",))
    if GPUS > 1:
        for name in ("ddp", "fsdp"):
            launch(name, "no", 2, [(name,)])
    return root


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_run_twice(runs, recipe):
    """Bit by bit where exact; else to rounding, for some of CUDA's kernels add in any order."""
    assert furthest_loss(steps(runs / recipe / "whole"), steps(runs / recipe / "again")) <= ALIKE
    assert steps(runs / recipe / "exact") == steps(runs / recipe / "exact again")
    assert saved_state(runs / recipe / "exact", STEPS) == saved_state(runs / recipe / "exact again", STEPS)


@pytest.mark.skipif(not GPUS, reason="compiles kernels for a GPU")
def test_kernels_that_round_have_the_bits_of_torch():
    """Compiled for this very GPU: halves, zeros with a sign, what is not a number, and many numbers of all sizes."""
    kernels = pytest.importorskip("app.kernels", reason="Triton is not installed")
    device = torch.device("cuda", 0)
    assert rounding.agrees(kernels, device) and rounding.how(device) == "triton"
    values = torch.randn(3_000_001, device=device) * torch.randint(-60, 20, (3_000_001,), device=device).exp2()
    points = torch.full((), 2.0**GRID, device=device)
    on_cpu, sums = torch.zeros(len(values), dtype=torch.float64), torch.zeros_like(values, dtype=torch.float64)
    for turn in range(3):
        rounding.add(values.cpu() * turn, on_cpu, 2.0**GRID, fresh=turn == 0)
        kernels.add(values * turn, sums, points, fresh=turn == 0)
    assert torch.equal(sums.cpu(), on_cpu)
    assert torch.equal(kernels.nearest(values, points).cpu(), rounding.nearest(values.cpu(), 2.0**GRID))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("run", ["stopped", "to cpu", "to gpu", "on cpu"])
def test_wherever_it_goes_on_it_is_the_same_run(runs, recipe, run):
    """Same samples in every step, same losses, and every sample scored once."""
    reference = "whole" if run == "stopped" else "plain"
    whole, other = steps(runs / recipe / reference), steps(runs / recipe / run)
    assert [line["ids"] for line in other] == [line["ids"] for line in whole]
    if run == "stopped" or recipe != "gan":  # whose noise is drawn on the device
        assert furthest_loss(whole, other) <= (ALIKE if run == "stopped" else ACROSS)
    counts = [[line.get("eval/samples") for line in scores(runs / recipe / name)] for name in (reference, run)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("recipe", [name for name in ("cls", "img") if name in RECIPES])
def test_half_precision_goes_on_with_its_scale(runs, recipe):
    whole, stopped = steps(runs / recipe / "half"), steps(runs / recipe / "half stopped")
    assert furthest_loss(whole, stopped) <= ALIKE
    objects = json.loads(
        (runs / recipe / "half" / "checkpoints" / f"step-{STEPS:08d}" / STATE / "objects.json").read_text()
    )
    assert bool(GPUS) == bool(objects.get("scaler"))


@pytest.mark.skipif(not GPUS, reason="SyncBatchNorm needs a GPU")
def test_a_model_with_synchronised_batch_norm_trains(runs):
    assert len(steps(runs / "img" / "sync-bn")) == STEPS


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_gpus_train_what_one_does(runs, recipe, layout):
    whole, other = steps(runs / recipe / "whole"), steps(runs / recipe / layout)
    assert [line["ids"] for line in other] == [line["ids"] for line in whole]
    assert furthest_loss(whole, other) <= ALIKE
