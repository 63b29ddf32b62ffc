"""A loss that is not finite: blamed on its step, whether or not that step is measured, and on its samples."""

import re

import pytest
import torch
from torch import nn

from app import OptimConfig, Run, RunConfig, UserError
from app.training.gradients import Gradients
from app.training.step_metrics import StepMetrics
from tiny import DATA, Config, saved

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
