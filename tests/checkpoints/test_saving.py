"""app.checkpoints.manager, in one process: checkpoints are written while training goes on."""

import json
import threading
import time

import pytest
import torch.distributed.checkpoint as dcp
from support.tiny import saved, state_folder, state_of, train

from app import UserError
from app.checkpoints.record import RECORD
from app.distributed.state import sharded

SAVE = dcp.save


@pytest.mark.parametrize("beside", [True, False])
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch, beside):
    """It holds the weights and scores of its own step; without --run.save-async training waits."""
    go_on, seen, weights = threading.Event(), [], {}

    def slow(*args, **options):
        if beside:
            assert go_on.wait(20)
        return SAVE(*args, **options)

    def after(run, model):
        weights[run.steps_done] = model.weight.detach().clone()
        run.log({"eval/step": run.steps_done})
        if run.steps_done == 4:
            seen.append(saved(tmp_path) == [2])
            go_on.set()

    monkeypatch.setattr(sharded.dcp, "save", slow)
    train(tmp_path, after, save_async=beside, keep=4)
    assert seen == [not beside]
    assert saved(tmp_path) == [2, 4, 6, 8]
    for step in (2, 4, 6, 8):
        assert state_of(tmp_path, step).equal(weights[step])
        record = json.loads((state_folder(tmp_path, step).parent / RECORD).read_text())
        assert record["scores"] == record["metrics"] == {"eval/step": step}
    assert not weights[2].equal(weights[8])


def test_a_new_checkpoint_waits_for_the_one_in_flight(tmp_path, monkeypatch):
    """Two are never written at once, and leaving waits for the last."""
    writing = []

    def slow(*args, **options):
        writing.append("begin")
        time.sleep(0.2)
        result = SAVE(*args, **options)
        writing.append("end")
        return result

    monkeypatch.setattr(sharded.dcp, "save", slow)
    train(tmp_path)
    assert writing == ["begin", "end"] * 4
    assert saved(tmp_path) == [6, 8]


def test_one_that_fails_costs_a_warning_and_the_next_is_tried(tmp_path, monkeypatch, capsys):
    calls = []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return SAVE(*args, **options)

    monkeypatch.setattr(sharded.dcp, "save", failing)
    train(tmp_path, keep=9)
    assert saved(tmp_path) == [2, 6, 8]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert "no checkpoint was saved at step 4" in line and "No space left" in line and "step 2" in line


def test_one_in_flight_is_committed_when_the_run_fails(tmp_path, monkeypatch):
    """The run fails with its own error."""

    def slow(*args, **options):
        time.sleep(0.3)
        return SAVE(*args, **options)

    def after(run, model):
        if run.steps_done == 5:
            raise UserError("enough")

    monkeypatch.setattr(sharded.dcp, "save", slow)
    with pytest.raises(UserError, match="enough"):
        train(tmp_path, after)
    assert saved(tmp_path) == [2, 4]
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"


def test_the_best_is_compared_with_the_one_in_flight(tmp_path, monkeypatch):
    """An evaluation that is worse than the one whose checkpoint is being written is not saved."""
    go_on = threading.Event()

    def slow(*args, **options):
        assert go_on.wait(20)
        return SAVE(*args, **options)

    def after(run, model):
        if run.steps_done in (1, 2):
            run.log({"eval/x": 1.0 / run.steps_done})
        if run.steps_done == 3:
            go_on.set()

    monkeypatch.setattr(sharded.dcp, "save", slow)
    train(tmp_path, after, best="eval/x", eval_every=1, save_every=100, keep=1)
    assert saved(tmp_path) == [1, 8]
