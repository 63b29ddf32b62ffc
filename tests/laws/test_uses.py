"""Laws 3 and 4 where a micro-batch uses layers several times, through a gradient, or not at all (uses.py).

Each case has the same bits in exact mode on every layout, whole and stopped, or is refused by name in its first step.
"""

import functools
import json

import pytest
from support.launching import ROOT, furthest_loss, launch, launch_all, launch_many, scores, steps, weights

from laws.uses import CASES

RECIPE = ROOT / "tests" / "laws" / "uses.py"
LAYOUTS = {"one": ("cpu", 1), "ddp3": ("ddp_cpu", 3), "fsdp2": ("fsdp_cpu", 2)}
STEPS, STOP = 4, 2
SHORT = ["--run.steps", STEPS, "--run.eval-every", STOP]
EXACT = ["--run.exact", "true"]
# Words of the refusal under FSDP2.
ORDER = "in step 1, rank 1 {} where rank 0 {}, so FSDP2 would mix up weights or gradients. Have every micro-batch use"
OF_WEIGHTS = "torch.autograd.grad with respect to a model's weights: under FSDP2 a weight is whole only while"
OUTSIDE = "a loss uses weights outside the model's forward pass: under FSDP2"
REFUSED = {
    "parts": "gets its gradient in several parts, of which FSDP2 has reduced the first: give torch.utils.checkpoint",
    "of-weights": OF_WEIGHTS,
    "of-weights-unasked": OF_WEIGHTS,
    "decayed": OUTSIDE,
    "decayed-whole": OUTSIDE,
    "decayed-part": OUTSIDE,
    "dropped": ORDER,
    "conditional": ORDER,
    "experts": ORDER,
}
# With this seed the ranks' first micro-batches differ; with two a step, so do the norms that a step's rows use.
APART = ["--run.seed", 5, "--run.global-batch", 6]
ALONE = {"seldom"}  # one rank leaves an order that the other one keeps, which ends both
SAME = sorted(CASES.keys() - REFUSED.keys() - ALONE)
STOPPED = ["thrice", "reentrant-tied", "often-penalised"]
ORDINARY = ["crops", "often-penalised"]


@pytest.fixture(scope="session")
def uses(tmp_path_factory):
    """Return a function from a layout to the folder of its runs, which the first call makes."""
    root = tmp_path_factory.mktemp("uses")

    @functools.cache
    def uses(layout):
        here = root / layout
        others = () if layout == "fsdp2" else REFUSED
        commands = [["--case", case, *EXACT, *SHORT, "--run.dir", here / case] for case in (*SAME, *others)]
        commands += [["--case", case, *SHORT, "--run.dir", here / f"{case}-ordinary"] for case in ORDINARY]
        if layout != "one":
            for case in STOPPED:
                again = ["--case", case, *EXACT, *SHORT, "--run.dir", here / f"{case}-stopped"]
                commands += [[*again, "--run.stop-at", STOP], again]
        launch_many(*LAYOUTS[layout], RECIPE, commands, root, timeout=400)
        return here

    return uses


@pytest.fixture(scope="session")
def refused(tmp_path_factory):
    """Return the folder of the runs that FSDP2 cannot make, with what each was told."""
    root = tmp_path_factory.mktemp("refused")
    commands = [
        (
            RECIPE,
            ["--case", case, *mode, *SHORT, *APART, "--run.dir", root / f"{case}{name}"],
            root / f"{case}{name}.refused",
        )
        for case in REFUSED
        for name, mode in (("", EXACT), ("-ordinary", []))
        if (case, name) != ("parts", "-ordinary")  # FSDP2's own mode reduces twice, which is right
    ]
    launch_all(*LAYOUTS["fsdp2"], commands, root, timeout=400)
    return root


@pytest.mark.parametrize("layout", ["ddp3", "fsdp2"])
@pytest.mark.parametrize("case", SAME)
def test_every_layout_has_the_same_bits(uses, layout, case):
    """Also where a part that a micro-batch leaves out is the same on all ranks."""
    reference, other = uses("one") / case, uses(layout) / case
    assert len(steps(reference)) == STEPS and len(scores(reference)) == 2
    assert steps(other) == steps(reference)
    assert scores(other) == scores(reference)
    assert weights(other) == weights(reference)


@pytest.mark.parametrize("case", REFUSED)
def test_ddp_trains_what_fsdp_refuses(uses, case):
    assert steps(uses("ddp3") / case) == steps(uses("one") / case)
    assert weights(uses("ddp3") / case) == weights(uses("one") / case)


@pytest.mark.parametrize("layout", ["ddp3", "fsdp2"])
@pytest.mark.parametrize("case", STOPPED)
def test_a_run_that_was_stopped_has_the_same_bits(uses, layout, case):
    assert steps(uses(layout) / f"{case}-stopped") == steps(uses("one") / case)
    assert weights(uses(layout) / f"{case}-stopped") == weights(uses("one") / case)


@pytest.mark.parametrize("layout", ["ddp3", "fsdp2"])
@pytest.mark.parametrize("case", ORDINARY)
def test_the_ordinary_mode_has_the_same_loss(uses, layout, case):
    one, other = (uses(where) / f"{case}-ordinary" for where in ("one", layout))
    assert furthest_loss(steps(one), steps(other)) < 1e-4


@pytest.mark.parametrize("case", REFUSED)
def test_what_fsdp_cannot_do_is_refused_in_the_first_step(refused, case):
    """With one line that says what to do, and a record of it."""
    for name in (case,) if case == "parts" else (case, f"{case}-ordinary"):
        told, record = (refused / f"{name}.refused").read_text(), json.loads((refused / name / "run.json").read_text())
        assert all(part in told for part in REFUSED[case].split(" {}")) and "\n" not in told
        assert record["status"] == "failed" and not (refused / name / "metrics.jsonl").read_text()


def test_a_rank_that_leaves_an_order_alone_ends_all(tmp_path):
    """While the other rank waits in a collective for it."""
    result = launch("fsdp_cpu", 2, RECIPE, "--case", "seldom", "--run.dir", tmp_path / "run", timeout=200)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    told = ["error: in step 4, rank 1 gathers layers.2 where rank 0 gathers layers.1, so FSDP2 would mix up weights"]
    assert [line[: len(told[0])] for line in result.output.splitlines() if line.startswith("error: ")] == told
    assert "exitcode  : 2 " in result.output and result.status
    assert record["status"] == "failed" and "rank 1 gathers layers.2" in record["error"]
