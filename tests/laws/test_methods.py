"""Laws 3 and 4 for the methods that a flag switches on: frozen weights, rates by name, schedules."""

import pytest
from support.launching import ROOT, filled, saved_state, steps, weights

from laws.methods import CASES, STEPS, main

OTHERS = [("ddp_cpu", 3), ("fsdp_cpu", 2)]
LAYOUTS = [("cpu", 1), *OTHERS]


@pytest.fixture(scope="module")
def methods(tmp_path_factory):
    """Return a function from a layout to the folder of its runs."""
    runs = filled(tmp_path_factory.mktemp("methods"), ROOT / "tests" / "laws" / "methods.py", main)
    return lambda profile, processes: runs(profile, processes)[0]


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("name", CASES)
def test_exact_mode_gives_every_layout_the_same_bits(methods, name, layout):
    reference, other = methods("cpu", 1) / name, methods(*layout) / name
    assert steps(other) == steps(reference) and len(steps(other)) == STEPS
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)
    assert weights(other) == weights(reference)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_stop_changes_nothing(methods, name, layout):
    whole, stopped = methods(*layout) / name, methods(*layout) / f"{name}-stopped"
    assert steps(stopped) == steps(whole)
    assert saved_state(stopped, STEPS) == saved_state(whole, STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_frozen_when_they_should_be(methods, layout):
    """By the checkpoints of all steps: for ever, until step 8, from step 5 on, and from 3 to 8, counted from 0."""
    run = methods(*layout) / "kept"
    kept = [saved_state(run, step) for step in range(1, STEPS + 1)]
    moves = {
        name: [step for step in range(1, STEPS) if kept[step][f"models.0.{name}"] != kept[step - 1][f"models.0.{name}"]]
        for name in ("embed.weight", "layers.0.weight", "layers.2.bias", "head.bias", "layers.1.weight")
    }
    everywhere = list(range(1, STEPS))
    assert moves == {
        "embed.weight": [],
        "layers.0.weight": everywhere[7:],
        "layers.2.bias": everywhere[:4],
        "head.bias": [1, 2, *everywhere[7:]],
        "layers.1.weight": everywhere,
    }
    # Not even the optimizer's own state moves.
    name = "optimizers.0.models.0.head.bias.exp_avg"
    assert kept[3][name] == kept[7][name] != kept[8][name]


def test_learning_rates_are_logged_before_factors(methods):
    """The rate of weights without a factor of their own."""
    rates = [line["lr"] for line in steps(methods("cpu", 1) / "rates")]
    assert rates[0] == pytest.approx(0.1 * 0.02) and max(rates) == pytest.approx(0.02, rel=0.05)


def test_a_batch_ramp_uses_each_sample_in_its_turn(methods):
    """The rate follows the size of the batch; 4 steps of 3 samples, 5 of 8 and 5 of 20 end in the fourth epoch."""
    lines = steps(methods("ddp_cpu", 3) / "ramps")
    assert [round(line["epoch"] * 43) for line in lines] == [3, 6, 9, 12, 20, 28, 36, 44, 52, 72, 92, 112, 132, 152]
    rates = [line["lr"] / (0.02 * (1 - step / STEPS)) for step, line in enumerate(lines)]
    assert rates == pytest.approx([3 / 20] * 4 + [8 / 20] * 5 + [1] * 5)
