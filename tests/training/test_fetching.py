"""fetching: stages beside the step give the same bits, wait for it, fail where they belong, and end with it."""

import threading
import time

import numpy as np
import pytest
import torch
from support.launching import steps as logged
from support.tiny import Config
from torch import nn

from app import OptimConfig, Run, RunConfig, UserError
from app.sampling.batch_plan import BatchPlan
from app.training.feeding.fetching import Composed, ahead
from app.training.feeding.loader import load

CPU = torch.device("cpu")
PLAN = BatchPlan(samples=23, total=46, global_batch=6, micro_batch=2, seed=3)
ROWS = [float(i) for i in range(23)]


def doubled(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


def named(value: torch.Tensor) -> dict:
    return {"x": value}


def noisy(row: float, generator: np.random.Generator) -> float:
    return row + generator.random()


def shaken(rows: list) -> torch.Tensor:
    """Draw from the global generators, as a collate function may."""
    return torch.tensor(rows) + torch.rand(len(rows))


def loaded(plan=PLAN, collate=shaken, fetch=(), workers=0, start=0, **more):
    return load(plan, range(start, plan.steps), ROWS, collate, 0, 1, CPU, workers, noisy, fetch, **more)


def values(steps) -> list:
    return [[(turn.index, turn.inputs["x"].tolist()) for turn in step.turns] for step in steps]


@pytest.mark.parametrize(("workers", "micro_batch"), [(0, 2), (0, 6), (2, 2)])
def test_stages_change_no_bit(workers, micro_batch):
    plan = BatchPlan(23, 46, 6, micro_batch, seed=3)
    fetched = values(loaded(plan, fetch=(doubled, named), workers=workers))
    assert fetched == values(loaded(plan, Composed(shaken, (doubled, named)))) and len(fetched) == plan.steps
    assert values(loaded(plan, fetch=(doubled, named), start=3)) == fetched[3:]


class Counting:
    """A stage that counts its micro-batches, and fails in one of them."""

    def __init__(self, fails_at: int = -1, error: Exception | None = None):
        self.done, self.fails_at, self.error = 0, fails_at, error

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        self.done += 1
        if self.done - 1 == self.fails_at:
            raise self.error
        return value


@pytest.mark.parametrize(("micro_batch", "most"), [(6, 1 + 2), (2, 3 + 3)])
def test_stages_wait_for_a_slow_step(micro_batch, most):
    """Of one micro-batch a step, those of two more steps are on their way; of three, those of one more."""
    first, second = Counting(), Counting()
    steps = loaded(BatchPlan(23, 46, 6, micro_batch, seed=3), fetch=(first, second, named)[:2])
    next(steps)
    time.sleep(0.2)
    assert first.done == second.done == most
    steps.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_an_error_is_raised_at_its_step(stage):
    error = UserError("node 7 has no features")
    fetch = [named, lambda value: value]
    fetch.insert(stage, Counting(fails_at=3 * 4 + 1, error=error))
    steps, seen = loaded(fetch=fetch), []
    with pytest.raises(UserError) as raised:
        for step in steps:
            seen.append(step.index)
            time.sleep(0.02)
    assert raised.value is error and seen == [0, 1, 2, 3]
    assert not own_threads()


def test_an_error_of_rows_waits_for_the_steps_before():
    """Rows are read ahead, and what they raise must not end a step that is whole."""
    last = PLAN.step(4, 0, 1).turns[1].ids[0]

    def refuses(rows: list) -> torch.Tensor:
        if last <= rows[0] < last + 1:
            raise ValueError("a row is broken")
        return torch.tensor(rows)

    steps, seen = loaded(collate=refuses, fetch=named), []
    with pytest.raises(ValueError, match="a row is broken"):
        for step in steps:
            seen.append(step.index)
    assert not own_threads() and seen == values_until(refuses)


def values_until(refuses) -> list[int]:
    """Give the steps that come whole without threads."""
    seen = []
    with pytest.raises(ValueError, match="a row is broken"):
        for step in loaded(collate=Composed(refuses, named)):
            seen.append(step.index)
    return seen


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fetch-")]


def test_closing_ends_the_threads_and_drops_what_waits():
    stage, begun = Counting(), threading.Event()

    def slow(value: torch.Tensor) -> torch.Tensor:
        begun.set()
        time.sleep(0.05)
        return stage(value)

    steps = loaded(fetch=(slow, named))
    next(steps)
    begun.clear()
    assert begun.wait(5) and own_threads()
    steps.close()
    assert not own_threads() and stage.done < 6


def test_other_devices_get_copies_in_a_stage_of_their_own():
    plain = load(PLAN, range(2), ROWS, shaken, 0, 1, CPU, 0, noisy)
    (first, _) = ahead(plain, [named], torch.device("meta"))
    assert all(turn.inputs["x"].device.type == "meta" for turn in first.turns)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(1, 4), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.layer(x.unsqueeze(1))).square().mean()


def train(folder, fetch=(), collate=shaken, at_step=None):
    settings = RunConfig(dir=str(folder), steps=6, global_batch=6, micro_batch=2, log_every=1, trackers=())
    with Run(Config(settings)) as run:
        model, optimizer = run.prepare(Model(), OptimConfig())
        batches = run.batches(ROWS, collate, augment=noisy, fetch=fetch)  # a name that outlives an error
        for batch in batches:
            for micro in batch.micros(model):
                run.backward(model(micro.inputs["x"]), micro)
            run.step(optimizer)
            if run.due(3):
                list(run.evaluation(model, ROWS, collate, fetch=fetch))
            if at_step:
                at_step(run)
    return logged(folder)


def test_a_run_is_the_same_with_and_without(tmp_path):
    """Dropout too: what is read ahead leaves the generators of the step alone."""
    one = train(tmp_path / "fetched", (doubled, named))
    assert one == train(tmp_path / "plain", collate=Composed(shaken, (doubled, named))) and len(one) == 6


def test_what_a_step_takes_is_there_before_it_ends(tmp_path):
    """The stages of the next micro-batches work while the body of a step waits."""
    counting = Counting()

    def wait(run) -> None:
        until, wanted = time.monotonic() + 10, min(3 * (run.steps_done + 1), 18)
        while counting.done < wanted and time.monotonic() < until:
            time.sleep(0.01)
        assert counting.done >= wanted

    train(tmp_path, (counting, named), at_step=wait)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, None])
def test_a_run_that_is_left_leaves_no_thread(tmp_path, error):
    def leave(run) -> None:
        assert own_threads()
        if error:
            raise error

    if error:
        with pytest.raises(error) as raised:
            train(tmp_path, (doubled, named), at_step=leave)
        assert not own_threads() and raised.tb  # whose frames hold the loop
    else:
        train(tmp_path, (doubled, named))
        assert not own_threads()
