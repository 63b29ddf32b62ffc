"""A run that is asked to stop in the middle of an evaluation, in one process: what is saved, and what is made again."""

import json
import os
import signal
import time

import torch
from support.tiny import DATA, Config, saved, state_folder
from torch import nn

from app import OptimConfig, Run, RunConfig


def ask(run):
    """Send this process SIGTERM, and wait until its run has heard it."""
    os.kill(os.getpid(), signal.SIGTERM)
    while not run.services.notice.asked:
        time.sleep(0.001)


class Mean(nn.Module):
    """Subtract a running mean, which is another tensor after each pass; count passes, outside any tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.passes = 0

    def forward(self, x):
        if self.training:
            self.mean, self.passes = 0.9 * self.mean + 0.1 * x.detach().mean(0), self.passes + 1
        return x - self.mean

    def get_extra_state(self):
        return {"passes": self.passes}

    def set_extra_state(self, state):
        self.passes = state["passes"]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), Mean(), nn.Dropout(0.2), nn.Linear(6, 1))


def evaluate(run, network, ask_at=None, name="loss"):
    scores = run.scores_of()
    for number, micro in enumerate(run.evaluation(network, DATA[:20], torch.stack)):
        if number == ask_at:
            ask(run)
        scores.update(micro.weight, loss=network(micro.inputs).square().mean())
    run.log(scores.compute(f"eval-{name}/"))


def train(folder, ask_in=(), before=False, after=None, ask_after=(), between=False, **settings):
    """Train eight steps and evaluate in each, before the update or after it; ask to stop in the evaluations of some.

    Args:
        between: the evaluation before the update comes after the step's micro-batches.

    Returns the steps whose bodies were entered.
    """
    after = not before if after is None else after
    settings = {"global_batch": 10, "micro_batch": 5, "trackers": (), "epochs": 2.0, "save_every": 3, **settings}
    bodies = []
    with Run(Config(RunConfig(dir=str(folder), log_every=1, eval_every=1, **settings))) as run:
        network, optimizer = run.prepare(model(), OptimConfig(lr=0.1))
        for batch in run.batches(DATA, torch.stack):
            bodies.append(run.steps_done)
            stop = 2 if run.steps_done in ask_in else None
            if before and not between:
                evaluate(run, network, stop)
            for micro in batch.micros(network):
                run.backward(network(micro.inputs).square().mean(), micro)
            if between:
                evaluate(run, network, stop)
            run.step(optimizer)
            if after:
                evaluate(run, network, name="first")
                evaluate(run, network, 2 if run.steps_done in ask_after else None if before else stop)
        run.finish(network)
    return bodies


def outcome(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [{k: v for k, v in line.items() if k != "samples_per_second"} for line in lines]
    return lines, (folder / "model" / "model.safetensors").read_bytes()


def passes(folder) -> int:
    """Read how many passes the model has counted, from the last checkpoint."""
    objects = json.loads((state_folder(folder, 8) / "objects.json").read_text())
    return objects["extras"]["models.0.2._extra_state"]["items"][0][1]


def test_a_step_is_repeated_for_its_evaluation_alone(tmp_path):
    """All its scores are logged once; weights and BatchNorm's statistics are those of the run that never stopped."""
    train(tmp_path / "whole")
    assert train(tmp_path / "run", ask_in=[4]) == [1, 2, 3, 4]
    assert saved(tmp_path / "run") == [3, 4] and not (tmp_path / "run" / "model").exists()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "preempted"
    assert train(tmp_path / "run", ask_in=[4]) == [4]  # once more
    assert train(tmp_path / "run") == [4, 5, 6, 7, 8]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert passes(tmp_path / "run") == passes(tmp_path / "whole") == 16
    assert train(tmp_path / "run") == []


def test_the_last_evaluation_of_a_run(tmp_path):
    """The run is not finished before it is made."""
    train(tmp_path / "whole")
    train(tmp_path / "run", ask_in=[8])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "preempted"
    assert train(tmp_path / "run") == [8]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_an_evaluation_before_the_update(tmp_path):
    """What is saved is the step before it."""
    train(tmp_path / "whole", before=True)
    train(tmp_path / "run", before=True, ask_in=[5])
    assert saved(tmp_path / "run") == [3, 4]
    assert train(tmp_path / "run", before=True) == [5, 6, 7, 8]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_an_evaluation_between_the_micro_batches_and_the_update(tmp_path):
    """It is finished first: buffers are of neither step there."""
    both = {"before": True, "between": True, "after": False}
    train(tmp_path / "whole", **both)
    train(tmp_path / "run", ask_in=[5], **both)
    assert saved(tmp_path / "run") == [3, 5]
    assert train(tmp_path / "run", **both) == [6, 7, 8]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_repeated_step_that_is_left_before_its_update(tmp_path):
    """Its checkpoint has been committed, and is that of no other step."""
    both = {"before": True, "after": True, "save_every": 100}
    train(tmp_path / "whole", **both)
    train(tmp_path / "run", ask_after=[4], **both)
    assert train(tmp_path / "run", ask_in=[4], **both) == [4]
    assert saved(tmp_path / "run") == [4]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["step"] == 4
    assert train(tmp_path / "run", **both) == [4, 5, 6, 7, 8]
    assert outcome(tmp_path / "run")[1] == outcome(tmp_path / "whole")[1]


def test_scores_of_a_repeated_step_choose_the_best_checkpoint(tmp_path):
    """The first step's, as the loss falls; the checkpoint was committed before it was scored."""
    settings = {"best": "eval-loss/loss", "save_every": 100, "keep": 1}
    train(tmp_path / "whole", **settings)
    train(tmp_path / "run", ask_in=[1], **settings)
    train(tmp_path / "run", **settings)
    assert saved(tmp_path / "run") == saved(tmp_path / "whole") == [1, 8]


def test_saving_before_the_best_score_is_logged(tmp_path):
    """It is the best checkpoint all the same."""
    settings = RunConfig(
        dir=str(tmp_path), global_batch=10, micro_batch=5, trackers=(), best="eval/x", keep=1, save_every=2, epochs=2.0
    )
    with Run(Config(settings)) as run:
        network, optimizer = run.prepare(model(), OptimConfig(lr=0.1))
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(network):
                run.backward(network(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            run.save()
            if run.due(4):
                run.log({"eval/x": 0.99 if run.steps_done == 4 else 0.5})
        run.finish(network)
    assert saved(tmp_path) == [4, 8]
