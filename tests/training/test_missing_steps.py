"""Steps of which no sample can be read: left out, where missing samples are, and nothing of them is left."""

import itertools

import pytest
import torch
from support.launching import metrics, steps
from support.tiny import DATA, state_of, train

from app import UserError
from app.data.rows import MISSING
from app.sampling.batch_plan import BatchPlan

PLAN = BatchPlan(len(DATA), 2 * len(DATA), 10, 5)
ALONE = 4
"""The step that is left out, counted from 1."""


class Holes:
    """Rows of which some cannot be read."""

    skips, digested = True, ()

    def __init__(self, step):
        self.missing = {i for turn in PLAN.step(step - 1, 0, 1).turns for i in turn.ids.tolist()}

    def __len__(self):
        return len(DATA)

    def __getitem__(self, row):
        return self.__getitems__([row])[0]

    def __getitems__(self, rows):
        return [MISSING if row in self.missing else DATA[row] for row in rows]


def trained(folder, rows, **settings):
    """Return the weights after each step, and whether the optimizer was the same as after the step before."""
    weights, moments = [], [{}]

    def after(run, model):
        weights.append(model.weight.detach().clone())
        state = run.accelerator.optimizers[0].state.get(model.weight, {})
        moments.append({name: value.clone() for name, value in state.items()})

    train(folder, after, rows, log_every=1, **settings)
    same = [bool(a) and all(a[name].equal(b[name]) for name in b) for a, b in itertools.pairwise(moments)]
    return weights, same


def test_a_step_without_samples_changes_nothing_and_is_counted(tmp_path, capsys):
    weights, same = trained(tmp_path, Holes(ALONE))
    changed = [not a.equal(b) for a, b in itertools.pairwise(weights)]
    assert len(weights) == PLAN.steps and [i + 2 for i, each in enumerate(changed) if not each] == [ALONE]
    assert [i + 1 for i, each in enumerate(same) if each] == [ALONE]
    lines = {line["step"]: line for line in steps(tmp_path)}
    assert len(lines) == PLAN.steps and "loss" not in lines[ALONE] and "loss" in lines[ALONE + 1]
    assert lines[ALONE]["missing_samples"] == 10 and lines[PLAN.steps]["missing_samples"] == 20
    assert [line["skipped_steps"] for line in metrics(tmp_path) if "skipped_steps" in line] == [1]
    said = f"warning: none of the samples of step {ALONE} can be read; the step is skipped (--data.bad skip)"
    told = capsys.readouterr().err
    assert told.count(said) == 1 and told.count("warning: 20 samples were left out, as they could not be read") == 1


@pytest.mark.parametrize("first", [1, ALONE])
def test_a_run_that_begins_at_such_a_step_goes_on(first, tmp_path):
    """Nothing was read yet that could take the place of what is missing."""
    trained(tmp_path / "whole", Holes(first))
    trained(tmp_path / "stopped", Holes(first), stop_at=ALONE - 1)
    trained(tmp_path / "stopped", Holes(first), stop_at=ALONE)
    trained(tmp_path / "stopped", Holes(first))
    assert torch.equal(*(state_of(tmp_path / name, PLAN.steps) for name in ("whole", "stopped")))
    assert steps(tmp_path / "stopped") == steps(tmp_path / "whole")


def test_data_of_which_nothing_can_be_read_are_refused(tmp_path):
    rows = Holes(1)
    rows.missing = {*range(len(DATA))}
    with pytest.raises(UserError, match="step 1: none of its samples can be read"):
        trained(tmp_path, rows)
