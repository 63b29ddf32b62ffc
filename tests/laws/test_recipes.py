"""The laws, for every recipe in recipes/, on one process, DDP x2 and FSDP2 x2.

Each layout is launched to train all recipes, DDP again to resume runs that the other layouts began; FSDP2 resumes them
in its only launch, and one process without one. `test_layouts.py` has more layouts, for one recipe.
"""

import functools
import json
import shutil

import pytest
from support.launching import ROOT, furthest, furthest_loss, hashes, launch_all, saved_state, scores, steps, train_all
from support.tiny import enter

from app.checkpoints.record import RECORD
from benchmarks.laws import CASES
from laws.mistakes import MISTAKES, plant
from laws.small import SMALL

RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.py"))}
LAYOUTS = {"one": ("cpu", 1), "ddp2": ("ddp_cpu", 2), "fsdp2": ("fsdp_cpu", 2)}
OTHERS = ("ddp2", "fsdp2")
STEPS, STOP = 4, 2
# Three micro-batches of 3 or 4 rows: two ranks have two turns each; the last turn of the second rank is idle.
COMMON = ["--run.global-batch", 10, "--run.micro-batch", 4, "--run.log-every", 1, "--run.trackers"]
COMMON += ["--run.eval-every", STOP, "--run.save-every", STOP, "--run.keep", 99]
WHOLE = ["--run.steps", STEPS]
# What exact mode has in addition, without launches of its own.
METHODS = {
    "cls": ["--loss.weights", "balanced", "--loss.smoothing", 0.1, "--loss.focal", 2, "--token-dropout", 0.2],
    "lm": ["--token-dropout", 0.2, "--logits", "chunked"],
    "dpo": ["--logits", "chunked"],
    "s2s": ["--scratch.shape", "bart", "--smoothing", 0.1, "--optim.lr", 0.02],
    "img": ["--augment.mixup", 0.2, "--augment.cutmix", 1, "--augment.operations", 2, "--loss.weights", "balanced"],
}
MASKED = [*WHOLE, "--run.exact", "true", "--mask.rate", 0.2, "--mask.span", 3, "--logits", "chunked"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, rows, data_cache):
    """Return a function from a layout to the folder of all recipes' runs on it, which the first call makes."""
    root = tmp_path_factory.mktemp("recipes")
    mistaken = {}
    for recipe, path in RECIPES.items():
        for name in MISTAKES:
            mistaken[recipe, name] = root / f"{recipe}-{name.replace(' ', '-')}.py"
            mistaken[recipe, name].write_text(plant(name, path.read_text()))

    def command(layout, recipe, name, *more, file=None):
        flags = [*SMALL[recipe].flags(rows), *COMMON, *more, "--run.dir", root / layout / recipe / name]
        return file or RECIPES[recipe], flags, None

    def counted(layout, recipe):
        file, flags, _ = command(layout, recipe, "counted", "--run.steps", 8, "--run.log-every", 6)
        flags += ["--run.eval-every", 8, "--run.save-every", 8, "--run.check-every", 8]
        return file, flags, root / layout / f"{recipe}-counts.json"

    @functools.cache
    def runs(layout):
        commands = []
        for recipe in SMALL:
            (root / layout).mkdir(exist_ok=True)
            commands += [
                command(layout, recipe, "whole", *WHOLE, *(["--run.save-every", 1] if recipe == "cls" else [])),
                command(layout, recipe, "stopped", *WHOLE, "--run.stop-at", STOP),
                command(layout, recipe, "stopped", *WHOLE),
                command(layout, recipe, "exact", *WHOLE, "--run.exact", "true", *METHODS.get(recipe, [])),
                counted(layout, recipe),
            ]
            if layout == "ddp2":
                commands.append(command(layout, recipe, "weight", "--run.steps", 2, file=mistaken[recipe, "weight"]))
                refused = command(layout, recipe, "twice", file=mistaken[recipe, "second backward"])
                commands.append((*refused[:2], root / layout / f"{recipe}.refused"))
            if layout == "one":
                file = mistaken[recipe, "zero_grad"]
                commands.append(command(layout, recipe, "zero_grad", *WHOLE, file=file))
        for name, more in (("whole", []), ("stopped", ["--run.stop-at", STOP]), ("stopped", [])):
            commands.append(command(layout, "lm", f"masked-{name}", *MASKED, *more))
        if layout == "fsdp2":
            commands += resuming(layout)
        launch_all(*LAYOUTS[layout], commands, root, timeout=700)
        return root / layout

    def resuming(layout):
        """Return the commands that resume, on one layout, copies of what the others had made after STOP steps."""
        commands = []
        for recipe in SMALL:
            for source in (name for name in LAYOUTS if name != layout):
                leave(runs(source) / recipe / "whole", root / layout / recipe / f"from-{source}")
                commands.append(command(layout, recipe, f"from-{source}", *WHOLE))
            if layout == "one":
                leave(runs(layout) / recipe / "zero_grad", root / layout / recipe / "zero_grad-left")
                file = mistaken[recipe, "zero_grad"]
                commands.append(command(layout, recipe, "zero_grad-left", *WHOLE, file=file))
        if layout == "one":
            folder = root / layout / "cls" / "from-earlier"
            leave(runs(layout) / "cls" / "whole", folder)
            pretend_later(folder)
            commands.append(command(layout, "cls", "from-earlier", *WHOLE))
        return commands

    @functools.cache
    def resumed(layout):
        """Return the folder of a layout that has resumed the others' runs."""
        folder = runs(layout)
        if layout != "fsdp2":
            train_all(*LAYOUTS[layout], resuming(layout), root, timeout=300)
        return folder

    runs.resumed = resumed
    return runs


def leave(run, folder):
    """Copy a run as it was after STOP steps, but for the lines and the status of what came after."""
    shutil.copytree(run, folder)
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > STOP:
            shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "model")


def pretend_later(folder):
    """Replace the newest checkpoint's state by an earlier step's."""
    old, new = (folder / "checkpoints" / f"step-{step:08d}" for step in (STOP - 1, STOP))
    shutil.rmtree(new)
    shutil.copytree(old, new)
    record = json.loads((new / RECORD).read_text())
    (new / RECORD).write_text(json.dumps({**record, "step": STOP}))
    enter(new, RECORD)


def test_every_recipe_is_here():
    missing = RECIPES.keys() - SMALL.keys()
    assert not missing, f"add {', '.join(sorted(missing))} to tests/laws/small.py: flags that make the recipe small"
    proven = {flags.split()[0] for flags in CASES.values()}
    assert RECIPES.keys() == proven, "benchmarks/laws.py: give CASES the flags of every recipe"


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("recipe", SMALL)
def test_same_samples_and_loss(runs, recipe, layout):
    """Laws 1 to 3: the same ledger to the bit, and losses to 1e-5 relative."""
    reference, other = steps(runs("one") / recipe / "whole"), steps(runs(layout) / recipe / "whole")
    assert len({line["ids"] for line in reference}) == STEPS
    assert [line["ids"] for line in other] == [line["ids"] for line in reference]
    assert [line["lr"] for line in other] == [line["lr"] for line in reference]
    assert furthest_loss(reference, other) < 1e-5
    assert furthest(reference, other, "grad_norm") < 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", SMALL)
def test_stopped_and_resumed_is_bitwise_equal(runs, recipe, layout):
    """Laws 3 and 4, on one layout: losses, scores, weights and the optimizers' state."""
    folder = runs(layout) / recipe
    assert steps(folder / "stopped") == steps(folder / "whole")
    assert scores(folder / "stopped") == scores(folder / "whole")
    assert saved_state(folder / "stopped", STEPS) == saved_state(folder / "whole", STEPS)
    assert saved_state(folder / "whole", STOP) != saved_state(folder / "whole", STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", SMALL)
def test_resume_from_any_layout(runs, recipe, layout):
    """Law 4: begun on each of the others."""
    never_stopped = steps(runs(layout) / recipe / "whole")
    for source in (name for name in LAYOUTS if name != layout):
        resumed = steps(runs.resumed(layout) / recipe / f"from-{source}")
        assert [line["ids"] for line in resumed] == [line["ids"] for line in never_stopped]
        assert furthest_loss(never_stopped, resumed) < 1e-5


def test_resume_from_another_state_is_seen(runs):
    """A control: resumed from an earlier step's checkpoint in place of the newest, losses differ."""
    never_stopped, resumed = steps(runs("one") / "cls" / "whole"), steps(runs.resumed("one") / "cls" / "from-earlier")
    assert resumed[:STOP] == never_stopped[:STOP]
    assert furthest_loss(never_stopped[STOP:], resumed[STOP:]) > 1e-5


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("recipe", SMALL)
def test_exact_mode_gives_the_same_bits(runs, recipe, layout):
    """Losses, gradient norms, weights, the optimizers' state; law 5, scores of the same weights; the model's files."""
    reference, other = runs("one") / recipe / "exact", runs(layout) / recipe / "exact"
    assert steps(other) == steps(reference)
    assert scores(other) == scores(reference)
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)
    assert hashes(other / "model") == hashes(reference / "model") != {}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["whole", "stopped"])
def test_masked_tokens_are_the_same_everywhere_and_after_a_stop(runs, name, layout):
    """All laws for lm with --mask.rate, in exact mode."""
    reference, other = runs("one") / "lm" / "masked-whole", runs(layout) / "lm" / f"masked-{name}"
    assert steps(other) == steps(reference) and len(steps(other)) == STEPS
    assert scores(other) == scores(reference)
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)
    assert hashes(other / "model") == hashes(reference / "model") != {}
    assert "eval/accuracy" in scores(reference)[-1]


@pytest.mark.parametrize("recipe", SMALL)
def test_what_a_silent_step_costs(runs, recipe):
    """Law 6: one synchronisation for each optimizer, no other collective, no number read but the gradient's norm."""
    expected = {
        "c10d::allreduce_": SMALL[recipe].syncs,
        "reads": {"app/training/loop/step_metrics.py:add_norm": SMALL[recipe].syncs},
    }
    counts = {layout: json.loads((runs(layout) / f"{recipe}-counts.json").read_text()) for layout in LAYOUTS}
    assert counts["ddp2"]["silent"] == expected
    assert counts["one"]["silent"] == {"reads": expected["reads"]}
    assert counts["fsdp2"]["silent"]["reads"] == expected["reads"]
    logged = counts["ddp2"]["logged"]
    assert logged["c10d::allreduce_"] == expected["c10d::allreduce_"] + 1
    assert sum(logged["reads"].values()) > SMALL[recipe].syncs


@pytest.mark.parametrize("recipe", SMALL)
def test_a_mistake_in_the_loop_is_seen_between_layouts(runs, recipe):
    """The mistake is planted into the recipe's text; its gradient differs from the recipe's on one process."""
    healthy, mistaken = steps(runs("one") / recipe / "whole")[:2], steps(runs("ddp2") / recipe / "weight")
    assert furthest(healthy, mistaken, "grad_norm") > 1e-3


@pytest.mark.parametrize("recipe", SMALL)
def test_a_second_backward_pass_is_refused(runs, recipe):
    """The mistake is planted into the recipe's text; gradients would synchronise in the first backward pass."""
    assert "a second run.backward in one turn" in (runs("ddp2") / f"{recipe}.refused").read_text()


@pytest.mark.parametrize("recipe", SMALL)
def test_a_forgotten_zero_grad_is_seen_after_a_stop(runs, recipe):
    """The mistake is planted into the recipe's text; a stop loses the old gradients, so the run differs."""
    folder, left = runs("one") / recipe, runs.resumed("one") / recipe / "zero_grad-left"
    assert steps(folder / "zero_grad") != steps(folder / "whole")
    assert len(steps(left)) == STEPS and steps(left) != steps(folder / "zero_grad")
