"""python -m app lr-range: a run whose rate rises in each step, and what is read from its losses."""

import json
import math

import pytest
from support.launching import ROOT

from app import UserError
from app.__main__ import main as app
from app.commands.lr_range.command import diverged, loss_of, smooth, steepest
from laws.small import SMALL


@pytest.mark.launches
def test_a_range(rows, tmp_path):
    words = ["--steps", "12", "--low", "1e-5", "--high", "0.1", "--report", tmp_path / "range"]
    words += ["--run.global-batch", 8, "--run.micro-batch", 8, *SMALL["graph"].flags(rows)]
    assert app(["lr-range", str(ROOT / "recipes" / "graph.py"), *map(str, words)]) == 0
    found = json.loads((tmp_path / "range" / "lr-range.json").read_text())
    assert found["lr"] == pytest.approx([1e-5 * 1e4 ** (step / 11) for step in range(12)])
    assert len(found["loss"]) == 12 and found["steepest"] in found["lr"]
    assert sorted(path.name for path in (tmp_path / "range").iterdir()) == [
        "lr-range.json", "lr-range.png", "output.txt",
    ]  # fmt: skip


def test_where_losses_fall_fastest():
    rates = [10 ** (-5 + i / 20) for i in range(100)]
    losses = [3 - 2 / (1 + math.exp(-4 * math.log(rate / 0.01))) for rate in rates]
    assert steepest(rates, losses) == pytest.approx(0.01, rel=0.2)


def test_what_has_diverged():
    good = [2 - 0.01 * i for i in range(50)]
    assert not diverged(good) and not diverged([])
    assert diverged([*good, math.nan]) and diverged([*good, *[40.0] * 20])
    assert not diverged([-0.1 * i for i in range(50)])  # a loss may be negative
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
    assert math.isnan(loss_of({"loss": None})) and loss_of({"loss/a": 1.0, "loss/b": 2.0, "lr": 9.0}) == 3.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.py"], "there is no such file"),
        (["RECIPE", "--low", "1", "--high", "0.1"], "give rates above 0, the lower one first"),
        (["RECIPE", "--steps", "3"], "fewer than 10 show nothing"),
    ],
)
def test_what_cannot_be_asked(words, said):
    with pytest.raises(UserError, match=said):
        app(["lr-range", *(word.replace("RECIPE", str(ROOT / "recipes" / "cls.py")) for word in words)])
