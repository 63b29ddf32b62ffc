"""Laws 3 to 5 for averages of weights, early stopping, and finished models that have the best weights."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.launching import ROOT, filled, furthest, hashes, saved_state, scores, steps, weights

from app import EMAConfig, OptimConfig, Run, UserError
from laws import averaged as script
from laws.averaged import CASES, EARLY, ROWS, STEPS, STOPPED, Config, Model, train
from laws.looping import made_steps

SCRIPT = ROOT / "tests" / "laws" / "averaged.py"
OTHERS = [("ddp_cpu", 3), ("fsdp_cpu", 2)]
LAYOUTS = [("cpu", 1), *OTHERS]


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """Return a function from a layout to the folder of its runs.

    Under FSDP2 it has also gone on with what DDP left.
    """
    root = tmp_path_factory.mktemp("averaged")
    runs = filled(root, SCRIPT, script.main)

    def averaged(profile, processes):
        left = [root / "from-ddp"] if profile == "fsdp_cpu" else []
        if left and not left[0].exists():
            shutil.copytree(averaged("ddp_cpu", 3) / "left", left[0])
        return runs(profile, processes, *left)[0]

    return averaged


def state(folder, step=STEPS):
    found = saved_state(folder, step)
    assert sum(name.startswith("averages.models.0.") for name in found) == 11  # weights, a mean and a variance
    return found


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("name", CASES)
def test_exact_mode_gives_every_layout_the_same_bits(averaged, name, layout):
    """Of losses, the scores of both sets, weights, averages, and the finished model; stopped and resumed, if it can."""
    reference = averaged("cpu", 1) / name
    other = averaged(*layout) / (f"{name}-stopped" if name in STOPPED else name)
    assert steps(other) == steps(reference) and scores(other) == scores(reference)
    assert state(other) == state(reference)
    assert hashes(other / "model") == hashes(reference / "model") != {}


@pytest.mark.parametrize("name", STOPPED)
def test_a_stop_changes_nothing(averaged, name):
    whole, stopped = averaged("cpu", 1) / name, averaged("cpu", 1) / f"{name}-stopped"
    assert steps(stopped) == steps(whole) and scores(stopped) == scores(whole)
    assert state(stopped) == state(whole) and weights(stopped) == weights(whole)


@pytest.mark.parametrize(("first", "second"), [(("ddp_cpu", 3), ("fsdp_cpu", 2)), (("fsdp_cpu", 2), ("cpu", 1))])
def test_resumed_on_another_layout(averaged, tmp_path, first, second):
    resumed = averaged(*second).parent / "from-ddp"
    if second == ("cpu", 1):
        resumed = shutil.copytree(averaged(*first) / "left", tmp_path / "run")
        train(resumed, CASES["every"])
    reference = averaged("cpu", 1) / "every"
    assert steps(resumed) == steps(reference) and scores(resumed) == scores(reference)
    assert state(resumed) == state(reference) and weights(resumed) == weights(reference)


def test_averages_are_those_of_their_formula(averaged):
    """Computed again from the weights in the checkpoints of all steps; with a warm-up, the decay begins smaller."""

    def tensors(run, name):
        states = [saved_state(averaged("cpu", 1) / run, step)[name] for step in range(1, 7)]
        return [torch.frombuffer(bytearray(state), dtype=torch.float32) for state in states]

    weight, average = "models.0.out.weight", "averages.models.0.out.weight"
    for run, decay_of in (("kept", lambda step: min(0.3, (1 + step) / (10 + step))), ("kept-cold", lambda step: 0.3)):
        weights_, found = tensors(run, weight), tensors(run, average)
        expected = found[0]
        for step in range(2, 7):
            decay = decay_of(step)
            expected = decay * expected + (1 - decay) * weights_[step - 1]
            torch.testing.assert_close(found[step - 1], expected, rtol=1e-5, atol=1e-7)
    weights_, found = tensors("kept-swa", weight), tensors("kept-swa", average)
    torch.testing.assert_close(found[5], torch.stack(weights_[1::2]).mean(0), rtol=1e-5, atol=1e-7)


def test_the_average_of_running_statistics(averaged):
    """It is in the finished model, and it is not the statistics of the weights."""
    run = averaged("cpu", 1) / "every"
    model, saved = load_file(run / "model" / "model.safetensors"), state(run)
    for name in ("norm.running_mean", "norm.running_var", "first.weight", "layers.1.bias"):
        assert model[name].numpy().tobytes() == saved[f"averages.models.0.{name}"] != saved[f"models.0.{name}"]
    assert model["scale"].numpy().tobytes() == saved["models.0.scale"]


def test_scores_before_the_first_step(averaged):
    """Those of the initial weights, at step 0, for each set; not counted as a step."""
    for name, kinds in (("every", ["eval"]), ("also", ["eval", "ema"])):
        found = [line for line in scores(averaged("cpu", 1) / name) if line["step"] == 0]
        names = [f"{kind}{part}/loss" for kind in kinds for part in ("", "-hard")]
        assert [next(key for key in line if key.endswith("/loss")) for line in found] == names
        assert len({line[key] for line, key in zip(found, names, strict=True) if "hard" not in key}) == 1
    assert [line["step"] for line in steps(averaged("cpu", 1) / "every")] == list(range(1, STEPS + 1))


def test_scores_are_those_of_the_average(averaged):
    """Beside the weights' own, which are those of a run without an average."""
    folder = averaged("cpu", 1)
    plain, both = scores(folder / "plain"), scores(folder / "also")
    assert [line for line in both if "eval/loss" in line and line["step"]] == [li for li in plain if "eval/loss" in li]
    raw, average = ([line[f"{kind}/loss"] for line in both if f"{kind}/loss" in line] for kind in ("eval", "ema"))
    assert len(raw) == len(average) == 7 and raw[1:] != average[1:]
    assert steps(folder / "plain") == steps(folder / "also")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_finished_model_is_the_best(averaged, layout):
    """Of all steps, the checkpoint of the first evaluation: its average, or where the weights are scored, those."""
    names = {"swa-stopped": "averages.", "also": "averages."}
    names |= {"best-of-weights": ""} if layout == LAYOUTS[0] else {}
    for name, prefix in names.items():
        run, tensor = averaged(*layout) / name, f"{prefix}models.0.first.weight"
        found = weights(run)["first.weight"]
        assert found == saved_state(run, 4)[tensor] != saved_state(run, STEPS)[tensor]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_early_stopping(averaged, layout):
    """Two evaluations after the best one, though the run was stopped between them; it is finished and says why."""
    run = averaged(*layout) / "early"
    info = json.loads((run / "run.json").read_text())
    assert [launch["step"] for launch in info["launches"]] == [0, EARLY - 3]
    assert (info["status"], info["step"]) == ("finished", EARLY) and len(steps(run)) == EARLY and weights(run)
    assert "after step 8, in 2 evaluations" in info["stopped_early"]
    reference = averaged("cpu", 1)
    assert scores(run) == scores(reference / "early") and weights(run) == weights(reference / "early")


def test_patience_of_0_goes_on(averaged):
    """To the end that the run would have had; until then it stays finished, however often it is repeated."""
    folder = averaged("cpu", 1)
    info = json.loads((folder / "gone-on" / "run.json").read_text())
    assert [launch["step"] for launch in info["launches"]] == [0, EARLY, EARLY]
    assert (info["status"], info["step"], info["stopped_early"]) == ("finished", STEPS, None)
    assert steps(folder / "gone-on") == steps(folder / "every") and state(folder / "gone-on") == state(folder / "every")


@pytest.mark.parametrize("layout", OTHERS)
def test_without_exact_mode_layouts_agree(averaged, layout):
    reference, other = (averaged(*where) / "usual" for where in (("cpu", 1), layout))
    assert furthest(steps(reference), steps(other)) < 1e-4
    one, two = (load_file(run / "model" / "model.safetensors") for run in (reference, other))
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-3


def test_a_model_that_is_not_averaged(tmp_path):
    """Neither its weights nor its statistics; those of the other one are updated once a step, by its own optimizer."""
    config = Config(ema=EMAConfig(uniform=True))
    config.run.dir, config.run.steps, config.run.eval_every = str(tmp_path / "run"), 3, 100
    means = []
    with Run(config) as run:
        first, optimizer = run.prepare(Model(), OptimConfig(lr=0.01))
        second, other = run.prepare(Model(), OptimConfig(lr=0.01), averaged=False)
        start = first.norm.running_mean.clone()
        for batch in run.batches(ROWS, torch.stack):
            for model, own in ((first, optimizer), (second, other)):
                for micro in batch.micros(model):
                    run.backward((model(micro.inputs) - 1).square().mean(), micro)
                run.step(own)
            means.append(first.norm.running_mean.clone())
        averages = dict(run.accelerator.averages)
    inside = [t for t in (*first.parameters(), first.norm.running_mean, first.norm.running_var) if t is not first.scale]
    assert set(averages) == set(inside)
    torch.testing.assert_close(averages[first.norm.running_mean], torch.stack([start, *means]).mean(0))


@pytest.mark.parametrize(
    ("averaging", "settings", "said"),
    [
        ({"decay": 1.0}, {}, "--ema.decay 1.0 does not work: it must be from 0 to below 1"),
        ({"decay": -0.1}, {}, "--ema.decay -0.1 does not work"),
        ({"start": 0.5}, {}, "--ema.start does nothing without --ema.decay"),
        ({}, {"best": "-ema/loss"}, "there is no average of the weights"),
        ({"decay": 0.9}, {"best": "-ema/loss"}, "with --ema.use instead, eval/loss is the score of the average"),
        ({}, {"best": "", "patience": 2}, "--run.patience 2 has no score to go by"),
        ({}, {"best": "auto", "model": "best"}, "--run.model best has no score to go by"),
        ({}, {"best": "eval/lost", "patience": 2}, "there is no such score; did you mean eval/loss"),
        ({}, {"best": "eval/f2", "model": "best"}, "--run.model best goes by --run.best eval/f2"),
    ],
)
def test_what_does_not_go_together(tmp_path, averaging, settings, said):
    with pytest.raises(UserError, match=said):
        train(tmp_path / "run", EMAConfig(**averaging), **{"steps": 4, **settings})


def test_patience_that_ends_with_the_run(tmp_path):
    """The run has made all its steps, so it has not stopped early."""
    train(tmp_path / "run", EMAConfig(), steps=12, patience=2, min_change=100.0)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (info["status"], info["step"], info["stopped_early"]) == ("finished", 12, None)


def test_points_of_a_file(tmp_path):
    """The run keeps what was in it, and goes on without the file."""
    file = tmp_path / "rates.txt"
    file.write_text("0:0.5\n100%:1  # the peak\n")
    config = Config()
    config.run.dir, config.run.steps, config.run.eval_every = str(tmp_path / "run"), 3, 100
    config.optim = OptimConfig(lr=0.01, schedule="points", points=(str(file),))
    with Run(config) as run:
        model, optimizer = run.prepare(Model(), config.optim)
        for _ in made_steps(run, model, optimizer, ROWS):
            pass
    assert [line["lr"] for line in steps(tmp_path / "run")] == pytest.approx([0.005, 0.0075, 0.01])
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert kept["optim"]["points"] == ["0:0.5", "100%:1"]
