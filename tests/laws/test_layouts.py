"""Laws 1 to 5 for recipes/cls.py on many layouts and batches: the same samples, loss, run after a stop, and score.

Each layout is launched once and runs many cases; the tests read the run folders. `make laws` launches it once more, for
cases that differ from others in little. `test_recipes.py` tests the laws for every recipe, on one process and on two.
"""

import functools

import pytest
from safetensors.torch import load_file
from support.launching import ROOT, furthest, launch_many, saved_state, scores, steps, train_many, weights

RECIPE = ROOT / "recipes" / "cls.py"
SMALL = ["--scratch.width", 32, "--scratch.vocab", 300, "--data.max-length", 64, "--run.log-every", 1, "--run.trackers"]
# Every layout by its profile and number of processes. K, the micro-batches of a step, is 6, 4 or 3.
LAYOUTS = {
    "one": ("cpu", 1),
    "ddp3": ("ddp_cpu", 3),
    "ddp4": ("ddp_cpu", 4),
    "fsdp3": ("fsdp_cpu", 3),
    "fsdp4": ("fsdp_cpu", 4),
}
# Layouts that differ from others here in nothing but one more rank: `make laws` has them.
LARGER = ("ddp4", "fsdp4")
OTHERS = [name for name in LAYOUTS if name != "one"]


# Cases that differ in nothing from what the other layout of as many ranks has, from one process, or from "six" there.
LATE = {"ddp3": ("real", "stopped-1"), "fsdp3": ("four", "odd", "real", "exact-sgd", "stopped-5")}


def is_late(layout, name):
    """Tell whether `make laws` alone has a run on a layout."""
    return layout in LARGER or name in LATE.get(layout, ())


def in_laws(layout, name):
    """Return a test's arguments, marked where `make laws` runs it."""
    return pytest.param(layout, name, marks=[pytest.mark.exhaustive] if is_late(layout, name) else [])


# Layouts that train all steps of a long case; the others train the first ones.
LONG = {"real": ("one",), "exact": ("one", "ddp3", "fsdp3")}
SHORT = 14
MAIN = LONG["exact"]  # layouts with more cases than the others
STOPS = {"stopped-1": ["--run.stop-at", 1], "stopped-5": ["--run.stop-at", 5, "--run.eval-every", 1]}
# K is 5, which no number of ranks here divides, with 4 or 5 rows each; gradients are clipped; epochs end inside a step.
EXACT = ["--scratch.layers", 1, "--run.exact", "true", "--run.global-batch", 24, "--run.micro-batch", 5]
STEPS, CLIP = 40, 0.3  # of the case "exact"
REAL = 40  # of the case "real"
EXACT += [
    "--run.steps",
    STEPS,
    "--run.eval-every",
    SHORT,
    "--run.save-every",
    SHORT,
    "--run.keep",
    9,
    "--optim.clip",
    CLIP,
]
CASES = {
    # 101 rows twice in steps of 24: an epoch ends inside step 5, and the last step has 10 rows in 3 micro-batches.
    "six": ["--run.global-batch", 24, "--run.micro-batch", 4, "--run.epochs", 2, "--run.eval-every", 4],
    "four": ["--run.global-batch", 16, "--run.micro-batch", 4, "--run.epochs", 1],
    "odd": ["--run.global-batch", 10, "--run.micro-batch", 4, "--run.epochs", 1],
    "real": ["--scratch.layers", 1, "--run.global-batch", 16, "--run.micro-batch", 4, "--run.steps", REAL],
    "exact": [*EXACT],
    "exact-sgd": [*EXACT, "--optim.name", "SGD", "--optim.lr", 0.1, "--run.steps", 20],
}
OF_MAIN = ("exact-sgd",)  # cases that only these have


def has(layout, case):
    """Tell whether a layout has a case: `odd` has three micro-batches."""
    return not (case == "odd" and LAYOUTS[layout][1] > 3) and not (case in OF_MAIN and layout not in MAIN)


def is_short(layout, case):
    """Tell whether a layout trains the first steps of a case alone."""
    return case in LONG and layout not in LONG[case]


PAIRS = [(layout, case) for layout in OTHERS for case in CASES if has(layout, case)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, rows, data_cache):
    """Return a function from a layout and a name to the folder of a run, which the first call for a layout makes."""
    root = tmp_path_factory.mktemp("layouts")

    def flags(layout, name, case, *more):
        data = [] if case == "real" else ["--data.path", rows(101), "--data.eval-path", rows(7)]
        return [*SMALL, *data, *CASES[case], *more, "--run.dir", root / layout / name]

    def commands(layout):
        """Yield the name and the flags of each run of a layout."""
        for case in (case for case in CASES if has(layout, case)):
            yield case, flags(layout, case, case, *(["--run.stop-at", SHORT] if is_short(layout, case) else []))
        if layout in MAIN:
            for name, stop in STOPS.items():
                yield from [(name, flags(layout, name, "six", *stop)), (name, flags(layout, name, "six"))]
            yield from [("six-again", flags(layout, "six-again", "six"))] * 2
        if layout == "fsdp3":
            yield "chain", flags("chain", "run", "exact", "--run.stop-at", SHORT)
        if layout == "ddp3":
            yield "chain", flags("chain", "run", "exact", "--run.stop-at", 2 * SHORT)

    @functools.cache
    def launched(layout, late):
        if layout == "ddp3" and not late:
            runs("fsdp3", "chain")  # which goes on here
        words = [words for name, words in commands(layout) if is_late(layout, name) == late]
        launch_many(*LAYOUTS[layout], RECIPE, words, root, timeout=400)

    def runs(layout, name):
        launched(layout, is_late(layout, name))
        return root / layout / name

    @functools.cache
    def chain():
        """Resume a run of FSDP x3 under DDP x3, and then on one process."""
        runs("ddp3", "chain")
        train_many(*LAYOUTS["one"], RECIPE, [flags("chain", "run", "exact")], root)
        return root / "chain" / "run"

    runs.chain = chain
    return runs


@pytest.mark.parametrize(("layout", "case"), [in_laws(*pair) for pair in PAIRS])
def test_same_samples_and_loss(runs, layout, case):
    """Laws 1 to 3: any layout has the ledger of one process, to the bit, and its losses, to 1e-5 relative."""
    reference, other = steps(runs("one", case)), steps(runs(layout, case))
    if is_short(layout, case):
        reference = reference[:SHORT]
    assert [line["ids"] for line in other] == [line["ids"] for line in reference]
    assert [line["samples"] for line in other] == [line["samples"] for line in reference]
    assert [line["lr"] for line in other] == [line["lr"] for line in reference]
    assert furthest(reference, other) < 1e-5
    assert furthest(reference, other, "grad_norm") < 1e-3


def test_cases_are_what_they_claim(runs):
    """The loss goes down, steps differ from each other, and the last step is short."""
    lines = steps(runs("one", "real"))
    assert len(lines) == len({line["ids"] for line in lines}) == REAL
    assert sum(line["loss"] for line in lines[-9:]) < 0.985 * sum(line["loss"] for line in lines[:9])
    lines = steps(runs("one", "six"))
    assert [line["samples"] for line in lines] == [24, 48, 72, 96, 120, 144, 168, 192, 202]


@pytest.mark.parametrize("layout", MAIN)
def test_same_layout_is_bitwise_equal(runs, layout):
    """Law 3: the same layout twice gives the same bits; repeating a finished run changes nothing."""
    again, once = runs(layout, "six-again"), runs(layout, "six")
    assert steps(again) == steps(once)
    assert scores(again) == scores(once)
    assert weights(again) == weights(once)


@pytest.mark.parametrize(("layout", "at"), [in_laws(layout, name) for layout in MAIN for name in STOPS])
def test_stopped_and_resumed_is_bitwise_equal(runs, layout, at):
    """Law 4, one layout: stopped after the first step, and in the step where an epoch ends (evaluating each step)."""
    assert steps(runs(layout, at)) == steps(runs(layout, "six"))
    assert weights(runs(layout, at)) == weights(runs(layout, "six"))


@pytest.mark.parametrize(("layout", "case"), [in_laws(layout, "six") for layout in OTHERS])
def test_exported_weights_agree(runs, layout, case):
    """The finished model of any layout has the names and shapes of one process, and its values to a tolerance."""
    reference = load_file(runs("one", case) / "model" / "model.safetensors")
    other = load_file(runs(layout, case) / "model" / "model.safetensors")
    assert {k: v.shape for k, v in other.items()} == {k: v.shape for k, v in reference.items()}
    assert max((other[name] - reference[name]).abs().max().item() for name in reference) < 1e-4


@pytest.mark.parametrize(("layout", "case"), [in_laws(*pair) for pair in PAIRS if pair[1].startswith("exact")])
def test_exact_mode_gives_every_layout_the_same_bits(runs, layout, case):
    """Losses, gradient norms, scores, weights and the optimizer's state, of AdamW and of SGD with momentum."""
    reference, other = runs("one", case), runs(layout, case)
    last = 20 if case == "exact-sgd" else SHORT if is_short(layout, case) else STEPS
    assert len(steps(other)) == last
    assert steps(other) == steps(reference)[:last]
    assert scores(other) == [line for line in scores(reference) if line["step"] <= last]
    assert saved_state(other, last) == saved_state(reference, last)
    assert last == SHORT or weights(other) == weights(reference)


def test_exact_mode_through_stops_and_changes_of_layout(runs):
    """FSDP x3, then DDP x3, then one process: the bits of one process that never stopped."""
    assert steps(runs.chain()) == steps(runs("one", "exact"))
    assert scores(runs.chain()) == scores(runs("one", "exact"))
    assert saved_state(runs.chain(), STEPS) == saved_state(runs("one", "exact"), STEPS)


def test_without_exact_mode_bits_differ(runs):
    """A control: without exact mode, what is compared above differs between layouts."""
    assert steps(runs("ddp3", "six")) != steps(runs("one", "six"))
    assert weights(runs("ddp3", "six")) != weights(runs("one", "six"))


def test_clipping_is_at_work(runs):
    norms = [line["grad_norm"] for line in steps(runs("one", "exact"))]
    assert STEPS / 4 < sum(norm > CLIP for norm in norms) < STEPS
