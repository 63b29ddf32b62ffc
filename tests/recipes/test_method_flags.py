"""Flags of the recipes change what a step computes: laws that compare layouts would not see one without effect."""

import pytest
from support.launching import ROOT, steps

from app.launching.flags import parse
from laws.many import load
from laws.small import SMALL

PAIRS = {
    "lm-dropout": ("lm", [], ["--token-dropout", 0.5]),
    "lm-blocks": ("lm", [], ["--data.block-ramp", "2:16"]),
    "lm-masks": ("lm", ["--mask.rate", 0.3], ["--mask.rate", 0.3, "--mask.span", 3]),
    "lm-random": ("lm", ["--mask.rate", 0.3], ["--mask.rate", 0.3, "--mask.random", 0.9]),
    "cls-dropout": ("cls", [], ["--token-dropout", 0.5]),
    "cls-batch": ("cls", [], ["--run.batch-ramp", "1:5"]),
    "cls-smoothing": ("cls", ["--loss.smoothing", 0.1], ["--loss.smoothing", 0.2]),
    "cls-weights": ("cls", ["--loss.smoothing", 0.1], ["--loss.smoothing", 0.1, "--loss.weights", "balanced"]),
    "cls-focal": ("cls", ["--loss.smoothing", 0.1], ["--loss.smoothing", 0.1, "--loss.focal", 2]),
    "s2s-smoothing": ("s2s", ["--smoothing", 0.1], ["--smoothing", 0.2]),
    "img-mixup": ("img", [], ["--augment.mixup", 1]),
    "img-cutmix": ("img", ["--augment.mixup", 1], ["--augment.cutmix", 1]),
    "img-operations": ("img", [], ["--augment.operations", 2]),
}
ONE = ["--run.steps", 1, "--run.global-batch", 10, "--run.micro-batch", 4, "--run.trackers", "--run.threads", 1]


@pytest.fixture(scope="module")
def first_loss(data_cache, rows, tmp_path_factory):
    """Return a function from a recipe and flags to the loss of the first step."""
    folder, known = tmp_path_factory.mktemp("flags"), {}

    def first_loss(name, more):
        key = " ".join(map(str, [name, *more]))
        if key not in known:
            recipe, run = load(ROOT / "recipes" / f"{name}.py"), folder / str(len(known))
            words = [*SMALL[name].flags(rows), *ONE, *more, "--run.dir", run]
            recipe.main(parse(recipe.Config, list(map(str, words))))
            known[key] = steps(run)[0]["loss"]
        return known[key]

    return first_loss


@pytest.mark.parametrize("pair", PAIRS)
def test_a_flag_changes_the_first_loss(first_loss, pair):
    name, without, given = PAIRS[pair]
    assert first_loss(name, without) != first_loss(name, given)
