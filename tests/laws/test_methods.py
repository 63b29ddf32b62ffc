"""Laws 3 and 4 for the methods that a flag switches on: frozen weights, rates by name, schedules, batch ramps.

Also for optimizers of other packages, and for diagnostics.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.launching import ROOT, filled, saved_state, scores, steps, weights

from app import EMAConfig, OptimConfig, Run, RunConfig, UserError
from app.distributed.state import sharded
from app.errors import is_installed
from app.rundir import metrics_file
from laws import methods as script
from laws import optimizers
from laws.averaged import Config as Averaged
from laws.methods import Model

PACKAGES = {"lion": "lion_pytorch", "free": "schedulefree"}
THERE = [name for name in optimizers.CASES if name not in PACKAGES or is_installed(PACKAGES[name])]
KNOWN = [
    pytest.param(name, marks=[] if name in THERE else pytest.mark.skip(f"{PACKAGES[name]} is not installed"))
    for name in optimizers.CASES
]
OTHERS = [("ddp_cpu", 3), ("fsdp_cpu", 2)]
LAYOUTS = [("cpu", 1), *OTHERS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function from a layout to the folder of its runs."""
    runs = filled(tmp_path_factory.mktemp("methods"), ROOT / "tests" / "laws" / "optimizers.py", optimizers.main)
    return lambda profile, processes: runs(profile, processes, *THERE)[0]


def diagnostics(folder):
    return metrics_file.read(folder / "diagnostics.jsonl")


def same_bits(one, other, count):
    """Compare two runs of so many steps: losses, scores, weights, and what the last checkpoint holds."""
    assert steps(other) == steps(one) and len(steps(other)) == count
    assert scores(other) == scores(one) and weights(other) == weights(one)
    assert saved_state(other, count) == saved_state(one, count)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", script.CASES)
def test_stopped_and_resumed_every_layout_gives_the_bits_of_a_whole_run_of_one_process(trained, name, layout):
    same_bits(trained("cpu", 1) / name, trained(*layout) / f"{name}-stopped", script.STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_run_has_these_bits_on_every_layout(trained, layout):
    same_bits(trained("cpu", 1) / "frozen", trained(*layout) / "kept", script.STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_frozen_when_they_should_be(trained, layout):
    """By the checkpoints of all steps: for ever, until step 8, from step 5 on, and from 3 to 8, counted from 0."""
    run = trained(*layout) / "kept"
    kept = [saved_state(run, step) for step in range(1, script.STEPS + 1)]
    everywhere = list(range(1, script.STEPS))
    moves = {
        name: [step for step in everywhere if kept[step][f"models.0.{name}"] != kept[step - 1][f"models.0.{name}"]]
        for name in ("embed.weight", "layers.0.weight", "layers.2.bias", "head.bias", "layers.1.weight")
    }
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


def test_learning_rates_are_logged_before_factors(trained):
    """The rate of weights without a factor of their own."""
    rates = [line["lr"] for line in steps(trained("cpu", 1) / "rates")]
    assert rates[0] == pytest.approx(0.1 * 0.02) and max(rates) == pytest.approx(0.02, rel=0.05)


def test_a_batch_ramp_uses_each_sample_in_its_turn(trained):
    """The rate follows the size of the batch; 4 steps of 3 samples, 5 of 8 and 5 of 20 end in the fourth epoch."""
    lines = steps(trained("ddp_cpu", 3) / "ramps-stopped")
    assert [round(line["epoch"] * 43) for line in lines] == [3, 6, 9, 12, 20, 28, 36, 44, 52, 72, 92, 112, 132, 152]
    rates = [line["lr"] / (0.02 * (1 - step / script.STEPS)) for step, line in enumerate(lines)]
    assert rates == pytest.approx([3 / 20] * 4 + [8 / 20] * 5 + [1] * 5)


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("name", KNOWN)
def test_other_optimizers_give_every_layout_the_same_bits(trained, name, layout):
    """And diagnostics. The last one was stopped and resumed there."""
    reference, other = trained("cpu", 1) / name, trained(*layout) / (f"{name}-stopped" if name == THERE[-1] else name)
    same_bits(reference, other, optimizers.STEPS)
    assert diagnostics(other) == diagnostics(reference)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stop_changes_nothing(trained, layout):
    """And leaves no line of diagnostics of a step after the checkpoint."""
    whole, stopped = trained("cpu", 1) / THERE[-1], trained(*layout) / f"{THERE[-1]}-stopped"
    same_bits(whole, stopped, optimizers.STEPS)
    assert diagnostics(stopped) == diagnostics(whole)
    assert [line["step"] for line in diagnostics(whole)] == [3, 6, 9, 12]
    assert len(json.loads((stopped / "run.json").read_text())["launches"]) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.skipif("free" not in THERE, reason="schedulefree is not installed")
def test_schedule_free_weights(trained, layout):
    """Scores and the finished model have those of eval(); evaluations leave those in training as they were."""
    run, seldom = trained(*layout) / "free-stopped", trained("cpu", 1) / "free-seldom"
    state = saved_state(run, optimizers.STEPS)
    assert weights(run)["layers.0.weight"] != state["models.0.layers.0.weight"]
    assert saved_state(seldom, optimizers.STEPS) == state and weights(seldom) == weights(run)
    assert scores(seldom) == scores(run)[-1:]


@pytest.mark.skipif("free" not in THERE, reason="schedulefree is not installed")
def test_a_checkpoint_gives_the_weights_that_are_scored(trained, tmp_path):
    """As `export` and `evaluate` read it; they stay, whatever mode the optimizer is put into."""
    folder = trained("cpu", 1) / "free"
    config = optimizers.Config(optim=optimizers.CASES["free"])
    config.run.dir = str(tmp_path / "run")
    with Run(config) as run:
        model, optimizer = run.prepare(Model(), config.optim)
        sharded.load_weights(run.accelerator, str(folder / "checkpoints" / f"step-{optimizers.STEPS:08d}" / "state"))
        optimizer.train()
    expected = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


@pytest.mark.skipif("free" not in THERE, reason="schedulefree is not installed")
def test_an_average_of_an_average_is_refused(tmp_path):
    config = Averaged(optim=optimizers.CASES["free"], ema=EMAConfig(decay=0.9))
    config.run.dir = str(tmp_path / "run")
    with pytest.raises(UserError, match="--ema: AdamWScheduleFree keeps an average of its own"), Run(config) as run:
        run.prepare(Model(), config.optim)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_diagnostics_change_nothing(trained, layout):
    watched, plain = trained(*layout) / "adamw", trained("cpu", 1) / "plain"
    same_bits(plain, watched, optimizers.STEPS)
    assert not (plain / "diagnostics.jsonl").exists()


@pytest.mark.parametrize("layout", OTHERS)
def test_without_exact_mode_diagnostics_agree(trained, layout):
    for line, other in zip(
        diagnostics(trained("cpu", 1) / "usual"), diagnostics(trained(*layout) / "usual"), strict=True
    ):
        for name, layer in line["layers"].items():
            for what, value in layer.items():
                found = other["layers"][name][what]
                if what == "histogram":
                    assert sum(found.values()) == sum(value.values())
                else:
                    assert found == pytest.approx(value, rel=1e-5)


def test_diagnostics_are_those_of_the_step(trained):
    """The norm of all gradients is the one in the log, before clipping."""
    run = trained("cpu", 1) / "adamw"
    logged = {line["step"]: line["grad_norm"] for line in steps(run)}
    for line in diagnostics(run):
        layers = line["layers"].values()
        total = sum(layer["gradient_norm"] ** 2 for layer in layers) ** 0.5
        assert total == pytest.approx(logged[line["step"]], rel=1e-9) and total > 0.1  # which clipping leaves
        assert all(layer["update_ratio"] == layer["update_norm"] / layer["weight_norm"] for layer in layers)
        before, after = (saved_state(run, step) for step in (line["step"] - 1, line["step"]))
        for name, layer in line["layers"].items():
            old, new = (np.frombuffer(state[f"models.0.{name}"], np.float32).astype(float) for state in (before, after))
            assert layer["weight_norm"] == pytest.approx(np.linalg.norm(old), rel=1e-9)
            assert layer["update_norm"] == pytest.approx(np.linalg.norm(new - old), rel=1e-9)


class Known(torch.nn.Module):
    """A model whose gradient is known."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((5,), 2.0))

    def forward(self, x):
        return (self.weight * torch.tensor([0.0, 1.0, 1.5, -0.25, 2.0**20])).sum() * x.mean()


def test_diagnostics_of_a_known_gradient(tmp_path):
    """Bins are powers of two; zeros and what is beyond the last bin have their places."""
    settings = RunConfig(
        str(tmp_path), steps=1, global_batch=2, micro_batch=1, trackers=(), inspect_every=1, exact=True
    )
    config = optimizers.Config(OptimConfig(name="SGD", lr=0.5, momentum=0.0, clip=0.0, schedule="constant"), settings)
    with Run(config) as run:
        model, optimizer = run.prepare(Known(), config.optim)
        for batch in run.batches([torch.ones(1)] * 2, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs), micro)
            run.step(optimizer)
    (line,) = diagnostics(tmp_path)
    norm = (1 + 1.5**2 + 0.25**2 + 2.0**40) ** 0.5
    expected = {"weight_norm": 20**0.5, "gradient_norm": norm, "update_norm": norm / 2, "update_ratio": norm / 80**0.5}
    found = line["layers"]["weight"]
    assert found.pop("histogram") == {"-2": 1, "0": 2, "8": 1, "zero": 1}
    assert found == pytest.approx(expected, rel=1e-6)
