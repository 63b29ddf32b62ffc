"""Laws 3 and 4 where a micro-batch uses layers several times, through a gradient, or not at all (uses.py).

Each case has the same bits in exact mode on every layout, whole and stopped, or is refused by name in its first step.
`make laws` has, on a layout, the cases that differ in little there from others.
"""

import functools
import json

import pytest
from support.launching import ROOT, furthest_loss, launch, scores, steps, train_all, weights

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
REDUCED_TWICE = {"parts"}  # by FSDP2's own mode, which is right
ALONE = {"seldom"}  # one rank leaves an order that the other one keeps, which ends both
SAME = sorted(CASES.keys() - REFUSED.keys() - ALONE)
STOPPED = ["thrice", "reentrant-tied", "often-penalised"]
ORDINARY = ["crops", "often-penalised"]


OTHERS = ("ddp3", "fsdp2")
# What `make test` has on one of the two only, because others there take the same way through the gradients.
LATE = {
    "ddp3": {
        *("adversarial", "crops", "nested", "one-piece", "only-penalty", "penalised-checkpointed", "tied-twice"),
        *("within", "within-reentrant", "of-weights-unasked", "decayed-whole", "decayed-part"),
        *("thrice-stopped", "often-penalised-stopped"),
    },
    "fsdp2": {"checkpointed", "penalised", "reentrant", "tied"},
}


def modes_of(case):
    """Return what FSDP2 refuses of a case: flags by the run's name."""
    return {case: EXACT} | ({} if case in REDUCED_TWICE else {f"{case}-ordinary": []})


def is_late(layout, name):
    """Tell whether `make laws` alone has a run on a layout."""
    return name in LATE.get(layout, ())


def in_laws(names, *layouts):
    """Return a test's runs and layouts, marked where `make laws` runs them."""
    return [
        pytest.param(name, layout, marks=[pytest.mark.exhaustive] if is_late(layout, name) else [])
        for name in names
        for layout in layouts
    ]


@pytest.fixture(scope="module")
def uses(tmp_path_factory):
    """Return a function from a layout and a name to the folder of a run, which the first call for a layout makes."""
    root = tmp_path_factory.mktemp("uses")

    def commands(layout):
        """Yield the name of each run of a layout, what is launched, and where a refusal is told."""
        here = root / layout
        for case in (*SAME, *(() if layout == "fsdp2" else REFUSED)):
            yield case, ["--case", case, *EXACT, *SHORT, "--run.dir", here / case], None
        for case in ORDINARY:
            yield f"{case}-ordinary", ["--case", case, *SHORT, "--run.dir", here / f"{case}-ordinary"], None
        for case in STOPPED if layout != "one" else ():
            again = ["--case", case, *EXACT, *SHORT, "--run.dir", here / f"{case}-stopped"]
            yield from [(f"{case}-stopped", words, None) for words in ([*again, "--run.stop-at", STOP], again)]
        if layout == "fsdp2":  # last: what a run that is refused leaves is no other's business
            for case in REFUSED:
                for name, mode in modes_of(case).items():
                    words = ["--case", case, *mode, *SHORT, *APART, "--run.dir", here / name]
                    yield name, words, here / f"{name}.refused"

    @functools.cache
    def launched(layout, late):
        listed = [(RECIPE, words, told) for name, words, told in commands(layout) if is_late(layout, name) == late]
        train_all(*LAYOUTS[layout], listed, root, timeout=400)

    def uses(layout, name):
        launched(layout, is_late(layout, name))
        return root / layout / name

    return uses


@pytest.mark.parametrize(("case", "layout"), in_laws(SAME, *OTHERS))
def test_every_layout_has_the_same_bits(uses, case, layout):
    """Also where a part that a micro-batch leaves out is the same on all ranks."""
    reference, other = uses("one", case), uses(layout, case)
    assert len(steps(reference)) == STEPS and len(scores(reference)) == 2
    assert steps(other) == steps(reference)
    assert scores(other) == scores(reference)
    assert weights(other) == weights(reference)


@pytest.mark.parametrize(("case", "layout"), in_laws(REFUSED, "ddp3"))
def test_ddp_trains_what_fsdp_refuses(uses, case, layout):
    assert steps(uses(layout, case)) == steps(uses("one", case))
    assert weights(uses(layout, case)) == weights(uses("one", case))


@pytest.mark.parametrize(("name", "layout"), in_laws([f"{case}-stopped" for case in STOPPED], *OTHERS))
def test_a_run_that_was_stopped_has_the_same_bits(uses, name, layout):
    stopped, never_stopped = uses(layout, name), uses("one", name.removesuffix("-stopped"))
    assert steps(stopped) == steps(never_stopped)
    assert weights(stopped) == weights(never_stopped)


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("case", ORDINARY)
def test_the_ordinary_mode_has_the_same_loss(uses, layout, case):
    one, other = (uses(where, f"{case}-ordinary") for where in ("one", layout))
    assert furthest_loss(steps(one), steps(other)) < 1e-4


@pytest.mark.parametrize("case", REFUSED)
def test_what_fsdp_cannot_do_is_refused_in_the_first_step(uses, case):
    """With one line that says what to do, and a record of it."""
    for name in modes_of(case):
        run = uses("fsdp2", name)
        told, record = run.with_name(f"{name}.refused").read_text(), json.loads((run / "run.json").read_text())
        assert all(part in told for part in REFUSED[case].split(" {}")) and "\n" not in told
        assert record["status"] == "failed" and not (run / "metrics.jsonl").read_text()


def test_a_rank_that_leaves_an_order_alone_ends_all(tmp_path):
    """While the other rank waits in a collective for it."""
    result = launch("fsdp_cpu", 2, RECIPE, "--case", "seldom", "--run.dir", tmp_path / "run", timeout=200)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    told = ["error: in step 4, rank 1 gathers layers.2 where rank 0 gathers layers.1, so FSDP2 would mix up weights"]
    assert [line[: len(told[0])] for line in result.output.splitlines() if line.startswith("error: ")] == told
    assert "exitcode  : 2 " in result.output and result.status
    assert record["status"] == "failed" and "rank 1 gathers layers.2" in record["error"]
