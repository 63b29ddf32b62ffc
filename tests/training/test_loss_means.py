"""The mean loss since the last multiple of --run.log-every: the same with and without stops, and on every layout."""

import json
import os
import signal
import time

import pytest
from support.launching import ROOT, steps, train_many
from support.tiny import DATA, train

from laws.small import SMALL


def by_step(folder):
    return {line["step"]: line for line in steps(folder)}


def mean(lines, first, last):
    return sum(lines[step]["loss"] for step in range(first, last + 1)) / (last + 1 - first)


def test_it_is_the_mean_of_the_steps_since_the_last_line(tmp_path):
    """A step that is logged for another reason, such as a checkpoint, has the mean up to there."""
    train(tmp_path / "all", log_every=1, save_every=50)
    train(tmp_path / "some", log_every=3, save_every=5)
    every, some = by_step(tmp_path / "all"), by_step(tmp_path / "some")
    windows = {1: (1, 1), 3: (1, 3), 4: (4, 4), 5: (4, 5), 6: (4, 6), 8: (7, 8)}
    assert some.keys() == windows.keys()
    for step, line in some.items():
        assert line["loss_mean"] == pytest.approx(mean(every, *windows[step]), rel=1e-12)
    assert not any("loss_mean" in line for line in every.values())  # it would be the loss itself


def stop(run, model, at=5):
    if run.steps_done == at:
        os.kill(os.getpid(), signal.SIGTERM)
        while not run.services.notice.asked:  # a thread hears it
            time.sleep(0.01)


def save(run, model):
    """Save inside the body, and fail in a later step."""
    if run.steps_done == 5:
        run.save()
    if run.steps_done == 6:
        raise RuntimeError("as if it were killed")


@pytest.mark.parametrize("how", ["stop-at", "signal", "save in the body", "twice"])
def test_a_stop_does_not_change_it(tmp_path, how):
    settings = {"log_every": 3, "save_every": 50}
    train(tmp_path / "whole", **settings)
    if how == "stop-at":
        train(tmp_path / "parts", **settings, stop_at=5)
    elif how == "signal":
        train(tmp_path / "parts", stop, **settings)
    elif how == "twice":
        train(tmp_path / "parts", **settings, stop_at=4)
        train(tmp_path / "parts", **settings, stop_at=5)
    else:
        with pytest.raises(RuntimeError):
            train(tmp_path / "parts", save, **settings)
    train(tmp_path / "parts", **settings)
    assert json.loads((tmp_path / "parts" / "run.json").read_text())["launches"][-1]["step"] == 5
    whole, parts = by_step(tmp_path / "whole"), by_step(tmp_path / "parts")
    assert {step: parts[step] for step in whole} == whole and whole[6]["loss_mean"] != whole[6]["loss"]


def test_a_mean_over_steps_that_are_not_known_is_left_out(tmp_path):
    """They are not known if --run.log-every has changed, or an earlier version saved the checkpoint."""
    train(tmp_path, log_every=2, save_every=50, stop_at=3)
    train(tmp_path, log_every=5, save_every=50)
    known = {step: "loss_mean" in line for step, line in by_step(tmp_path).items()}
    assert known == {1: True, 2: True, 3: True, 4: False, 5: False, 8: True}


@pytest.mark.exhaustive  # tests/checkpoints/test_segments.py has one loss, and a change of settings
def test_exact_mode_has_the_same_bits_on_every_layout_and_through_stops(tmp_path, rows, data_cache):
    """One process without a stop, and three layouts in turn, with stops between two lines; two losses by name."""
    recipe = ROOT / "recipes" / "gan.py"

    def start(profile, processes, name, *more):
        common = ["--run.global-batch", 10, "--run.micro-batch", 4, "--run.exact", "true", "--run.steps", 9]
        common += ["--run.log-every", 4, "--run.trackers", "--run.save-every", 50, *more]
        train_many(
            profile, processes, recipe, [[*SMALL["gan"].flags(rows), *common, "--run.dir", tmp_path / name]], tmp_path
        )

    start("cpu", 1, "one")
    start("ddp_cpu", 2, "several", "--run.stop-at", 3)
    start("fsdp_cpu", 2, "several", "--run.stop-at", 6)
    start("cpu", 1, "several")
    one, several = by_step(tmp_path / "one"), by_step(tmp_path / "several")
    assert {step: several[step] for step in one} == one
    assert len([name for name in one[8] if name.startswith("loss_mean")]) == 2


def test_a_step_that_is_skipped_does_not_count(tmp_path):
    """Its loss is not finite, and the weights have not seen it."""
    rows = [*DATA]
    rows[3] = rows[3] * float("inf")
    train(tmp_path, rows=rows, log_every=4, nonfinite="skip", save_every=50)
    lines = [line for line in steps(tmp_path) if line["step"] % 4 == 0]
    assert len(lines) == 2 and all(line["loss_mean"] > 0 for line in lines)
