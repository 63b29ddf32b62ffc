"""Runs listed, drawn and watched: what is said of them is what they left."""

import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from app.commands import curves
from app.commands.plot import command
from app.commands.runs import command as runs
from app.commands.watch import live
from app.errors import UserError
from app.rundir import history
from launching import ROOT, run
from tiny import train

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make two runs of one recipe: one with a stop, after which its layout differs, and pictures; one that failed."""
    root = tmp_path_factory.mktemp("show")

    def scored(run, model):
        if run.steps_done % 4 == 0:
            run.log({"eval/loss": 1 / run.steps_done})
            run.log_images({"eval/pictures": [np.full((8, 8), 20 * run.steps_done, np.uint8)]})

    def fails(run, model):
        if run.steps_done == 3:
            raise RuntimeError("the disk is on fire")

    train(root / "stopped", scored, log_every=1, stop_at=5)
    info = json.loads((root / "stopped/run.json").read_text())
    info["sittings"][0]["layout"] = "2 data ranks, DDP, fp32, cpu"  # as if it had been begun there
    (root / "stopped/run.json").write_text(json.dumps(info))
    train(root / "stopped", scored, log_every=1)
    with pytest.raises(RuntimeError):
        train(root / "deep/failed", fails, log_every=1, seed=7)
    return root


def test_runs_are_listed(folder, capsys, tmp_path):
    out = tmp_path / "runs.json"
    assert runs.main(runs.Options((folder,), str(out))) == 0
    printed = capsys.readouterr().out
    assert re.search(r"stopped +finished +8/8 +eval/loss 0.125 +1 data rank, fp32, cpu", printed)
    assert re.search(r"deep/failed +failed +\d/8 +loss", printed)
    assert "deep/failed: RuntimeError: the disk is on fire" in printed
    listed = {row["folder"].rsplit("/", 1)[1]: row for row in json.loads(out.read_text())["runs"]}
    assert listed["stopped"]["score"] == {"eval/loss": 0.125} and listed["failed"]["status"] == "failed"
    with pytest.raises(UserError, match="is not a folder"):
        runs.main(runs.Options((folder / "nowhere",)))


def test_a_run_whose_process_is_gone_is_lost(folder, tmp_path):
    shutil.copytree(folder / "stopped", tmp_path / "run")
    info = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps({**info, "status": "running"}))
    assert history.read(tmp_path / "run").status == "lost"
    assert "its process is gone" in run([sys.executable, "-m", "app", "watch", tmp_path / "run"]).output


def test_what_is_damaged_is_left_out(folder, tmp_path):
    shutil.copytree(folder / "stopped", tmp_path / "run")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('\0\0\n[1]\n{"step": 8, "loss": null}\n{"step": 9, "lo')
    steps, values = history.read(tmp_path / "run").column("loss")
    assert steps == [*range(1, 9), 8] and math.isnan(values[-1])
    (tmp_path / "run/config.yaml").write_text("{")
    assert history.read(tmp_path / "run").config == {}
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "eval/note": "a text"}\n{"step": 1, "loss": 0.5}\n')
    assert history.read(tmp_path / "run").score_in_words == "loss 0.5"
    (tmp_path / "run/run.json").write_text("[]")
    with pytest.raises(UserError, match="holds no run"):
        history.read(tmp_path / "run")


def test_stops_and_changes_of_layout_are_marked(folder):
    assert curves.marks(history.read(folder / "stopped")) == [curves.Mark(5, "resumed on 1 data rank, fp32, cpu")]


def test_every_column_has_a_panel(folder):
    both = [history.read(folder / name) for name in ("stopped", "deep/failed")]
    panels = curves.panels(both)
    assert [panel.title for panel in panels][:2] == ["loss", "eval/loss"]
    assert sorted(name for panel in panels for name in panel.names) == sorted(both[0].columns)


@pytest.fixture(scope="module")
def drawn(folder):
    stem = folder / "drawn" / "both"
    assert command.main(command.Options((folder / "stopped", folder / "deep/failed"), str(stem))) == 0
    return stem


def test_the_picture_has_both_runs_colours(drawn):
    from PIL import Image

    pixels = np.asarray(Image.open(drawn.with_suffix(".png")).convert("RGB")).reshape(-1, 3)
    for colour in ((31, 119, 180), (255, 127, 14)):  # the first two of matplotlib
        assert (pixels == colour).all(axis=1).sum() > 100


def test_the_page_needs_nothing_else(drawn):
    """No script, style or picture of it is fetched from anywhere."""
    text = drawn.with_suffix(".html").read_text()
    fetched = re.findall(r"<(?:script|link|img)[^>]*?\s(?:src|href)=['\"]([^'\"]{0,40})", text)
    assert fetched and all(source.startswith("data:image/png;base64,") for source in fetched)
    assert "<td>--run.seed</td><td>0</td><td>7</td>" in text and "--run.dir" not in text


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_shows_the_page(drawn, tmp_path):
    """Every curve is drawn, the stop is marked, and the pictures are there."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=9000"]
    words = [BROWSER, *flags, "--dump-dom", drawn.with_suffix(".html").as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    both = [history.read(drawn.parent.parent / name) for name in ("stopped", "deep/failed")]
    curves_wanted = sum(len(panel.names) for panel in curves.panels(both)) * len(both)
    body = done.stdout[done.stdout.index("<h2>Curves</h2>") :]
    svg = "".join(re.findall(r"<svg.*?</svg>", body, re.DOTALL))
    assert len(re.findall(r'class="trace scatter', svg)) >= curves_wanted - 1  # the failed run has no scores
    assert "resumed on 1 data rank, fp32, cpu" in svg
    pictures = body[body.index("<h2>Pictures of stopped</h2>") :]
    assert pictures.count("data:image/png;base64,") == 1 and "eval/pictures, step 8" in pictures


def test_plot_says_what_is_missing(folder, tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        command.main(command.Options((tmp_path,)))
    with pytest.raises(UserError, match="plot what"):
        command.main(command.Options(()))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="give a place that can be written"):
        command.main(command.Options((folder / "stopped",), str(tmp_path / "file" / "x")))


def test_sparklines():
    assert live.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert live.sparkline([5.0, 5.0]) == "▁▁"
    assert live.sparkline([float("nan")]) == ""
    assert live.sparkline(range(100), width=4) == "▁▃▆█"


def test_watching_a_run_to_its_end(folder, tmp_path):
    """On a terminal the view follows the run, and ends with it."""
    program = (
        "import sys, time; sys.path.insert(0, 'tests'); from tiny import train; "
        f"train({str(tmp_path / 'run')!r}, lambda run, model: time.sleep(0.3), log_every=1)"
    )
    training = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    while not (tmp_path / "run/metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.05)
    inside, outside = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    words = [sys.executable, "-m", "app", "watch", str(tmp_path / "run"), "--every", "0.1"]
    watching = subprocess.Popen(words, cwd=ROOT, stdout=outside, stderr=outside, env=environment)
    os.close(outside)
    shown = b""
    try:
        while chunk := os.read(inside, 1 << 16):
            shown += chunk
    except OSError:  # what a terminal says when its last program has ended
        pass
    assert watching.wait(60) == 0 and training.wait(60) == 0
    text = shown.decode(errors="replace")
    assert "running" in text and "finished" in text and "step 8 of 8" in text


def test_a_run_that_ends_while_it_is_read_is_not_lost(tmp_path, monkeypatch):
    """Its status was `running` a moment ago, and its lock has just been given back."""
    train(tmp_path / "run")
    info = json.loads((tmp_path / "run" / "run.json").read_text())

    def ending(folder):
        (folder / "run.json").write_text(json.dumps(info))
        return False

    (tmp_path / "run" / "run.json").write_text(json.dumps({**info, "status": "running"}))
    assert history.read(tmp_path / "run").status == "lost"
    (tmp_path / "run" / "run.json").write_text(json.dumps({**info, "status": "running"}))
    monkeypatch.setattr("app.rundir.lock.in_use", ending)
    assert history.read(tmp_path / "run").status == "finished"


def test_sittings_are_noted(folder):
    info = yaml.safe_load((folder / "stopped/run.json").read_text())
    assert [launch["step"] for launch in info["sittings"]] == [0, 5]
