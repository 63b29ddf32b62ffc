"""A loss that is not finite: blamed on its step, whether or not that step is measured, and on its samples."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from support.tiny import DATA, Config, saved
from torch import nn

from app import EMAConfig, OptimConfig, Run, RunConfig, UserError
from app.__main__ import main as commands
from app.rundir.trackers import Trackers
from app.training.loop.gradients import Gradients
from app.training.loop.step_metrics import StepMetrics
from laws.leaving_out import Config as Averaged

SPOILT = [*DATA[:13], torch.full((4,), torch.inf), *DATA[14:]]


def train(folder, clip=0.0, **settings):
    """Train for eight steps, of which the first and the last are measured.

    Returns the weights after each step, where the spoilt sample first was, and what else the tests look at.
    """
    seen, weights, where = {}, [], {}
    settings = {"global_batch": 10, "micro_batch": 3, "epochs": 2.0, "trackers": (), "log_every": 100, **settings}
    settings |= {"save_every": 100, "check_every": 100}
    try:
        with Run(Config(RunConfig(dir=str(folder), **settings))) as run:
            model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig(lr=0.1, clip=clip))
            for batch in run.batches(SPOILT, torch.stack):
                for micro in batch.micros(model):
                    if 13 in micro.ids:
                        where.setdefault("first", (run.steps_done, micro.index, micro.ids.tolist()))
                    run.backward(model(micro.inputs).square().mean(), micro)
                run.step(optimizer)
                weights.append(model.weight.detach().clone())
                seen = dict(run.scores)
    except UserError as error:
        return str(error), weights, where["first"], seen
    return "", weights, where["first"], seen


@pytest.fixture
def blind(monkeypatch):
    """Have a CPU that is not looked at, as a GPU is not."""
    monkeypatch.setattr(Gradients, "finite", lambda self, optimizer: True, raising=False)
    add = StepMetrics.add_norm

    def add_norm(self, norm, index):
        if self.step.index in (0, 7):
            return add(self, norm, index)
        self.norms[index] = norm
        return True

    monkeypatch.setattr(StepMetrics, "add_norm", add_norm)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_run_stops_before_the_update_of_the_step_that_it_names(tmp_path, clip, exact):
    words, weights, (step, micro, ids), _ = train(tmp_path, clip, exact=exact)
    assert f"gradient of step {step} is" in words and f"micro-batch {micro} on rank 0: samples {ids}" in words
    assert 1 < step < 8 and len(weights) == step - 1 and all(w.isfinite().all() for w in weights)
    assert saved(tmp_path) == []


def test_steps_are_skipped_that_are_not_clipped(tmp_path):
    """In both epochs; nothing of them reaches the weights."""
    words, weights, (step, _, _), scores = train(tmp_path, nonfinite="skip")
    assert words == "" and len(weights) == 8 and scores["skipped_steps"] == 2
    assert all(w.isfinite().all() for w in weights) and torch.equal(weights[step - 1], weights[step - 2])


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_that_nobody_waited_for_is_named_when_numbers_are_read(tmp_path, blind, clip):
    """By its loss, its micro-batch and samples; and no checkpoint has it."""
    words, _, (step, micro, ids), _ = train(tmp_path, clip)
    assert f"the loss of step {step} was not finite (micro-batch {micro} on rank 0: samples {ids})" in words
    assert re.search(r"found in step 8; nothing of it was saved", words) and saved(tmp_path) == []


class Masked(nn.Module):
    """A linear model with a constant mask of -inf, a buffer that it changes, and extra state."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.bfloat16))
        self.extra = torch.zeros(1)

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, state):
        self.extra = state["extra"]

    def forward(self, x):
        return self.linear(x)


def spoil(run, model, what):
    """Make one number that is not finite of a kind of tensor that checkpoints hold."""
    optimizer = run.accelerator.optimizers[0]
    places = {
        "mask": lambda: model.mask[1],
        "mean": lambda: model.mean,
        "extras.models.0._extra_state.extra": lambda: model.extra,
        "the average of linear.weight": lambda: run.accelerator.averages[model.linear.weight][0],
        "optimizers.0.models.0.linear.weight.exp_avg": lambda: optimizer.state[model.linear.weight]["exp_avg"][1],
        "linear.bias": lambda: model.linear.bias,
    }
    with torch.no_grad():
        places[what]()[-1] = torch.nan


def train_masked(folder, then=lambda run, model: None, finished=lambda model: None):
    config = Averaged(ema=EMAConfig(decay=0.5))
    config.run = RunConfig(dir=str(folder), global_batch=20, micro_batch=5, epochs=4.0, save_every=2, trackers=())
    with Run(config) as run:
        model, optimizer = run.prepare(Masked(), OptimConfig(lr=0.01))
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            then(run, model)
        finished(model)
        run.finish(model)


KINDS = [
    "mask",
    "mean",
    "extras.models.0._extra_state.extra",
    "the average of linear.weight",
    "optimizers.0.models.0.linear.weight.exp_avg",
    "linear.bias",
]


@pytest.mark.parametrize("what", KINDS)
def test_no_checkpoint_has_a_number_that_training_made_and_is_not_finite(tmp_path, what):
    """In any of its tensors: the run fails and names it, and says which checkpoint there is."""

    def then(run, model):
        if run.steps_done == 6:
            spoil(run, model, what)

    with pytest.raises(UserError, match="not finite" if what == "linear.bias" else "has nan in it") as refused:
        train_masked(tmp_path, then)
    assert what in str(refused.value) and "the newest checkpoint is step 4" in str(refused.value)
    info = json.loads((tmp_path / "run.json").read_text())
    assert (info["status"], info["error"]) == ("failed", f"UserError: {refused.value}")
    assert saved(tmp_path)[-1] == 4 and not (tmp_path / "model").exists()
    train_masked(tmp_path)  # the constant mask of -inf is no such number
    assert saved(tmp_path)[-1] == 8 and (tmp_path / "model").exists()


def test_no_finished_model_has_one(tmp_path):
    """Nor an exported one, of a checkpoint that an earlier version has saved."""

    def finished(model):
        with torch.no_grad():
            model.mean[0] = torch.inf

    with pytest.raises(UserError, match=r"the model is not written: mean has inf in it; the newest .* is step 8"):
        train_masked(tmp_path, finished=finished)
    assert not (tmp_path / "model").exists() and saved(tmp_path)[-1] == 8
    train_masked(tmp_path)
    assert (tmp_path / "model").exists()


@pytest.mark.parametrize("settings", [{}, {"nonfinite": "skip"}, {"log_every": 1}])
def test_what_nothing_is_trained_on_may_be_not_finite(tmp_path, capsys, settings):
    """It is null in metrics.jsonl, with one warning for each name; a loss with the same numbers stops the run."""
    settings = {"global_batch": 10, "micro_batch": 5, "epochs": 2.0, "log_every": 3, "trackers": (), **settings}
    with Run(Config(RunConfig(dir=str(tmp_path), check_every=2, **settings))) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig(lr=0.1, clip=0.0))
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(model):
                run.observe({"margin": torch.tensor(torch.nan), "ratio": torch.tensor(torch.inf)}, micro)
                run.observe({"fine": torch.tensor(1.0)}, micro)
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            if run.due(2):
                run.log({"eval/empty": float("nan")})
        run.finish(model)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "ids" in line]
    assert len(steps) >= 5 and all(line["margin"] is None and line["ratio"] is None for line in steps)
    assert all(line["fine"] == 1.0 and line["loss"] > 0 for line in steps)
    told = [line for line in capsys.readouterr().err.splitlines() if "nothing is trained on it" in line]
    assert len(told) == 2 and "margin is nan in step 1" in told[0] and "ratio is inf" in told[1]
    for words in (["runs", str(tmp_path)], ["plot", str(tmp_path)], ["watch", str(tmp_path)]):
        assert commands(words) == 0, words


def test_trackers_get_numbers_that_are_finite(tmp_path):
    sent = []
    trackers = Trackers((), tmp_path, {}, sent.append)
    trackers.trackers["one"] = SimpleNamespace(log=lambda numbers, step: sent.append((step, numbers)))
    trackers.log(3, {"loss": 1.5, "margin": math.nan, "ratio": -math.inf, "count": 2, "ids": "0a"})
    assert sent == [(3, {"loss": 1.5, "count": 2})]
