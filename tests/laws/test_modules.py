"""Laws 3 to 5 for torch's own modules and for what recipes do with them; one launch for each layout runs all cases."""

import functools
import json

import pytest
from support.launching import ROOT, furthest_loss, scores, steps, train_many, weights

from app.distributed.state.attempt import STATE

RECIPE = ROOT / "tests" / "laws" / "modules.py"
LAYOUTS = {
    "one": ("cpu", 1),
    "ddp2": ("ddp_cpu", 2),
    "ddp3": ("ddp_cpu", 3),
    "fsdp2": ("fsdp_cpu", 2),
    "fsdp3": ("fsdp_cpu", 3),
}
SHORT = ["--run.steps", 8, "--run.eval-every", 4]
FOUR_EPOCHS = ["--run.steps", 12, "--run.eval-every", 6]
EXACT = ["--run.exact", "true"]
CASES = {
    "attention": (["--case", "attention", *EXACT], ["ddp3", "fsdp2", "fsdp3"]),
    "loops": (["--case", "loops", *EXACT, *SHORT], ["ddp3", "fsdp2", "fsdp3"]),
    "loops-ordinary": (["--case", "loops", *SHORT], ["ddp3", "fsdp2", "fsdp3"]),
    "frozen": (["--case", "frozen", *EXACT, *SHORT], ["ddp3", "fsdp2", "fsdp3"]),
    "shared": (["--case", "shared", *EXACT, *SHORT], ["ddp3", "fsdp2", "fsdp3"]),
    # Four micro-batches: three ranks have six turns, two of them idle.
    "norm": (["--case", "norm", "--run.global-batch", 20, "--run.micro-batch", 5, *SHORT], ["ddp3", "fsdp2", "fsdp3"]),
    "unused": (["--case", "unused", "--find-unused", "true", *SHORT], ["ddp2", "ddp3"]),
    "unused-exact": (["--case", "unused", *EXACT, *SHORT], ["ddp2", "ddp3"]),
    "branches": (["--case", "branches", "--find-unused", "true", *SHORT], ["ddp3"]),
    "branches-exact": (["--case", "branches", *EXACT, *SHORT], ["ddp3"]),
    "skipped": (["--case", "skipped", *EXACT, "--run.nonfinite", "skip", *FOUR_EPOCHS], ["ddp3", "fsdp2", "fsdp3"]),
    "scaled": (["--case", "scaled", "--optim.name", "SGD", *EXACT, *FOUR_EPOCHS], ["ddp3", "fsdp2", "fsdp3"]),
}


def pairs(*cases):
    """Return the layouts of cases; FSDP2 on three ranks and DDP on two are for `make laws`."""
    more = {layout: [pytest.mark.exhaustive] for layout in ("ddp2", "fsdp3")}
    return [pytest.param(layout, case, marks=more.get(layout, [])) for case in cases for layout in CASES[case][1]]


@pytest.fixture(scope="session")
def modules(tmp_path_factory):
    """Return a function from a layout to the folder of its runs, which the first call makes."""
    root = tmp_path_factory.mktemp("modules")

    @functools.cache
    def modules(layout):
        commands = [
            [*flags, "--run.dir", root / layout / case]
            for case, (flags, others) in CASES.items()
            if layout in ("one", *others)
        ]
        if layout in CASES["unused"][1]:
            resumed = [*CASES["unused"][0], "--run.dir", root / layout / "unused-resumed"]
            commands += [[*resumed, "--run.stop-at", 5], resumed]
        train_many(*LAYOUTS[layout], RECIPE, commands, root)
        return root / layout

    return modules


@pytest.mark.parametrize(
    ("layout", "case"),
    pairs("attention", "loops", "frozen", "unused-exact", "branches-exact", "skipped", "scaled", "shared"),
)
def test_exact_mode_gives_every_layout_the_same_bits(modules, layout, case):
    """Losses, gradient norms, scores and weights.

    Also with two loops over one batch, with parts that some or no micro-batches use, and with steps that are skipped:
    as --run.nonfinite says, and by a loss scaler, of a gradient that overflows on one rank alone;
    and with an input that several layers use several times each.
    """
    reference, other = modules("one") / case, modules(layout) / case
    made = 40 if case == "attention" else 12 if case in ("skipped", "scaled") else 8
    assert len(steps(reference)) == made and len(scores(reference)) > 1
    assert steps(other) == steps(reference)
    assert scores(other) == scores(reference)
    assert weights(other) == weights(reference)


def test_some_steps_are_skipped(modules):
    """A control of the cases above: one sample spoils a step of each epoch."""
    assert {line.get("skipped_steps") for line in scores(modules("one") / "skipped")} >= {1, 2, 3, 4}


@pytest.mark.parametrize(("layout", "case"), pairs("scaled"))
def test_the_loss_scale_is_the_same_and_lower(modules, layout, case):
    """A control of the steps that are skipped by a loss scaler."""
    assert scaler(modules(layout) / case) == scaler(modules("one") / case)
    assert scaler(modules("one") / case)["scale"] < 2.0**10


def scaler(folder):
    """Read the state of the loss scaler from a run's last checkpoint."""
    return json.loads((folder / "checkpoints" / "step-00000012" / STATE / "objects.json").read_text())["scaler"]


@pytest.mark.parametrize(("layout", "case"), pairs("loops-ordinary", "norm", "unused", "branches"))
def test_same_loss_on_every_layout(modules, layout, case):
    """With two loops over one batch; with idle turns under BatchNorm and a loss over the batch; with unused weights."""
    reference, other = modules("one") / case, modules(layout) / case
    assert furthest_loss(steps(reference), steps(other)) < 1e-5
    assert [line["ids"] for line in steps(other)] == [line["ids"] for line in steps(reference)]


@pytest.mark.parametrize(("layout", "case"), pairs("unused"))
def test_unused_weights_stay_and_the_run_resumes_bitwise(modules, layout, case):
    """With find_unused_parameters under DDP, as the error message for unused weights advises."""
    reference, folder = weights(modules("one") / case), modules(layout)
    for name in ("idle.weight", "idle.bias"):
        assert weights(folder / case)[name] == reference[name]
    assert steps(folder / "unused-resumed") == steps(folder / case)
    assert weights(folder / "unused-resumed") == weights(folder / case)
