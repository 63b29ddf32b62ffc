"""Laws 1 to 5 under tensor parallelism: lm (a llama) and cls (a BERT) on one process, TP x2, TP x4, FSDP2 x2 x TP x2.

In fp32 and in bf16. A launch trains, and resumes runs that the layout before it began; one process resumes later.
`make test` has all of it for TP x2 in fp32, and what EARLY says of others; `make laws` has the rest. In bf16,
`test_shipped_profiles.py` has TP x2.
"""

import functools
import itertools
import json
import shutil

import pytest
from support.launching import (
    PROFILES,
    ROOT,
    furthest,
    furthest_loss,
    hashes,
    launch,
    launch_all,
    profile_of,
    python,
    saved_state,
    scores,
    steps,
    train_all,
)

STEPS, STOP, LONG = 4, 2, 12
LAYOUTS = {"one": ("cpu", 1), "tp2": ("tp_cpu", 2), "tp4": ("tp_cpu", 4), "mesh": ("fsdp_tp_cpu", 4)}
OTHERS = [name for name in LAYOUTS if name != "one"]
BEFORE = {"one": "mesh", "tp2": "one", "tp4": "tp2", "mesh": "tp2"}  # what each resumes
COMMON = ["--run.global-batch", 10, "--run.micro-batch", 4, "--run.log-every", 1, "--run.trackers", "--run.keep", 9]
COMMON += ["--run.eval-every", STOP, "--run.save-every", STOP]
SCRATCH = ["--scratch.layers", 2, "--scratch.width", 32, "--scratch.heads", 4]
OWN = ["--data.prompt", "label", "--data.completion", "text", "--sample-length", 4]
EXACT = ["--run.exact", "true", "--run.slices", 4]
# What is computed again in the backward pass changes no bit, so each layout may do it in a way of its own.
AGAIN = {"one": "none", "tp2": "ops", "tp4": "block", "mesh": "offload"}
ADAPTERS = ["--lora.rank", 4, "--logits", "chunked"]
WIDER = ["--scratch.width", 128, "--scratch.layers", 1]  # than what is too small for eight bits
# Short runs, each with an optimizer and another way to a loss.
SHORT = {
    "muon": ["--optim.name", "Muon", "--logits", "whole"],
    "adafactor": ["--optim.name", "Adafactor", "--mask.rate", 0.2],
    "adamw-8bit": ["--optim.name", "AdamW8bit", "--scratch.shape", "gpt2", "--logits", "whole"],
}


# Steps of what exact mode trains, by recipe and name.
COUNTS = {"lm/exact": LONG, "cls/exact": STEPS, "lm/adapters": STEPS, **{f"lm/{name}": 2 for name in SHORT}}
WHOLE = ["lm/whole", "cls/whole"]
RESUMED = ["cls/whole-resumed", "lm/exact-resumed", "lm/adapters-resumed"]
# What `make test` has by precision and layout: on four processes, the ways that nothing else there goes.
EARLY = {
    "no": {
        "tp2": {*WHOLE, *COUNTS, *RESUMED},
        "mesh": {*WHOLE, "lm/stopped", "lm/exact", "lm/muon", "cls/whole-resumed"},
    },
    "bf16": {},
}


def is_late(precision, layout, case):
    """Tell whether `make laws` alone has a case on a layout; one process has all that another has."""
    if layout == "one" and case in RESUMED:
        return is_late(precision, BEFORE[layout], case.removesuffix("-resumed"))
    early = EARLY[precision]
    having = early.values() if layout == "one" else [early.get(layout, set())]
    return not any(case in each for each in having)


def in_laws(cases, *layouts):
    """Return a test's precisions, cases and layouts, marked where `make laws` runs them."""
    return [
        pytest.param(*each, layout, marks=[pytest.mark.exhaustive] if is_late(each[0], layout, each[1]) else [])
        for each in itertools.product(EARLY, cases)
        for layout in layouts
    ]


@pytest.fixture(scope="module")
def split(tmp_path_factory, rows, data_cache):
    """Return a function from a precision to a function from a layout and a case to the folder of its run."""
    return functools.cache(functools.partial(runs_in, tmp_path_factory, rows))


def runs_in(tmp_path_factory, rows, precision):
    """Return a function from a layout and a case to the folder of its run, which the first call for a layout makes."""
    root = tmp_path_factory.mktemp("split")
    texts = ["--data.path", rows(31), "--data.eval-path", rows(7)]
    small = {
        # A vocabulary that can be cut into four, unlike that of bytes.
        "lm": [*SCRATCH, *texts, "--scratch.vocab", 300, "--scratch.dropout", 0.1, "--data.block", 32, *OWN],
        "cls": [*SCRATCH, *texts, "--scratch.vocab", 300, "--data.max-length", 64],
    }

    flags = {
        **{case: ["--run.steps", STEPS] for case in WHOLE},
        "lm/exact": ["--run.steps", LONG, *EXACT],
        "cls/exact": ["--run.steps", STEPS, *EXACT],
        "lm/adapters": ["--run.steps", STEPS, *EXACT, *ADAPTERS],
        **{f"lm/{name}": ["--run.steps", 2, *EXACT, *WIDER, *more] for name, more in SHORT.items()},
    }

    def command(layout, case, words):
        recipe = case.split("/")[0]
        words = [*small[recipe], *COMMON, *words, "--run.dir", root / layout / case]
        return ROOT / "recipes" / f"{recipe}.py", words, None

    def profile(layout):
        name, count = LAYOUTS[layout]
        mesh = {f"parallelism_config_{each}_size": 1 for each in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
        mesh |= {"parallelism_config_tp_size": count}
        changed = {"parallelism_config": mesh} if name == "tp_cpu" else {}
        return profile_of(root / f"{name}-{count}", name, mixed_precision=precision, **changed)

    def train(layout, commands):
        """Train on a layout: fp32 on one process needs no launch."""
        if layout == "one" and precision == "no":
            train_all("cpu", 1, commands, root)
        else:
            launch_all(profile(layout), LAYOUTS[layout][1], commands, root, timeout=400)

    @functools.cache
    def launched(layout, late):
        """Train what `make test` has of a layout, or what `make laws` alone has."""
        commands = []
        for case, words in flags.items():
            if is_late(precision, layout, case) == late:
                again = ["--activation-checkpointing", AGAIN[layout]] if case == "lm/exact" else []
                commands.append(command(layout, case, [*words, *again]))
        if layout == "mesh" and is_late(precision, layout, "lm/stopped") == late:
            words = flags["lm/whole"]
            commands += [command(layout, "lm/stopped", more) for more in ([*words, "--run.stop-at", STOP], words)]
        if layout != "one":
            commands += resuming(layout, late)
        train(layout, commands)

    @functools.cache
    def resumed_by_one(late):
        train("one", resuming("one", late))

    def resuming(layout, late):
        """Return the commands that go on, on one layout, with what another had made after STOP steps."""
        commands = []
        for case in (case for case in RESUMED if is_late(precision, layout, case) == late):
            source = case.removesuffix("-resumed")
            there = root / layout / case
            shutil.copytree(runs(BEFORE[layout], source), there)
            for checkpoint in (there / "checkpoints").glob("step-*"):
                if int(checkpoint.name.removeprefix("step-")) > STOP:
                    shutil.rmtree(checkpoint)
            shutil.rmtree(there / "model")
            commands.append(command(layout, case, flags[source]))
        return commands

    def runs(layout, case):
        late = is_late(precision, layout, case)
        if layout == "one" and case in RESUMED:
            resumed_by_one(late)
        else:
            launched(layout, late)
        return root / layout / case

    # Numbers in bf16 have eight bits, so sums in another order are further apart.
    runs.near, runs.near_norm = (1e-5, 1e-4) if precision == "no" else (3e-3, 3e-2)
    return runs


@pytest.mark.parametrize(("precision", "case", "layout"), in_laws(WHOLE, *OTHERS))
def test_same_samples_loss_and_scores(split, precision, case, layout):
    """Laws 1 to 3 and 5, with dropout: between split layers, each process drops what one process would."""
    runs = split(precision)
    reference, other = runs("one", case), runs(layout, case)
    assert [line["ids"] for line in steps(other)] == [line["ids"] for line in steps(reference)]
    assert furthest_loss(steps(reference), steps(other)) < runs.near
    assert furthest(steps(reference), steps(other), "grad_norm") < runs.near_norm
    for ours, theirs in zip(scores(reference), scores(other), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(theirs[name] == pytest.approx(value, rel=runs.near_norm) for name, value in ours.items())


@pytest.mark.parametrize(("precision", "case", "layout"), in_laws(["lm/stopped"], "mesh"))
def test_stopped_and_resumed_is_bitwise_equal(split, precision, case, layout):
    """Law 4, on one layout."""
    whole, stopped = (split(precision)(layout, name) for name in ("lm/whole", case))
    assert steps(stopped) == steps(whole) and scores(stopped) == scores(whole)
    assert saved_state(stopped, STEPS) == saved_state(whole, STEPS) != saved_state(whole, STOP)


@pytest.mark.parametrize(("precision", "case", "layout"), in_laws(RESUMED, *LAYOUTS))
def test_goes_on_from_another_layout(split, precision, case, layout):
    """Law 4, and in exact mode to the bit."""
    runs, source = split(precision), case.removesuffix("-resumed")
    resumed = runs(layout, case)
    if source in WHOLE:
        assert furthest_loss(steps(runs(layout, source)), steps(resumed)) < runs.near
    else:
        one, count = runs("one", source), COUNTS[source]
        assert steps(resumed) == steps(one)
        assert saved_state(resumed, count) == saved_state(one, count)


@pytest.mark.parametrize(("precision", "case", "layout"), in_laws(COUNTS, *OTHERS))
def test_exact_mode_gives_the_same_bits(split, precision, case, layout):
    """Losses, norms, clipped updates, scores, weights, the optimizer's state, and the model's files."""
    runs, count = split(precision), COUNTS[case]
    reference, other = runs("one", case), runs(layout, case)
    assert steps(other) == steps(reference) and len(steps(other)) == count
    assert scores(other) == scores(reference)
    assert saved_state(other, count) == saved_state(reference, count)
    assert hashes(other / "model") == hashes(reference / "model") != {}


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.exhaustive)])
def test_slices_change_bits_and_little_else(split, precision):
    """A control: the sums of slices are not those of whole layers."""
    runs = split(precision)
    whole, slices = (steps(runs("one", f"cls/{name}")) for name in ("whole", "exact"))
    assert whole != slices
    assert furthest_loss(whole, slices) < runs.near


@pytest.mark.parametrize(
    ("name", "processes"), [("tp_cpu", 2), pytest.param("fsdp_tp_cpu", 4, marks=pytest.mark.exhaustive)]
)
def test_a_plan_counts_what_a_process_holds(rows, tmp_path, name, processes):
    """Weights, gradients, optimizer state and activations, by the storages that there are."""
    flags = [*SCRATCH, "--data.path", rows(31), "--data.eval-path", rows(7), "--scratch.vocab", 300]
    flags += ["--data.max-length", 64, "--run.global-batch", 8, "--run.micro-batch", 4, "--run.steps", 3]
    flags += ["--run.trackers", "--run.save-async", "false", "--run.dir"]
    recipe, plan = ROOT / "recipes" / "cls.py", tmp_path / "plan.json"
    result = python("-m", "app", "plan", recipe, *flags, tmp_path / "no", "--profile", name, "--json", plan)
    assert result.status == 0, result.output
    (layout,) = json.loads(plan.read_text())["layouts"]
    (out := tmp_path / name).mkdir()
    words = ROOT / "tests" / "laws" / "split_peak.py", out, recipe, *flags, out / "run"
    result = launch(PROFILES / f"{name}.yaml", processes, *words)
    assert result.status == 0, result.output[-3000:]
    measured = [json.loads(file.read_text())["tensors"] for file in out.glob("*.json")]
    assert len(measured) == processes
    # gloo may hold what it has sent a moment longer.
    assert layout["peak"]["peak"] == pytest.approx(max(measured), rel=0.05)
