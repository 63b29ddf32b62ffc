"""The laws, for every recipe in recipes/, on one process, and on DDP x2 or FSDP2 x2.

`make test` has each recipe on one of the two, `make laws` on the other one too. A launch trains recipes on a layout,
and resumes runs that other layouts began; one process trains in pytest's own. `test_layouts.py` has more layouts, for
one recipe.
"""

import functools
import itertools
import json
import shutil

import pytest
from support.launching import ROOT, furthest, furthest_loss, hashes, saved_state, scores, steps, train_all
from support.tiny import enter

from app.checkpoints.record import RECORD
from benchmarks.laws import CASES
from laws.mistakes import MISTAKES, plant
from laws.small import SMALL

RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.py"))}
LAYOUTS = {"one": ("cpu", 1), "ddp2": ("ddp_cpu", 2), "fsdp2": ("fsdp_cpu", 2)}
OTHERS = ("ddp2", "fsdp2")
# What `make test` has on FSDP2 x2: losses outside the forward pass, generation, sliding windows. It has others on DDP.
SHARDED = {"lm", "tag", "s2s", "seg", "graph"}
STEPS, STOP = 4, 2
# Three micro-batches of 3 or 4 rows: two ranks have two turns each; the last turn of the second rank is idle.
COMMON = ["--run.global-batch", 10, "--run.micro-batch", 4, "--run.log-every", 1, "--run.trackers"]
COMMON += ["--run.eval-every", STOP, "--run.save-every", STOP, "--run.keep", 99]
WHOLE = ["--run.steps", STEPS]
BATCH_NORM = ["--scratch.norm", "batch"]
# What exact mode has in addition, without launches of its own.
METHODS = {
    "cls": ["--loss.weights", "balanced", "--loss.smoothing", 0.1, "--loss.focal", 2, "--token-dropout", 0.2],
    "lm": ["--token-dropout", 0.2, "--logits", "chunked"],
    "dpo": ["--logits", "chunked"],
    "s2s": ["--scratch.shape", "bart", "--smoothing", 0.1, "--optim.lr", 0.02],
    "img": [
        *("--augment.mixup", 0.2, "--augment.cutmix", 1, "--augment.operations", 2, "--loss.weights", "balanced"),
        *BATCH_NORM,
    ],
    "seg": BATCH_NORM,
}
MASKED = [*WHOLE, "--run.exact", "true", "--mask.rate", 0.2, "--mask.span", 3, "--logits", "chunked"]


def turns(recipe):
    """Return the layouts in the order in which a recipe is trained on them: `make test` has the first two."""
    return ("one", "fsdp2", "ddp2") if recipe in SHARDED else ("one", "ddp2", "fsdp2")


def in_laws(recipe, *layouts):
    """Return a test's arguments, marked where `make laws` runs it."""
    late = turns(recipe)[-1] in layouts
    return pytest.param(recipe, *layouts, marks=[pytest.mark.exhaustive] if late else [])


PAIRS = [in_laws(recipe, layout) for recipe in SMALL for layout in OTHERS]
# A second backward pass is refused by app/, whatever the recipe: `make test` plants it in these.
TWICE = {"cls", "gan", "lm"}
ALL = [in_laws(recipe, layout) for recipe in SMALL for layout in LAYOUTS]
MOVES = [in_laws(recipe, *move) for recipe in SMALL for move in itertools.permutations(LAYOUTS, 2)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, rows, data_cache):
    """Return a function from a layout and a recipe to the folder of its runs, which the first call makes."""
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
        return file, flags, root / layout / recipe / "counts.json"

    def training(layout, recipe):
        """Return the commands that train a recipe on a layout, with all that the tests look at."""
        (root / layout / recipe).mkdir(parents=True)
        commands = [
            command(layout, recipe, "whole", *WHOLE, *(["--run.save-every", 1] if recipe == "cls" else [])),
            command(layout, recipe, "stopped", *WHOLE, "--run.stop-at", STOP),
            command(layout, recipe, "stopped", *WHOLE),
            command(layout, recipe, "exact", *WHOLE, "--run.exact", "true", *METHODS.get(recipe, [])),
            counted(layout, recipe),
        ]
        if layout == "one":
            commands.append(command(layout, recipe, "zero_grad", *WHOLE, file=mistaken[recipe, "zero_grad"]))
        else:
            commands.append(command(layout, recipe, "weight", "--run.steps", 2, file=mistaken[recipe, "weight"]))
            if passes_twice(recipe, layout):
                refused = command(layout, recipe, "twice", file=mistaken[recipe, "second backward"])
                commands.append((*refused[:2], root / layout / recipe / "second.refused"))
        if recipe == "lm":
            for name, more in (("whole", []), ("stopped", ["--run.stop-at", STOP]), ("stopped", [])):
                commands.append(command(layout, recipe, f"masked-{name}", *MASKED, *more))
        return commands

    def resuming(layout, recipe, source):
        """Return the commands that resume on a layout copies of what another had made of a recipe after STOP steps."""
        here, there = root / layout / recipe, runs(source, recipe)
        leave(there / "whole", here / f"from-{source}")
        return [command(layout, recipe, f"from-{source}", *WHOLE)]

    def lost(recipe):
        """Return the commands that resume on one process what must not give the same run."""
        file, here = mistaken[recipe, "zero_grad"], runs("one", recipe)
        leave(here / "zero_grad", here / "zero_grad-left")
        commands = [command("one", recipe, "zero_grad-left", *WHOLE, file=file)]
        if recipe == "cls":
            leave(here / "whole", here / "from-earlier")
            pretend_later(here / "from-earlier")
            commands.append(command("one", recipe, "from-earlier", *WHOLE))
        return commands

    @functools.cache
    def launched(layout, turn):
        """Train the recipes whose turn it is on a layout, and go on with what the layouts before have made of them."""
        commands = []
        for recipe in at(layout, turn):
            commands += training(layout, recipe)
            for source in turns(recipe)[:turn]:
                commands += resuming(layout, recipe, source)
        train_all(*LAYOUTS[layout], commands, root, timeout=700)

    @functools.cache
    def moved_back(layout, turn, later):
        """Go on, on a layout, with what a later one has made."""
        commands = [each for recipe in at(layout, turn) for each in resuming(layout, recipe, turns(recipe)[later])]
        train_all(*LAYOUTS[layout], commands, root, timeout=300)

    @functools.cache
    def lose():
        train_all(*LAYOUTS["one"], [each for recipe in SMALL for each in lost(recipe)], root)

    def runs(layout, recipe):
        launched(layout, turns(recipe).index(layout))
        return root / layout / recipe

    def resumed(layout, recipe, source):
        """Return the run that has gone on, on a layout, with what another had begun."""
        turn, later = (turns(recipe).index(name) for name in (layout, source))
        if later > turn:
            moved_back(layout, turn, later)
        return runs(layout, recipe) / f"from-{source}"

    def after_a_loss(recipe, name):
        """Return a run that one process has resumed and that must differ."""
        lose()
        return runs("one", recipe) / name

    runs.resumed, runs.after_a_loss = resumed, after_a_loss
    return runs


def at(layout, turn):
    return [recipe for recipe in SMALL if turns(recipe)[turn] == layout]


def passes_twice(recipe, layout):
    """Tell whether the recipe is run on a layout with a second backward pass."""
    return recipe in TWICE or layout == turns(recipe)[-1]


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


@pytest.mark.parametrize(("recipe", "layout"), PAIRS)
def test_same_samples_and_loss(runs, recipe, layout):
    """Laws 1 to 3: the same ledger to the bit, and losses to 1e-5 relative."""
    reference, other = steps(runs("one", recipe) / "whole"), steps(runs(layout, recipe) / "whole")
    assert len({line["ids"] for line in reference}) == STEPS
    assert [line["ids"] for line in other] == [line["ids"] for line in reference]
    assert [line["lr"] for line in other] == [line["lr"] for line in reference]
    assert furthest_loss(reference, other) < 1e-5
    assert furthest(reference, other, "grad_norm") < 1e-3


@pytest.mark.parametrize(("recipe", "layout"), ALL)
def test_stopped_and_resumed_is_bitwise_equal(runs, recipe, layout):
    """Laws 3 and 4, on one layout: losses, scores, weights and the optimizers' state."""
    folder = runs(layout, recipe)
    assert steps(folder / "stopped") == steps(folder / "whole")
    assert scores(folder / "stopped") == scores(folder / "whole")
    assert saved_state(folder / "stopped", STEPS) == saved_state(folder / "whole", STEPS)
    assert saved_state(folder / "whole", STOP) != saved_state(folder / "whole", STEPS)


@pytest.mark.parametrize(("recipe", "layout", "source"), MOVES)
def test_resume_from_any_layout(runs, recipe, layout, source):
    """Law 4: begun on each of the others."""
    never_stopped = steps(runs(layout, recipe) / "whole")
    resumed = steps(runs.resumed(layout, recipe, source))
    assert [line["ids"] for line in resumed] == [line["ids"] for line in never_stopped]
    assert furthest_loss(never_stopped, resumed) < 1e-5


def test_resume_from_another_state_is_seen(runs):
    """A control: resumed from an earlier step's checkpoint in place of the newest, losses differ."""
    never_stopped, resumed = steps(runs("one", "cls") / "whole"), steps(runs.after_a_loss("cls", "from-earlier"))
    assert resumed[:STOP] == never_stopped[:STOP]
    assert furthest_loss(never_stopped[STOP:], resumed[STOP:]) > 1e-5


@pytest.mark.parametrize(("recipe", "layout"), PAIRS)
def test_exact_mode_gives_the_same_bits(runs, recipe, layout):
    """Losses, gradient norms, weights, the optimizers' state; law 5, scores of the same weights; the model's files."""
    reference, other = runs("one", recipe) / "exact", runs(layout, recipe) / "exact"
    assert steps(other) == steps(reference)
    assert scores(other) == scores(reference)
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)
    assert hashes(other / "model") == hashes(reference / "model") != {}


@pytest.mark.parametrize("recipe", [recipe for recipe in SMALL if "--scratch.norm" in METHODS.get(recipe, [])])
def test_batch_norm_is_at_work(runs, recipe):
    assert any("running_mean" in name for name in saved_state(runs("one", recipe) / "exact", STEPS))


@pytest.mark.parametrize(("recipe", "layout"), [in_laws("lm", layout) for layout in LAYOUTS])
@pytest.mark.parametrize("name", ["whole", "stopped"])
def test_masked_tokens_are_the_same_everywhere_and_after_a_stop(runs, name, recipe, layout):
    """All laws for lm with --mask.rate, in exact mode."""
    reference, other = runs("one", recipe) / "masked-whole", runs(layout, recipe) / f"masked-{name}"
    assert steps(other) == steps(reference) and len(steps(other)) == STEPS
    assert scores(other) == scores(reference)
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)
    assert hashes(other / "model") == hashes(reference / "model") != {}
    assert "eval/accuracy" in scores(reference)[-1]


@pytest.mark.parametrize(("recipe", "layout"), ALL)
def test_what_a_silent_step_costs(runs, recipe, layout):
    """Law 6: one synchronisation for each optimizer, no other collective, no number read but the gradient's norm."""
    syncs = SMALL[recipe].syncs
    reads = {"reads": {"app/training/loop/step_metrics.py:add_norm": syncs}}
    synchronised = {"c10d::allreduce_": syncs}
    counts = json.loads((runs(layout, recipe) / "counts.json").read_text())
    silent, logged = counts["silent"], counts["logged"]
    if layout == "fsdp2":
        assert silent["reads"] == reads["reads"]
    else:
        assert silent == (reads if layout == "one" else synchronised | reads)
    if layout == "ddp2":
        assert logged["c10d::allreduce_"] == syncs + 1
    assert layout == "one" or sum(logged["reads"].values()) > syncs


@pytest.mark.parametrize(("recipe", "layout"), PAIRS)
def test_a_mistake_in_the_loop_is_seen_between_layouts(runs, recipe, layout):
    """The mistake is planted into the recipe's text; its gradient differs from the recipe's on one process."""
    healthy, mistaken = steps(runs("one", recipe) / "whole")[:2], steps(runs(layout, recipe) / "weight")
    assert furthest(healthy, mistaken, "grad_norm") > 1e-3


@pytest.mark.parametrize(("recipe", "layout"), [pair for pair in PAIRS if passes_twice(*pair.values)])
def test_a_second_backward_pass_is_refused(runs, recipe, layout):
    """The mistake is planted into the recipe's text; gradients would synchronise in the first backward pass."""
    assert "a second run.backward in one turn" in (runs(layout, recipe) / "second.refused").read_text()


@pytest.mark.parametrize("recipe", SMALL)
def test_a_forgotten_zero_grad_is_seen_after_a_stop(runs, recipe):
    """The mistake is planted into the recipe's text; a stop loses the old gradients, so the run differs."""
    folder, left = runs("one", recipe), runs.after_a_loss(recipe, "zero_grad-left")
    assert steps(folder / "zero_grad") != steps(folder / "whole")
    assert len(steps(left)) == STEPS and steps(left) != steps(folder / "zero_grad")
