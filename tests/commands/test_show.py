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
from support.launching import ROOT, run
from support.run_records import launch, record
from support.tiny import train

from app.commands import curves
from app.commands.plot import command, layers
from app.commands.runs import command as runs
from app.commands.watch import live
from app.errors import UserError
from app.rundir import history
from app.rundir.run_record import Segment

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
    info["launches"][0]["layout"] = "2 data ranks, DDP, fp32, cpu"  # as if it had been begun there
    (root / "stopped/run.json").write_text(json.dumps(info))
    train(root / "stopped", scored, log_every=1)
    with pytest.raises(RuntimeError):
        train(root / "deep/failed", fails, log_every=1, seed=7)
    return root


def test_runs_are_listed(folder, capsys, tmp_path):
    out = tmp_path / "runs.json"
    assert runs.main(runs.Options((folder,), json=str(out))) == 0
    printed = capsys.readouterr().out
    assert re.search(r"stopped +finished +8/8 +eval/loss 0.125 +0.125 at 8 +1 data rank, fp32, cpu", printed)
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
    (tmp_path / "run/diagnostics.jsonl").mkdir()
    assert history.read(tmp_path / "run").diagnostics == []
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


def test_the_page_needs_only_plotly_next_to_it(drawn):
    """No script, style or picture of it is fetched from anywhere else; and pages of one folder share the file."""
    text = drawn.with_suffix(".html").read_text()
    fetched = re.findall(r"<(?:script|link|img)[^>]*?\s(?:src|href)=['\"]([^'\"]{0,40})", text)
    assert "plotly.min.js" in fetched and drawn.with_name("plotly.min.js").stat().st_size > 1e6 > len(text)
    assert all(source.startswith("data:image/png;base64,") for source in fetched if source != "plotly.min.js")
    assert "<td>--run.seed</td><td>0</td><td>7</td>" in text and "--run.dir" not in text


def in_browser(page, folder) -> str:
    """Open a page, and return what it has become."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--virtual-time-budget=9000"]
    words = [BROWSER, *flags, "--dump-dom", page.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_shows_the_page(drawn, tmp_path):
    """Every curve is drawn, the stop is marked, and the pictures are there."""
    shown = in_browser(drawn.with_suffix(".html"), tmp_path)
    both = [history.read(drawn.parent.parent / name) for name in ("stopped", "deep/failed")]
    wanted = [curve for run in both for panel in curves.panels(both) for curve in curves.curves_of(panel, run)]
    curves_wanted = sum(1 if curve.name == "lr" else 2 for curve in wanted)  # those that can be smoothed have a raw one
    body = shown[shown.index("<h2>Curves</h2>") :]
    svg = "".join(re.findall(r"<svg.*?</svg>", body, re.DOTALL))
    assert len(re.findall(r'class="trace scatter', svg)) == curves_wanted
    assert svg.count(">▼<") == 1 and "<td>5</td><td>resumed on 1 data rank, fp32, cpu</td>" in body
    pictures = body[body.index("<h2>Pictures of stopped</h2>") :]
    assert pictures.count("data:image/png;base64,") == 1 and "eval/pictures, step 8" in pictures


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_slider_smooths_and_shows_the_raw_curve_behind(folder, drawn, tmp_path):
    moved = drawn.with_name("moved.html")
    told = "JSON.stringify(plot.data.map((trace) => [trace.name, trace.meta, trace.opacity, trace.y]))"
    move = 'slider.value = 0.5; slider.dispatchEvent(new Event("input"));'
    added = f"<script>{move} document.body.append('[DATA]' + {told} + '[END]')</script></body>"
    moved.write_text(drawn.with_suffix(".html").read_text().replace("</body>", added))
    text = re.search(r"\[DATA\](\[\[.*\]\])\[END\]", in_browser(moved, tmp_path)[-100_000:])
    traces = json.loads(text[1])
    losses = history.read(folder / "stopped").column("loss")[1]
    expected, average = [], 0.0
    for count, loss in enumerate(losses, start=1):
        average = 0.5 * average + 0.5 * loss
        expected.append(average / (1 - 0.5**count))
    (raw, front) = [trace for trace in traces if trace[0] == "stopped"][:2]
    assert raw[1:3] == ["raw", 0.25] and raw[3] == losses
    assert front[1] == "smooth" and front[3] == pytest.approx(expected)
    assert any(trace[1] == "" for trace in traces)  # the learning rate


def write_run(folder, names=("loss",), launches=(0,), segments=(), steps=100):
    """Write the folder of a run, as if it had logged some numbers every ten steps."""
    folder.mkdir()
    began = tuple(map(launch, launches))
    about = record(steps, status="finished", steps=steps, launches=began, segments=tuple(segments))
    (folder / "run.json").write_text(json.dumps(about.to_json()))
    lines = [{"step": step, **dict.fromkeys(names, 1 / step)} for step in range(10, steps + 1, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return history.read(folder)


def test_many_stops_have_few_labels_and_say_which_settings_changed(tmp_path):
    changed = {"optim.lr": [0.1, 0.02], "optim.clip": [1.0, 0.5]}
    found = write_run(tmp_path / "run", launches=(0, 5, 5, 6, 7, 50), segments=[Segment(6, changed)])
    marks = curves.marks(found)
    assert [mark.step for mark in marks] == [5, 6, 7, 50]
    assert marks[1].text == "resumed, optim.lr 0.1 to 0.02, optim.clip 1.0 to 0.5"
    assert [[mark.step for mark in group] for group in curves.neighbours(marks, 4)] == [[5, 6, 7], [50]]
    command.main(command.Options((tmp_path / "run",)))
    page = (tmp_path / "run" / "plot.html").read_text()
    assert page.count("\\u25bc") == 2 and "<td>6</td><td>resumed, optim.lr 0.1 to 0.02" in page


def test_scores_of_many_classes_are_one_panel_and_one_table(tmp_path):
    classes = [f"eval/dice_class{i}" for i in range(26)]
    found = write_run(tmp_path / "run", ["eval/dice", "eval/dice_one", "eval/dice_two", "eval/loss"])
    assert [panel.title for panel in curves.panels([found])] == ["eval/dice", "eval/dice by class", "eval/loss"]
    assert not any(panel.by_class for panel in curves.panels([found]))
    found = write_run(tmp_path / "many", ["loss", "eval/dice", *classes])
    (panel,) = [panel for panel in curves.panels([found]) if panel.by_class]
    assert panel.names == tuple(classes) and curves.class_names(panel)[25] == "class25"
    command.main(command.Options((tmp_path / "many",)))
    page = (tmp_path / "many" / "plot.html").read_text()
    assert page.count('"meta":"') == 4 and "<td>class25</td><td>0.01</td>" in page  # loss and dice, raw and not


def test_counts_are_no_scores(tmp_path):
    """Of any evaluation set; the same names elsewhere are numbers like others."""
    names = ["eval/images", "eval/boxes", "eval/tokens", "eval-hard/samples", "eval/map", "part/images"]
    run = write_run(tmp_path / "run", names)
    assert run.columns == ["eval/map", "part/images"] and run.score[0] == "eval/map"


def test_the_loss_of_single_steps_is_drawn_behind_their_mean(tmp_path):
    new, old = write_run(tmp_path / "new", ["loss_mean", "loss"]), write_run(tmp_path / "old")
    (panel,) = curves.panels([new, old])
    assert curves.curves_of(panel, new) == [curves.Curve("loss", 0, behind=True), curves.Curve("loss_mean", 0)]
    assert curves.curves_of(panel, old) == [curves.Curve("loss", 0)]


def test_several_runs_are_drawn_into_the_newest_ones_folder(tmp_path, monkeypatch, capsys):
    for name in ("one", "two"):
        write_run(tmp_path / name)
    os.utime(tmp_path / "two" / "run.json", (1, 1))
    os.utime(tmp_path / "two" / "metrics.jsonl", (1, 1))
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    command.main(command.Options((tmp_path / "one", tmp_path / "two")))
    assert capsys.readouterr().out.split() == [str(tmp_path / "one" / f"comparison.{kind}") for kind in ("png", "html")]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_layers_are_drawn(tmp_path, capsys):
    """Of a run that has looked at them; the shares of a step are those of all its gradients."""
    train(tmp_path / "run", log_every=1, inspect_every=2)
    train(tmp_path / "other", log_every=1)
    read = history.read(tmp_path / "run")
    names = layers.names(read)
    assert names and {name for line in read.diagnostics for name in line["layers"]} == set(names)
    steps, norms = layers.column(read, names[0], "gradient_norm")
    assert steps == [2, 4, 6, 8] and norms == [line["layers"][names[0]]["gradient_norm"] for line in read.diagnostics]
    found = layers.heat(read)
    shares = [sum(row[place] or 0 for row in found.shares) for place in range(len(found.steps))]
    zeros = [sum(layer["histogram"].get("zero", 0) for layer in line["layers"].values()) for line in read.diagnostics]
    counts = [sum(sum(layer["histogram"].values()) for layer in line["layers"].values()) for line in read.diagnostics]
    assert shares == pytest.approx([100 * (1 - zero / count) for zero, count in zip(zeros, counts, strict=True)])
    capsys.readouterr()
    command.main(command.Options((tmp_path / "run", tmp_path / "other"), to=str(tmp_path / "both")))
    files = [tmp_path / f"both{end}" for end in (".png", "-layers.png", ".html")]
    assert capsys.readouterr().out.split() == list(map(str, files)) and all(file.stat().st_size for file in files)
    page = files[-1].read_text()
    assert page.count('id="layers-') == 1 and "Layers of run" in page and "Layers of other" not in page
    assert names[0] in page and layers.HEAT in page


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
    """On a terminal the view follows the run, and ends with it. The run goes on when it has been seen running."""
    seen = tmp_path / "seen"
    program = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, 'tests'); from support.tiny import train\n"
        f"seen, end = Path({str(seen)!r}), time.monotonic() + 120\n"
        "def wait(run, model):\n"
        "    while run.steps_done == 4 and not seen.exists() and time.monotonic() < end: time.sleep(0.05)\n"
        f"train({str(tmp_path / 'run')!r}, wait, log_every=1)"
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
            if b"running" in shown:
                seen.touch()
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


def test_launches_are_noted(folder):
    info = yaml.safe_load((folder / "stopped/run.json").read_text())
    assert [launch["step"] for launch in info["launches"]] == [0, 5]
