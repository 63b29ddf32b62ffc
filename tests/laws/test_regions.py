"""With dynamo_use_regional_compilation, torch compiles blocks; in exact mode every layout has the same bits."""

import functools
import json
import shutil

import pytest
from support.launching import ROOT, launch_all, profile_of, saved_state, scores, steps

from laws.small import SMALL

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="torch's inductor needs a C++ compiler")
STEPS, STOP = 8, 3
# Five micro-batches of two rows: no layout here divides them.
COMMON = ["--run.global-batch", 10, "--run.micro-batch", 2, "--run.log-every", 1, "--run.trackers"]
COMMON += ["--run.steps", STEPS, "--run.eval-every", 4, "--run.save-every", 100]
EXACT = ["--run.exact", "true"]
RECIPES = {"lm": ["--sample-length", 0]}  # `make laws` has cls too, whose batches have many widths
LAYOUTS = {"one": ("cpu", 1), "ddp2": ("ddp_cpu", 2), "fsdp2": ("fsdp_cpu", 2)}
OTHERS = (pytest.param("ddp2", marks=pytest.mark.exhaustive), "fsdp2")


@pytest.fixture(scope="module")
def regions(tmp_path_factory, rows):
    """Return a function from a layout to the folder of its runs."""
    root = tmp_path_factory.mktemp("regions")

    def command(layout, recipe, name, *more):
        flags = [
            *SMALL[recipe].flags(rows),
            *RECIPES[recipe],
            *COMMON,
            *more,
            "--run.dir",
            root / layout / recipe / name,
        ]
        return ROOT / f"recipes/{recipe}.py", flags, None

    @functools.cache
    def regions(layout):
        profile, processes = LAYOUTS[layout]
        compiled = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
        file = profile_of(root / "profiles", profile, dynamo_config=compiled)
        commands = []
        for recipe in RECIPES:
            commands.append(command(layout, recipe, "exact", *EXACT))
            if layout == "one":
                commands.append(command(layout, recipe, "left", *EXACT, "--run.stop-at", STOP))
            else:
                shutil.copytree(regions("one") / recipe / "left", root / layout / recipe / "left")
                commands.append(command(layout, recipe, "left", *EXACT))
        launch_all(file, processes, commands, root, timeout=500)
        return root / layout

    return regions


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", OTHERS)
def test_exact_mode_gives_every_layout_the_same_bits(regions, layout, recipe):
    """Losses, gradient norms, scores, weights and the optimizer; also of a run that began on one process."""
    reference = regions("one") / recipe / "exact"
    for name in ("exact", "left"):
        other = regions(layout) / recipe / name
        assert steps(other) == steps(reference) and len(steps(other)) == STEPS
        assert scores(other) == scores(reference) and len(scores(other)) == 2
        assert saved_state(other, STEPS) == saved_state(reference, STEPS)


@pytest.mark.parametrize("layout", ["one", *OTHERS])
def test_what_is_compiled(regions, layout):
    """One graph for all blocks of one shape; nothing after the first steps where all shapes are one."""
    for recipe in RECIPES:
        compiled = json.loads((regions(layout) / recipe / "exact" / "run.json").read_text())["compiled"]
        assert compiled["graphs"] >= 1 and (compiled["recompiles"], compiled["reasons"]) == (0, [])
