"""Exact mode with blocks compiled by inductor, on several processes that share one GPU: the bits of one process."""

import functools

import pytest
from support.launching import ROOT, profile_of, saved_state, scores, steps

from laws.gpus import GPUS, launch, recipes, wants_gpu
from laws.small import SMALL

pytestmark = wants_gpu
LAYOUTS = {"one": ("gpu", 1), "ddp": ("ddp", 2), "fsdp": ("fsdp", 2)}
STEPS = 5
COMMON = ["--run.global-batch", 10, "--run.micro-batch", 2, "--run.steps", STEPS, "--run.log-every", 1]
COMMON += ["--run.exact", "true", "--run.eval-every", 100, "--run.save-every", 100, "--run.workers", 0]
COMMON += ["--run.trackers"]
COMPILED = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
# Texts of one width: each shape is compiled by itself.
MORE = {"cls": ["--data.pad-to-multiple-of", 32], "lm": ["--sample-length", 0]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, rows):
    """Return a function from a layout to the folder of its runs."""
    root = tmp_path_factory.mktemp("compiled")

    @functools.cache
    def runs(layout):
        kind, processes = LAYOUTS[layout]
        name = kind if GPUS else {"gpu": "cpu"}.get(kind, f"{kind}_cpu")
        file = profile_of(root / layout, name, mixed_precision="no", dynamo_config=COMPILED)
        commands = [
            (
                ROOT / f"recipes/{recipe}.py",
                [*SMALL[recipe].flags(rows), *COMMON, *more, "--run.dir", root / layout / recipe],
                None,
            )
            for recipe, more in MORE.items()
        ]
        launch(file, processes, commands, root, script="sharing.py", timeout=460)
        return root / layout

    return runs


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
@pytest.mark.parametrize("recipe", recipes(*MORE))
def test_exact_mode_gives_every_layout_the_bits_of_one_process(runs, recipe, layout):
    reference, other = runs("one") / recipe, runs(layout) / recipe
    assert steps(other) == steps(reference) and len(steps(other)) == STEPS
    assert scores(other) == scores(reference)
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)
