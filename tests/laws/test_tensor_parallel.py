"""Laws 1 to 5 under tensor parallelism: lm (a llama) and cls (a BERT) on one process, TP x2, TP x4, FSDP2 x2 x TP x2.

In fp32 and in bf16. A launch trains, and resumes runs that the layout before it began; one process resumes in a second
launch. `make test` has TP x2 in both precisions, and FSDP2 x2 x TP x2 in fp32; `make laws` has all of it.
"""

import functools
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
)

STEPS, STOP, LONG = 4, 2, 12
LAYOUTS = {"one": ("cpu", 1), "tp2": ("tp_cpu", 2), "tp4": ("tp_cpu", 4), "mesh": ("fsdp_tp_cpu", 4)}
OTHERS = [name for name in LAYOUTS if name != "one"]
BEFORE = {"one": "mesh", "tp2": "one", "tp4": "tp2", "mesh": "tp2"}  # what each resumes
LARGER = {"no": ["tp4"], "bf16": ["tp4", "mesh"]}  # layouts that `make laws` has
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


def in_laws(*layouts, resumed=False):
    """Return a test's precisions and layouts, marked where `make laws` runs them."""
    cases = []
    for precision, larger in LARGER.items():
        for layout in layouts:
            late = layout in larger or (resumed and BEFORE[layout] in larger)
            cases.append(pytest.param(precision, layout, marks=[pytest.mark.exhaustive] if late else []))
    return cases


@pytest.fixture(scope="module")
def split(tmp_path_factory, rows):
    """Return a function from a precision to a function from a layout to the folder of its runs."""
    return functools.cache(functools.partial(runs_in, tmp_path_factory, rows))


def runs_in(tmp_path_factory, rows, precision):
    """Return a function from a layout to the folder of its runs in a precision, which the first call makes."""
    root = tmp_path_factory.mktemp("split")
    texts = ["--data.path", rows(31), "--data.eval-path", rows(7)]
    small = {
        # A vocabulary that can be cut into four, unlike that of bytes.
        "lm": [*SCRATCH, *texts, "--scratch.vocab", 300, "--scratch.dropout", 0.1, "--data.block", 32, *OWN],
        "cls": [*SCRATCH, *texts, "--scratch.vocab", 300, "--data.max-length", 64],
    }

    def command(layout, recipe, name, *more):
        flags = [*small[recipe], *COMMON, *more, "--run.dir", root / layout / recipe / name]
        return ROOT / "recipes" / f"{recipe}.py", flags, None

    def profile(layout):
        name, count = LAYOUTS[layout]
        mesh = {f"parallelism_config_{each}_size": 1 for each in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
        mesh |= {"parallelism_config_tp_size": count}
        changed = {"parallelism_config": mesh} if name == "tp_cpu" else {}
        return profile_of(root / f"{name}-{count}", name, mixed_precision=precision, **changed)

    @functools.cache
    def runs(layout):
        commands = []
        for recipe in small:
            (root / layout / recipe).mkdir(parents=True)
            commands.append(command(layout, recipe, "whole", "--run.steps", STEPS))
            steps = LONG if recipe == "lm" else STEPS
            again = ["--activation-checkpointing", AGAIN[layout]] if recipe == "lm" else []
            commands.append(command(layout, recipe, "exact", "--run.steps", steps, *EXACT, *again))
        commands.append(command(layout, "lm", "adapters", "--run.steps", STEPS, *EXACT, *ADAPTERS))
        for name, flags in SHORT.items():
            commands.append(command(layout, "lm", name, "--run.steps", 2, *EXACT, *WIDER, *flags))
        if layout == "mesh":
            commands.append(command(layout, "lm", "stopped", "--run.steps", STEPS, "--run.stop-at", STOP))
            commands.append(command(layout, "lm", "stopped", "--run.steps", STEPS))
        if layout != "one":
            commands += resuming(layout)
        launch_all(profile(layout), LAYOUTS[layout][1], commands, root, timeout=400)
        return root / layout

    def resuming(layout):
        """Return the commands that go on, on one layout, with what another had made after STOP steps."""
        commands = []
        cases = ("cls", "whole", []), ("lm", "exact", EXACT), ("lm", "adapters", [*EXACT, *ADAPTERS])
        for recipe, name, flags in cases:
            there = root / layout / recipe / f"{name}-resumed"
            shutil.copytree(runs(BEFORE[layout]) / recipe / name, there)
            for checkpoint in (there / "checkpoints").glob("step-*"):
                if int(checkpoint.name.removeprefix("step-")) > STOP:
                    shutil.rmtree(checkpoint)
            shutil.rmtree(there / "model")
            count = LONG if name == "exact" else STEPS
            commands.append(command(layout, recipe, f"{name}-resumed", "--run.steps", count, *flags))
        return commands

    @functools.cache
    def resumed(layout):
        """Return the folder of a layout that has gone on with another's runs."""
        folder = runs(layout)
        if layout == "one":
            launch_all(profile(layout), 1, resuming(layout), root)
        return folder

    runs.resumed = resumed
    # Numbers in bf16 have eight bits, so sums in another order are further apart.
    runs.near, runs.near_norm = (1e-5, 1e-4) if precision == "no" else (3e-3, 3e-2)
    return runs


@pytest.mark.parametrize(("precision", "layout"), in_laws(*OTHERS))
@pytest.mark.parametrize("recipe", ["lm", "cls"])
def test_same_samples_loss_and_scores(split, precision, recipe, layout):
    """Laws 1 to 3 and 5, with dropout: between split layers, each process drops what one process would."""
    runs = split(precision)
    reference, other = runs("one") / recipe / "whole", runs(layout) / recipe / "whole"
    assert [line["ids"] for line in steps(other)] == [line["ids"] for line in steps(reference)]
    assert furthest_loss(steps(reference), steps(other)) < runs.near
    assert furthest(steps(reference), steps(other), "grad_norm") < runs.near_norm
    for ours, theirs in zip(scores(reference), scores(other), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(theirs[name] == pytest.approx(value, rel=runs.near_norm) for name, value in ours.items())


@pytest.mark.parametrize(("precision", "layout"), in_laws("mesh"))
def test_stopped_and_resumed_is_bitwise_equal(split, precision, layout):
    """Law 4, on one layout."""
    runs = split(precision)
    whole, stopped = (runs(layout) / "lm" / name for name in ("whole", "stopped"))
    assert steps(stopped) == steps(whole) and scores(stopped) == scores(whole)
    assert saved_state(stopped, STEPS) == saved_state(whole, STEPS) != saved_state(whole, STOP)


@pytest.mark.parametrize(("precision", "layout"), in_laws(*LAYOUTS, resumed=True))
def test_goes_on_from_another_layout(split, precision, layout):
    """Law 4, and in exact mode to the bit."""
    runs = split(precision)
    never_stopped, resumed = runs(layout) / "cls" / "whole", runs.resumed(layout) / "cls" / "whole-resumed"
    assert furthest_loss(steps(never_stopped), steps(resumed)) < runs.near
    for name, count in (("exact", LONG), ("adapters", STEPS)):
        one, other = runs("one") / "lm" / name, runs.resumed(layout) / "lm" / f"{name}-resumed"
        assert steps(other) == steps(one)
        assert saved_state(other, count) == saved_state(one, count)


@pytest.mark.parametrize(("precision", "layout"), in_laws(*OTHERS))
@pytest.mark.parametrize(
    "recipe, name, count",
    [
        *(("lm", "exact", LONG), ("cls", "exact", STEPS), ("lm", "adapters", STEPS)),
        *(("lm", name, 2) for name in SHORT),
    ],
)
def test_exact_mode_gives_the_same_bits(split, precision, recipe, name, count, layout):
    """Losses, norms, clipped updates, scores, weights, the optimizer's state, and the model's files."""
    runs = split(precision)
    reference, other = runs("one") / recipe / name, runs(layout) / recipe / name
    assert steps(other) == steps(reference) and len(steps(other)) == count
    assert scores(other) == scores(reference)
    assert saved_state(other, count) == saved_state(reference, count)
    assert hashes(other / "model") == hashes(reference / "model") != {}


@pytest.mark.parametrize("precision", LARGER)
def test_slices_change_bits_and_little_else(split, precision):
    """A control: the sums of slices are not those of whole layers."""
    runs = split(precision)
    whole, slices = (steps(runs("one") / "cls" / name) for name in ("whole", "exact"))
    assert whole != slices
    assert furthest_loss(whole, slices) < runs.near


def test_a_plan_counts_what_a_process_holds(rows, tmp_path):
    """Weights, gradients, optimizer state and activations, by the storages that there are."""
    flags = [*SCRATCH, "--data.path", rows(31), "--data.eval-path", rows(7), "--scratch.vocab", 300]
    flags += ["--data.max-length", 64, "--run.global-batch", 8, "--run.micro-batch", 4, "--run.steps", 3]
    flags += ["--run.trackers", "--run.save-async", "false", "--run.dir"]
    recipe, found = ROOT / "recipes" / "cls.py", tmp_path / "plan.json"
    profiles = {"tp_cpu": 2, "fsdp_tp_cpu": 4}
    result = python("-m", "app", "plan", recipe, *flags, tmp_path / "no", "--profile", *profiles, "--json", found)
    assert result.status == 0, result.output
    for layout in json.loads(found.read_text())["layouts"]:
        name = layout["profile"]
        (out := tmp_path / name).mkdir()
        words = ROOT / "tests" / "laws" / "split_peak.py", out, recipe, *flags, out / "run"
        result = launch(PROFILES / f"{name}.yaml", profiles[name], *words)
        assert result.status == 0, result.output[-3000:]
        measured = [json.loads(file.read_text())["tensors"] for file in out.glob("*.json")]
        assert len(measured) == profiles[name]
        # gloo may hold what it has sent a moment longer.
        assert layout["peak"]["peak"] == pytest.approx(max(measured), rel=0.05)
