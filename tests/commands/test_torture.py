"""python -m app torture: a short campaign on a small recipe, and what it says of a run that is lost or differs."""

import json
import os
import re
import sys

import pytest
from support.launching import PROFILES, ROOT, run
from support.tiny import train

from app import UserError
from app.__main__ import main
from app.commands.torture.kills import Outcome, Torture, compare, outcome

TOY = ROOT / "tests" / "laws" / "toy.py"


def torture(folder, *words, recipe=TOY, pause="0.03"):
    head = [sys.executable, "-m", "app", "torture", recipe, "--folder", folder, "--json", folder.with_suffix(".json")]
    environment = {"PAUSE": pause, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = run([*head, *words], env={**os.environ, **environment}, timeout=280)
    file = folder.with_suffix(".json")
    return result, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.launches
def test_a_run_that_is_killed_again_and_again_is_the_one_that_nobody_touched(tmp_path):
    """On one process and two in turn, in exact mode: every line of metrics.jsonl, and every bit of the weights."""
    profiles = ["--profiles", PROFILES / "cpu.yaml", PROFILES / "ddp_cpu.yaml"]
    # With this seed both profiles have a kill, at a checkpoint, before the run could finish: it is started four times.
    result, found = torture(tmp_path / "runs", *profiles, "--kills", 2, "--seed", 322, "--run.best=-eval/loss")
    assert result.status == 0, result.output
    assert len(found["kills"]) == 2 and found["finished"] >= 1 and not found["lost"] and not found["differences"]
    assert "0 lost, 0 differ" in result.output


def test_a_run_that_differs_is_told(tmp_path, monkeypatch, capsys):
    """Its weights and losses are others; `make laws` has a whole campaign."""
    for name, seed in (("good", 0), ("other", 1)):
        train(tmp_path / name, seed=seed, log_every=1)
    good, other = outcome(tmp_path / "good"), outcome(tmp_path / "other")
    found = compare(good, other)
    assert re.fullmatch(r"step 1 differs in .*loss.*", found[0]) and found[1:] == ["model/model.safetensors differs"]
    monkeypatch.setattr(Torture, "untouched", lambda self: good)
    monkeypatch.setattr(Torture, "run", lambda self, *_: self.differences.extend(compare(good, other)))
    words = ["torture", str(TOY), "--folder", str(tmp_path / "runs"), "--profiles", str(PROFILES / "cpu.yaml")]
    assert main(words) == 1 and found[0] in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_recipe_whose_runs_differ_is_found(tmp_path):
    """Its weights depend on the clock."""
    text = (
        TOY.read_text()
        .replace("lr=1e-3", "lr=1e-3")
        .replace("OptimConfig())", "OptimConfig(lr=1e-3 * (1 + time.time() % 1)))")
    )
    recipe = tmp_path / "clock.py"
    recipe.write_text(text)
    more = ["--profiles", PROFILES / "cpu.yaml", "--kills", 1, "--seed", 1]
    result, found = torture(tmp_path / "runs", *more, recipe=recipe)
    assert result.status == 1 and found["differences"], result.output
    assert "differs in" in result.output


@pytest.mark.launches
def test_a_recipe_that_fails_by_itself(tmp_path, monkeypatch):
    recipe = tmp_path / "broken.py"
    recipe.write_text(TOY.read_text().replace("time.sleep(pause)", "raise ZeroDivisionError"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["torture", recipe, "--folder", tmp_path / "runs", "--profiles", PROFILES / "cpu.yaml"]
    with pytest.raises(UserError, match=r"fails without any kill[\s\S]*ZeroDivisionError"):
        main(list(map(str, words)))


def test_damaged_lines_are_a_difference():
    good = Outcome([{"step": 1, "loss": 0.5}], 0, {"a": "1"})
    assert compare(good, good) == []
    assert compare(good, good._replace(damaged=2)) == ["2 damaged lines in metrics.jsonl"]


def test_a_finished_run_without_its_last_line_is_damaged(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert outcome(tmp_path).damaged == 1
