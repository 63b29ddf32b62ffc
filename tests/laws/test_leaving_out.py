"""The law of steps that are left out: a run has the state of the run whose spoilt batches were never made."""

import json
import time

import pytest
import torch
from support.launching import ROOT, filled, scores

from app import EMAConfig, Run, UserError
from app.checkpoints import finite, record
from app.training.loop.before_step import BeforeStep
from laws import leaving_out as script
from laws.leaving_out import AVERAGES, NEVER, ORDERS, PARTS, SPOILT, batch_of, differing, train

SCRIPT = ROOT / "tests" / "laws" / "leaving_out.py"


@pytest.fixture(scope="module")
def left_out(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("left-out"), SCRIPT, script.main)


def others(which, *marks):
    return [pytest.param(layout, which, marks=marks) for layout in (("ddp_cpu", 3), ("fsdp_cpu", 2))]


@pytest.mark.parametrize(
    ("layout", "which"), [(("cpu", 1), "all"), *others("some"), *others("all", pytest.mark.exhaustive)]
)
def test_nothing_of_a_step_that_is_left_out_stays(left_out, layout, which):
    """Neither in the weights, any buffer, the optimizers, averages nor counters; first, last and one after another.

    Of one model, and of two, of which either has the gradient that is not finite; stopped and resumed too.
    """
    folder, _ = left_out(*layout, which)
    told = json.loads((folder / "told.json").read_text())
    expected = [f"{name}, {order}" for name, _, orders in script.planned(False, which) for order in orders]
    assert [*told] == expected and len(told) > (25 if which == "all" else 9)
    assert {name: different for name, different in told.items() if different} == {}
    for name in ("usual-all", "two-0", "two-1"):
        assert [line["skipped_steps"] for line in scores(folder / name / "middle")] == [1, 2, 3]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.exhaustive)])  # it puts back the same
def test_each_part_would_keep_something(tmp_path, monkeypatch, part, exact):
    """A control of the law above: each kind of buffer differs where it is not put back."""
    never = train(tmp_path / "never", [part], NEVER, exact=exact)
    assert differing(never, train(tmp_path / "left", [part], ORDERS["middle"], exact=exact)) == []
    monkeypatch.setattr(BeforeStep, "put_back", lambda self: None)
    for refuses in ("check_state", "check_model"):  # what they refuse is what is looked for
        monkeypatch.setattr(finite, refuses, lambda *args: None)
    assert differing(never, train(tmp_path / "kept", [part], ORDERS["middle"], exact=exact))


@pytest.mark.parametrize("which", ["0", "1"])
def test_two_optimizers_would_keep_something(tmp_path, monkeypatch, which):
    """The update of the first one, where the second one's gradient is not finite."""
    never = train(tmp_path / "never", [], NEVER, spoilt=which)
    monkeypatch.setattr(BeforeStep, "put_back", lambda self: None)
    kept = differing(never, train(tmp_path / "kept", [], ORDERS["middle"], spoilt=which))
    assert any(name.startswith("optimizers.0") for name in kept) == (which == "1")


@pytest.mark.parametrize("switched_on", [0, 4])
def test_a_uniform_average_is_the_mean_of_the_weights_that_there_were(tmp_path, switched_on):
    """With steps left out among them; switched on in the middle of a run, it is that of the weights since then."""
    weights, averages, order = [], [], [0, SPOILT, 1, SPOILT, 2, 3, SPOILT, 4]

    def then(run):
        weight = run.accelerator.models[0][0].blocks[0].weight
        weights.append(weight.detach().clone())
        averages.append(run.accelerator.averages.get(weight, weight).detach().clone())

    if switched_on:
        train(tmp_path, [], order, then=then, stop_at=switched_on)
    uniform = EMAConfig(uniform=True, start=1 - bool(switched_on))
    train(tmp_path, [], order, uniform, then=then, changed="accept")
    made = [weight for weight, number in zip(weights, order, strict=True) if number != SPOILT]
    assert len(made) == 5  # of which two were made by step 4
    torch.testing.assert_close(averages[-1], torch.stack(made[1:] if switched_on else made).mean(0))


def test_a_checkpoint_has_the_counts_of_its_step(tmp_path, monkeypatch):
    """Though it is written while training goes on and counts."""
    made, write = [0], record.write

    def slow(folder, about):
        """Wait for two more steps, which do not wait for this."""
        while about.step + 1 < 8 and made[0] < about.step + 1:
            time.sleep(0.01)
        return write(folder, about)

    def then(run):
        made[0] = run.steps_done

    monkeypatch.setattr(record, "write", slow)
    train(tmp_path, [], [*range(8)], AVERAGES["uniform"], then=then, save_every=2)
    for step in (6, 8):
        saved = record.read(tmp_path / "checkpoints" / f"step-{step:08d}")
        assert (saved.counts.made, saved.counts.averaged) == (step, (step - 1,))


def test_a_step_with_two_updates_of_one_optimizer_is_not_left_out(tmp_path, monkeypatch):
    """Of the first one there is no copy."""
    step = Run.step

    def twice(run, optimizer):
        step(run, optimizer)
        (model,) = run.accelerator.models
        for micro in run._opened.current.batch.micros(model):
            run.backward(model(batch_of(SPOILT, micro.index)).square().mean(), micro)
        step(run, optimizer)

    monkeypatch.setattr(Run, "step", twice)
    with pytest.raises(UserError, match="cannot leave out step 1: AdamW had updated weights in it before"):
        train(tmp_path, [], NEVER)
