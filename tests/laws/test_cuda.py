"""The laws on a GPU, for every recipe: repeated, stopped, moved to a CPU and back; fp16 with its loss scale, SyncBN.

With two GPUs, a run on both must agree with a run on one; `test_sharing.py` has several processes on one GPU. The first
test of a recipe starts its three or four launches: `-k cls` tests one recipe alone.
"""

import functools
import json

import pytest
import torch
from support.launching import ROOT, saved_state, scores, steps

from app.distributed.state.attempt import STATE
from app.training.exact import rounding as grid_rounding
from app.training.exact.grid import GRID
from laws.gpus import GPUS, apart, launch, profile, recipes, wants_gpu
from laws.small import SMALL

pytestmark = wants_gpu
STEPS, STOP = 6, 3
COMMON = ["--run.global-batch", 8, "--run.micro-batch", 4, "--run.log-every", 1, "--run.trackers"]
COMMON += ["--run.eval-every", STOP, "--run.save-every", STOP, "--run.steps", STEPS]
HALF = ["--run.stop-at", STOP]
EXACT = ["--run.exact", "true"]
SYNC = ["--scratch.norm", "batch", "--run.sync-bn", "true"]
# Without dropout: its random numbers differ between kinds of devices.
STILL = {"cls": ["--scratch.dropout", 0], "lm": ["--scratch.dropout", 0]}
SCALED = ("cls", "img")  # recipes that also train in fp16
# Kernels of different devices or layouts sum in different orders.
ACROSS, ALIKE = 1e-4, 1e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory, rows):
    """Return a function from a recipe to the folder of its runs, which the first call makes."""
    root = tmp_path_factory.mktemp("cuda")

    def train(recipe, name, precision, commands, processes=1):
        flags = [*SMALL[recipe].flags(rows), *COMMON]
        file = ROOT / f"recipes/{recipe}.py"
        words = [(file, [*flags, *more, "--run.dir", root / recipe / run], None) for run, *more in commands]
        launch(profile(root, name, precision), processes, words, root, timeout=300)

    @functools.cache
    def runs(recipe):
        gpu, still = "gpu" if GPUS else "cpu", STILL.get(recipe, [])
        first = [("whole",), ("again",), ("stopped", *HALF), ("stopped",), ("plain", *still), ("to cpu", *still, *HALF)]
        if GPUS and recipe == "img":
            first.append(("sync-bn", *SYNC))
        train(recipe, gpu, "no", first)
        train(recipe, "cpu", "no", [("on cpu", *still), ("to cpu", *still), ("to gpu", *still, *HALF)])
        # In a separate process, with exact runs first: CUDA's libraries choose their kernels once in a process.
        exact = [
            ("exact", *EXACT),
            ("exact again", *EXACT),
            ("exact stopped", *EXACT, *HALF),
            ("exact stopped", *EXACT),
        ]
        train(recipe, gpu, "no", [*exact, ("to gpu", *still)])
        if recipe in SCALED:
            half = [("half",), ("half stopped", *HALF), ("half stopped",)]
            train(recipe, gpu, "fp16" if GPUS else "bf16", half)
        return root / recipe

    @functools.cache
    def on_two(recipe, layout):
        train(recipe, layout, "no", [(layout,)], processes=2)
        return root / recipe / layout

    runs.on_two = on_two
    return runs


@pytest.mark.parametrize("recipe", recipes())
def test_the_same_run_twice(runs, recipe):
    """Up to rounding: some CUDA kernels sum in any order."""
    whole, again = (steps(runs(recipe) / name) for name in ("whole", "again"))
    assert apart(whole, again, recipe=recipe, run="again") <= ALIKE


@pytest.mark.skipif(not GPUS, reason="needs a GPU: it compiles kernels for it")
def test_kernels_that_round_have_the_bits_of_torch():
    """Compiled for this GPU: halves, signed zeros, NaN, and many numbers of all sizes."""
    kernels = pytest.importorskip("app.training.exact.triton_kernels", reason="Triton is not installed")
    device = torch.device("cuda", 0)
    assert grid_rounding.agrees(kernels, device) and grid_rounding.how(device) == "triton"
    values = torch.randn(3_000_001, device=device) * torch.randint(-60, 20, (3_000_001,), device=device).exp2()
    points = torch.full((), 2.0**GRID, device=device)
    on_cpu, sums = torch.zeros(len(values), dtype=torch.float64), torch.zeros_like(values, dtype=torch.float64)
    for turn in range(3):
        grid_rounding.add(values.cpu() * turn, on_cpu, 2.0**GRID, fresh=turn == 0)
        kernels.add(values * turn, sums, points, fresh=turn == 0)
    assert torch.equal(sums.cpu(), on_cpu)
    assert torch.equal(kernels.nearest(values, points).cpu(), grid_rounding.nearest(values.cpu(), 2.0**GRID))


@pytest.mark.parametrize("recipe", recipes())
@pytest.mark.parametrize("run", ["exact again", "exact stopped"])
def test_exact_mode_gives_the_same_bits(runs, recipe, run):
    """In a second run, and in a stopped and resumed one: losses, scores, weights and the optimizers' state."""
    reference, other = runs(recipe) / "exact", runs(recipe) / run
    assert steps(other) == steps(reference)
    assert scores(other) == scores(reference)
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)


@pytest.mark.parametrize("recipe", recipes())
@pytest.mark.parametrize("run", ["stopped", "to cpu", "to gpu", "on cpu"])
def test_wherever_it_goes_on_it_is_the_same_run(runs, recipe, run):
    """Same samples in every step, same losses, and every sample scored once."""
    folder, reference = runs(recipe), "whole" if run == "stopped" else "plain"
    whole, other = steps(folder / reference), steps(folder / run)
    assert [line["ids"] for line in other] == [line["ids"] for line in whole]
    if run == "stopped" or recipe != "gan":  # gan draws its noise on the device
        assert apart(whole, other, recipe=recipe, run=run) <= (ALIKE if run == "stopped" else ACROSS)
    counts = [[line.get("eval/samples") for line in scores(folder / name)] for name in (reference, run)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("recipe", recipes())
def test_it_was_computed_where_it_says(runs, recipe):
    """A control: run.json names the device of the launch that ended the run."""
    on_gpu = {
        name: json.loads((runs(recipe) / name / "run.json").read_text())["layout"]["device"] != "cpu"
        for name in ("whole", "exact", "to gpu", "on cpu", "to cpu")
    }
    assert on_gpu == dict.fromkeys(("whole", "exact", "to gpu"), bool(GPUS)) | dict.fromkeys(
        ("on cpu", "to cpu"), False
    )


@pytest.mark.parametrize("recipe", recipes(*SCALED))
def test_half_precision_goes_on_with_its_scale(runs, recipe):
    whole, stopped = steps(runs(recipe) / "half"), steps(runs(recipe) / "half stopped")
    assert apart(whole, stopped, recipe=recipe, run="half stopped") <= ALIKE
    file = runs(recipe) / "half" / "checkpoints" / f"step-{STEPS:08d}" / STATE / "objects.json"
    assert bool(GPUS) == bool(json.loads(file.read_text()).get("scaler"))


@pytest.mark.skipif(not GPUS, reason="needs a GPU: SyncBatchNorm does")
@pytest.mark.parametrize("recipe", recipes("img"))
def test_a_model_with_synchronised_batch_norm_trains(runs, recipe):
    assert len(steps(runs(recipe) / "sync-bn")) == STEPS


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recipe", recipes())
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_gpus_train_what_one_does(runs, recipe, layout):
    whole, other = steps(runs(recipe) / "whole"), steps(runs.on_two(recipe, layout))
    assert [line["ids"] for line in other] == [line["ids"] for line in whole]
    assert apart(whole, other, recipe=recipe, layout=layout) <= ALIKE
