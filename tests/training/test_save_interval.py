"""--run.save-every auto: the interval by hand, in a run, and on two processes, which train the same bits."""

import time
from dataclasses import dataclass

import pytest
from support.launching import ROOT, launch, steps, weights
from support.tiny import saved, train

from app import RunConfig, UserError
from app.rundir.time_spent import Clock
from app.training.loop.save_interval import Pace, SaveInterval

DAY = 24.0


def test_the_interval_is_what_costs_least():
    assert Pace(step=0.5, save=0.2).interval(mtbf=DAY) == 372  # the square root of 2 x 0.2 s x 86,400 s is 185.9 s
    assert Pace(step=0.5, save=0.2, writing=300.0).interval(DAY) == 600  # none begins before the last one is written
    assert Pace(step=500.0, save=0.2).interval(DAY) == 1
    assert Pace().interval(DAY) == Pace(step=0.5).interval(DAY) == 0


def test_the_first_checkpoint_is_measured_and_the_others_follow():
    interval = SaveInterval(RunConfig(save_every="auto", log_every=10), start=23)
    assert interval.next == 30
    interval.saved(30)
    assert interval.next == 0 and interval.learn(30, Pace()) == ""  # nothing is known before it
    assert "checkpoints are 372 steps (3:06) apart" in interval.learn(40, Pace(0.5, 0.2))
    assert interval.next == 402
    assert interval.learn(50, Pace(0.5, 0.05)) == "" and interval.next == 216
    assert interval.learn(300, Pace(0.5, 0.05)) == "" and interval.next == 301  # what is past is due at once
    fixed = SaveInterval(RunConfig(save_every=7), start=23)
    assert not fixed.asked and fixed.learn(30, Pace(0.5, 0.2)) == "" and fixed.next == 0


def test_a_pace_is_that_of_steps_with_their_evaluations():
    @dataclass
    class Watch:
        now: float = 0.0

        def __call__(self):
            return self.now

    watch = Watch()
    clock, interval = Clock(watch), SaveInterval(RunConfig(save_every="auto"), start=2)
    for part, seconds in [("starting", 50.0), ("stepping", 8.0), ("evaluating", 4.0), ("saving", 3.0)]:
        clock.turn_to(part)
        watch.now += seconds
    clock.step = 8
    assert interval.measured(clock, 2, 9.0) == Pace()  # no checkpoint yet
    clock.saves = 2
    assert interval.measured(clock, 2, 9.0) == Pace(2.0, 1.5, 9.0)


def test_a_run_saves_as_it_has_measured(tmp_path, capsys):
    train(tmp_path, lambda run, model: time.sleep(0.01), steps=60, save_every="auto", mtbf=0.001, log_every=4, keep=99)
    assert capsys.readouterr().out.count("--run.save-every auto: a checkpoint stops training for") == 1
    first, second, *others = saved(tmp_path)
    assert first == 4 and 8 < second < 60 and others[-1] == 60
    train(tmp_path / "few", steps=60, save_every="auto", log_every=4, keep=99)
    assert saved(tmp_path / "few") == [4, 60]  # a failure a day


def test_other_words_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"--run\.save-every often: give a number of steps, or auto"):
        train(tmp_path, save_every="often")
    with pytest.raises(UserError, match=r"--run\.mtbf 0\.0"):
        train(tmp_path, mtbf=0.0)


def test_two_processes_save_alike_and_train_the_same_bits(tmp_path):
    """Were the ranks to decide apart, their saves would hang; --run.mtbf is so short that they come often."""
    toy, usual = ROOT / "tests" / "laws" / "toy.py", ["--run.log-every", 3, "--run.keep", 99]
    for name, flags in {"fixed": [], "auto": ["--run.save-every", "auto", "--run.mtbf", 0.00001]}.items():
        launch("ddp_cpu", 2, toy, "--run.dir", tmp_path / name, *usual, *flags)
    assert saved(tmp_path / "auto")[0] == 3 and len(saved(tmp_path / "auto")) > 2
    assert weights(tmp_path / "auto") == weights(tmp_path / "fixed")
    lines = {name: {line["step"]: line["loss"] for line in steps(tmp_path / name)} for name in ("auto", "fixed")}
    assert lines["auto"].items() >= lines["fixed"].items()
