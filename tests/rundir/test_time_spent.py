"""Where a run's time went: arithmetic by hand, and launches of a small run that add up to the time on the clock."""

import json
import os
import time
from dataclasses import replace

import pytest
from support.tiny import train

from app.rundir import history
from app.rundir.run_record import RUN
from app.rundir.time_spent import Clock, Overhead, Spent, Sum, account, best_interval, overhead, speed

ONE = "1 data rank, fp32, cpu"
FIRST = Spent(1000.0, 2, ONE, 0, 20, 10.0, 40.0, 5.0, 4.0, 1.0, saves=2, end="recorded")  # until 1060


def after(first: int, last: int, began: float = 1100.0, **fields) -> Spent:
    """A launch that resumes after step `first`: 10 seconds of start-up, 2 a step, 3 a checkpoint."""
    parts = {"starting": 10.0, "stepping": 2.0 * (last - first), "evaluating": 0.0, "saving": 3.0, "ending": 0.0}
    return Spent(began, 2, ONE, first, last, **parts | {"saves": 1, "end": "recorded"} | fields)


class Watch:
    """A clock that shows what it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_is_in_one_part_at_a_time():
    watch = Watch()
    clock = Clock(watch, lambda: 500.0)

    def passes(seconds: float) -> None:
        watch.now += seconds

    passes(3)
    clock.turn_to("stepping")
    passes(10)
    with clock.during("evaluating"):
        passes(5)
        with clock.during("saving"):
            passes(2)
        passes(1)
    with pytest.raises(ValueError, match="in the middle"), clock.during("saving"):
        passes(4)
        raise ValueError("in the middle")
    passes(7)
    clock.step, clock.saves = 12, 2
    spent = clock.spent(4, ONE, first=2, over=True)
    assert spent == Spent(500.0, 4, ONE, 2, 12, 3.0, 17.0, 6.0, 6.0, 0.0, saves=2, end="recorded")
    assert spent.seconds == watch.now and clock.spent(4, ONE, first=2).end is None


def test_a_launch_without_a_step_has_none():
    assert Clock().spent(1, ONE, first=7).steps == 0


def test_lost_steps_have_their_share_of_the_time():
    spent = account([FIRST, after(15, 25)])  # 5 of the first launch's 20 steps are made again
    assert spent.counted == Sum(30.0 + 20.0, 100.0) and spent.again == Sum(10.0, 20.0)
    assert spent.starting == Sum(20.0, 40.0) and spent.between == Sum(40.0, 0.0)
    assert spent.total == Sum(60.0 + 40.0 + 33.0, 2 * 93.0)
    assert spent.goodput == pytest.approx(50 / 133) and spent.total.device_hours == pytest.approx(186 / 3600)


def test_a_later_launch_may_lose_steps_of_several():
    spent = account([FIRST, after(20, 30), after(5, 30, began=1200.0)])  # the newest checkpoints were damaged
    assert spent.counted.seconds == 10.0 + 0.0 + 50.0 and spent.again.seconds == 30.0 + 20.0
    assert account([FIRST, after(0, 30)]).again.seconds == 40.0


def test_what_the_newest_checkpoint_lacks_is_lost_already():
    assert account([FIRST], newest=10).again == Sum(20.0, 40.0)
    assert account([FIRST]).again == account([FIRST], newest=20).again == Sum()


def test_the_end_of_a_killed_launch_is_estimated():
    killed = replace(FIRST, end=None)
    seen = killed.until_seen(changed=1075.0, step=23)
    assert seen == replace(killed, stepping=55.0, last=23, end="estimated")
    assert killed.until_seen(changed=900.0, step=10) == replace(killed, end="estimated")  # nothing was written later
    early = replace(killed, last=0, stepping=0.0)
    assert early.until_seen(changed=1075.0, step=0).starting == early.starting + 75.0 - 20.0


def test_no_time_has_no_goodput():
    assert account([]).goodput == 0.0


def test_speed_is_the_newest_layouts():
    other = replace(after(20, 30), layout="another")
    assert speed([FIRST, other, after(30, 40)]) == speed([after(30, 40), FIRST])._replace(layout=ONE)
    found = speed([FIRST, after(20, 30)])
    assert (found.step, found.save, found.saves, found.every) == (2.0, 7 / 3, 3, 10.0)
    assert found.start == 10.0 and found.evaluating == pytest.approx(5 / 30)
    assert speed([replace(FIRST, saves=0)]).save is None
    assert speed([replace(FIRST, last=0)]) is speed([]) is None


def test_the_interval_that_costs_least():
    assert best_interval(save=2.0, mtbf=10_000.0) == 200.0  # the square root of 2 x 2 x 10,000
    assert best_interval(save=50.0, mtbf=90.0) == 90.0
    assert overhead(200.0, 2.0, 100.0, 10_000.0) == Overhead(0.01, 0.01, 0.01)
    costs = {every: overhead(every, 2.0, 100.0, 10_000.0).total for every in (150.0, 200.0, 250.0)}
    assert min(costs, key=costs.__getitem__) == 200.0


def test_a_stopped_and_resumed_run_adds_up_to_the_time_on_the_clock(tmp_path):
    def slowly(run, model):
        time.sleep(0.05)

    train(tmp_path / "before")  # what is imported in the first run of a process comes before its launch
    began = time.time()
    train(tmp_path / "run", slowly, stop_at=4)
    first = time.time()
    time.sleep(0.2)
    again = time.time()
    train(tmp_path / "run", slowly)
    over = time.time()
    run = history.read(tmp_path / "run")
    launches, spent = run.spent, run.account
    assert [(each.first, each.last, each.end) for each in launches] == [(0, 4, "recorded"), (4, 8, "recorded")]
    for each, start, end in zip(launches, (began, again), (first, over), strict=True):
        assert start <= each.began and each.until <= end + 0.01
        assert end - start - each.seconds < 0.1 and each.stepping >= 4 * 0.05 and each.saves == 2 and each.saving > 0
    assert 0.2 <= spent.between.seconds < 0.3 and spent.again == Sum()
    assert spent.total.seconds == pytest.approx(launches[1].until - launches[0].began)
    assert launches[1].ending > 0  # the model was written


def test_a_run_that_was_killed_is_accounted_for(tmp_path):
    """The record of its last checkpoint stays, and metrics.jsonl tells how far it came after that."""
    train(tmp_path, stop_at=4, log_every=1)
    fields = json.loads((tmp_path / RUN).read_text())
    (spent,) = fields["spent"]
    del spent["end"]
    fields["status"], spent["last"] = "running", 4
    (tmp_path / RUN).write_text(json.dumps(fields))
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 6, "loss": 0.5, "ids": "x"}\n')
    (until,) = (each.until for each in history.read(tmp_path).record.spent)
    os.utime(tmp_path / "metrics.jsonl", (until + 30, until + 30))
    lost = history.read(tmp_path)
    assert lost.status == "lost" and lost.spent[0].last == 6
    assert lost.account.again.seconds == pytest.approx(lost.spent[0].stepping / 3, rel=1e-6)
    train(tmp_path, log_every=1)
    resumed = history.read(tmp_path)
    assert resumed.spent[0].end == "estimated" and resumed.spent[0].until == pytest.approx(until + 30, abs=1e-3)
    assert resumed.account.again.seconds == pytest.approx(lost.account.again.seconds, rel=1e-3)


def test_a_run_of_an_older_version_goes_on(tmp_path):
    train(tmp_path, stop_at=4)
    fields = json.loads((tmp_path / RUN).read_text())
    del fields["spent"]
    (tmp_path / RUN).write_text(json.dumps(fields))
    assert history.read(tmp_path).account is None
    train(tmp_path)
    assert [each.first for each in history.read(tmp_path).spent] == [4]


@pytest.mark.parametrize("wrong", [{"stepping": 1e300}, {"saving": -1.0}, {"first": 99}, {"devices": 0}])
def test_times_that_no_run_can_have_are_not_shown(tmp_path, wrong):
    train(tmp_path, stop_at=2)
    fields = json.loads((tmp_path / RUN).read_text())
    fields["spent"][0] |= wrong
    (tmp_path / RUN).write_text(json.dumps(fields))
    assert history.read(tmp_path).account is None
