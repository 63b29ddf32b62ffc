"""Folders that others made: what is in their files is shown as text, and ends no command."""

import json
import re
import shutil
import sys

import pytest
from support.launching import run
from support.tiny import train

from app.checkpoints.store import CheckpointStore
from app.commands import FOLDER, summaries
from app.commands.export import model_card
from app.commands.plot import command as plot
from app.commands.runs import command as runs
from app.commands.watch import live
from app.errors import UserError, printable
from app.launching.profiles import Profile
from app.rundir import history, metrics_file
from app.rundir.foreign import fields_of
from app.tasks.language.generate import quoted

ESC = "\x1b]0;owned\x07\x1b[2J"
MARKUP = "[/nothing][link=file:///x]<script>alert(1)</script>$\\frac{$_|`"
HUGE = 10**400
STRANGE = [
    None,
    True,
    HUGE,
    -1,
    1e999,
    "",
    ESC,
    MARKUP,
    "\ud800",
    [],
    {},
    [[]],
    {"a": ESC},
    "../../evil",
    [1, None, "x", {}],
]
FIELDS = [
    *("status", "step", "steps", "error", "launches", "segments", "versions", "commit", "recipe"),
    *("recipe_folder", "layout", "trackers", "metrics", "samples", "stopped_early"),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "good"

    def scored(run, model):
        run.log({"eval/accuracy": run.steps_done / 10})

    train(folder, scored, log_every=1, best="eval/accuracy", inspect_every=2, stop_at=4)
    train(folder, scored, log_every=1, best="eval/accuracy", inspect_every=2)
    return folder


def look(place, capsys, tmp_path, monkeypatch, draws=True) -> str:
    """Show a folder by every command that only looks; return what reaches the terminal.

    Args:
        draws: plot too, which takes a second or two.
    """
    from rich.console import Console

    (tmp_path / "all").mkdir(exist_ok=True)
    assert runs.main(runs.Options((place.parent,), json=str(tmp_path / "all" / "runs.json"))) == 0
    assert runs.main(runs.Options((place.parent,), columns=("run.best",), sort="best")) == 0
    try:
        found = history.read(place)
    except UserError as error:
        return capsys.readouterr().out + printable(str(error))
    assert runs.main(runs.Options((place,))) in (0, 1)
    assert runs.main(runs.Options((place,), status=True)) in (0, 1, 3, 75)
    Console(force_terminal=True, width=200).print(live.view(found))
    try:
        if draws:
            plot.main(plot.Options((place,), str(tmp_path / "all" / "plot")))
    except UserError as error:
        assert "nothing has been logged" in str(error)
    if (tmp_path / "all" / "plot.html").exists():
        page = (tmp_path / "all" / "plot.html").read_text()
        assert "<script>alert" not in page and ESC not in page
    monkeypatch.setattr("app.commands.curves.draw", lambda *_: None)  # drawn above
    (tmp_path / "card").mkdir(exist_ok=True)
    scores = {"eval/accuracy": 0.5, MARKUP: ESC}
    model_card.write(found, tmp_path / "card", 8, scores, "Linear", "use it")
    monkeypatch.undo()
    card = (tmp_path / "card" / "README.md").read_text()
    assert "<script>" not in card and "\x1b" not in card
    assert {path.parent for path in tmp_path.rglob("*.py")} <= {tmp_path / "card", place, place.parent / "good"}
    return capsys.readouterr().out


def is_clean(shown: str) -> bool:
    """Tell whether a terminal only gets text, and the colours of rich."""
    return re.sub(r"\x1b\[[\d;]*m", "", shown).replace("\n", "").isprintable()


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: printable(repr(value)[:30]))
def test_strange_values_in_run_json(good, tmp_path, capsys, monkeypatch, value):
    """In each field in turn, and in all of them."""
    place = shutil.copytree(good, tmp_path / "runs" / "strange")
    shutil.copytree(good, tmp_path / "runs" / "good")
    info = json.loads((good / "run.json").read_text())
    kept = {"layout": value, "step": value, "changed": value}
    several = [{"launches": [kept, {**kept, "step": 3}]}, {"segments": [{"step": 4, "changed": {ESC: value}}, kept]}]
    for changed in [*({field: value} for field in FIELDS), dict.fromkeys(FIELDS, value), *several]:
        (place / "run.json").write_text(json.dumps(info | changed))
        shown = runs_alone(place, capsys)
        assert is_clean(shown) and "good" in shown, changed
    assert is_clean(look(place, capsys, tmp_path, monkeypatch, draws=value in (HUGE, MARKUP)))


def runs_alone(place, capsys) -> str:
    """List runs, and look at one of them, which shows it or says what is wrong with its run.json."""
    assert runs.main(runs.Options((place.parent,))) == 0
    try:
        live.view(history.read(place))
    except UserError as error:
        assert str(error).startswith(f"{place / 'run.json'} is damaged, or another program's: it")
        assert is_clean(str(error))
    return capsys.readouterr().out


@pytest.mark.parametrize("file", ["run.json", "config.yaml", "metrics.jsonl", "diagnostics.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 99,
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 9999,
        b"{a: &a [*a], b: *a}",
        b"? {}\n: 1\n",
        b"run: null\ndata: 3\n",
        b"run: {best: [1], global_batch: x}\nema: {decay: x}\n",
        b"1: 2\nrun: !!python/name:os.system\n",
        (
            "a: &a [x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"{n}: &{n} [*{m}, *{m}, *{m}, *{m}, *{m}]\n" for m, n in zip("abcdefg", "bcdefgh", strict=True))
        ).encode(),
        json.dumps(
            {"step": 3, ESC: 1, MARKUP: 2.0, "loss": HUGE, "lr": None, "eval/x": [1], "eval/y": {"a": 1}}
        ).encode()
        + b"\n",
        b'{"step": 1e999}\n{"step": -5}\n{"step": 99999999999999999999999, "loss": 1}\n{"step": 9, "x": 1e999}\n',
        b'{"step": 2, "layers": {"x": {"histogram": {"y": 1}}, "z": null, "w": 3}}\n{"step": 4, "layers": []}\n',
    ],
    ids=lambda content: printable(repr(content)[2:24]),
)
def test_strange_files(good, tmp_path, capsys, monkeypatch, file, content):
    place = shutil.copytree(good, tmp_path / "runs" / "strange")
    shutil.copytree(good, tmp_path / "runs" / "good")
    (place / file).write_bytes(content)
    shown = look(place, capsys, tmp_path, monkeypatch, draws=file.endswith("jsonl"))
    assert is_clean(shown) and "good" in shown


@pytest.mark.parametrize("file", ["run.json", "config.yaml", "metrics.jsonl", "diagnostics.jsonl", "lock", "images"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "device"])
def test_what_is_no_file(good, tmp_path, capsys, monkeypatch, file, kind):
    """A pipe keeps nobody waiting, a device has no end, and a link leads to nothing that is shown."""
    import os

    place = shutil.copytree(good, tmp_path / "runs" / "strange")
    shutil.copytree(good, tmp_path / "runs" / "good")
    secret = tmp_path / "secret"
    secret.write_text('{"status": "finished", "step": 1, "error": "SECRET"}')
    (place / file).unlink(missing_ok=True)
    made = {
        "pipe": lambda: os.mkfifo(place / file),
        "folder": lambda: (place / file).mkdir(),
        "link": lambda: (place / file).symlink_to(secret),
        "device": lambda: (place / file).symlink_to("/dev/zero"),
    }
    made[kind]()
    shown = look(place, capsys, tmp_path, monkeypatch, draws=False)
    assert is_clean(shown) and "good" in shown and "SECRET" not in shown


def test_names_of_folders_are_texts_too(good, tmp_path, capsys, monkeypatch):
    place = shutil.copytree(good, tmp_path / "runs" / f"{ESC}[bold]<b>$x$")
    assert is_clean(look(place, capsys, tmp_path, monkeypatch))


def test_pictures_lie_in_the_folder(good, tmp_path):
    from PIL import Image

    place = shutil.copytree(good, tmp_path / "run")
    (place / "images" / "a").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "outside.png")
    (tmp_path / "far").mkdir()
    shutil.copy(tmp_path / "outside.png", tmp_path / "far" / "step-00000001.png")
    shutil.copy(tmp_path / "outside.png", place / "images" / "a" / "step-00000001.png")
    (place / "images" / "a" / "step-00000002.png").symlink_to(tmp_path / "outside.png")
    (place / "images" / "b").symlink_to(tmp_path / "far")
    (place / "images" / "a" / "step-later.png").touch()
    assert history.read(place).pictures == {"a": [place / "images" / "a" / "step-00000001.png"]}


def test_plot_replaces_only_what_it_has_drawn(good, tmp_path):
    names = ("x.png", "x.html", "x-layers.png", "plotly.min.js")
    plot.main(plot.Options((good,), str(tmp_path / "x")))
    plot.main(plot.Options((good,), str(tmp_path / "x")))
    for name in names:
        drawn = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text("mine")
        with pytest.raises(UserError, match=f"{name} is there, and plot has not made it"):
            plot.main(plot.Options((good,), str(tmp_path / "x")))
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
        (tmp_path / "other").write_bytes(drawn)
        (tmp_path / name).symlink_to(tmp_path / "other")
        with pytest.raises(UserError, match="has not made it"):
            plot.main(plot.Options((good,), str(tmp_path / "x")))
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(drawn)


def test_a_damaged_record_of_a_run_does_not_end_its_next_launch(good, tmp_path):
    """What others have written into run.json and metrics.jsonl is left out where it makes no sense."""
    place = shutil.copytree(good, tmp_path / "run")
    info = json.loads((place / "run.json").read_text())
    strange = {"launches": [None, {"step": "x"}, {}], "segments": 7, "trackers": [1], "model_files": [ESC], "step": {}}
    (place / "run.json").write_text(json.dumps(info | strange))
    train(place, epochs=3.0)
    assert history.read(place).status == "finished" and len(metrics_file.read(place / "metrics.jsonl")) > 8


def test_the_message_of_an_error_is_a_text(tmp_path):
    (tmp_path / f"{ESC}.csv").mkdir()
    result = run([sys.executable, "-m", "app", "runs", tmp_path / f"{ESC}.csv" / "x"])
    assert result.status == 2 and "\x1b" not in result.output and "\\x1b]0;owned" in result.output


def test_every_command_that_reads_folders_is_looked_at_here():
    """The others take recipes, profiles, or nothing."""
    takes_folders = {"runs", "watch", "plot", "export", "evaluate", "predict", "tokenize", "index"}
    others = {"completion", "doctor", "launch", "lr-range", "new", "plan", "prove", "submit", "torture"}
    assert set(summaries()) == takes_folders | others, f"{FOLDER}: say here what a new command reads"


def test_fields_are_bounded(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"a": list(range(200_000))}))
    assert fields_of(file) is None
    file.write_text(json.dumps({"a": "x" * 10_000, ESC: 1}))
    assert len(fields_of(file)["a"]) < 5_000 and all(name.isprintable() for name in fields_of(file))


@pytest.mark.parametrize("text", ["[]", "1", "{", "[" * 100_000, '{"config": []}', '{"config": 1}', b"\xff"])
def test_a_record_that_no_run_wrote_ends_no_run_that_begins(tmp_path, text):
    """Its settings are asked for before the folder is looked at."""
    place = tmp_path / "step-00000004"
    place.mkdir()
    (place / "record.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert CheckpointStore(tmp_path, 0, 1).settings() == {}


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, '{"fp16": 1}'])
def test_a_file_of_deepspeeds_that_holds_something_else_ends_in_one_line(tmp_path, text):
    (tmp_path / "zero.json").write_text(text)
    settings = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": str(tmp_path / "zero.json")},
    }
    profile = Profile(tmp_path / "a.yaml", "a", 2, settings)
    assert any("zero.json: cannot be read" in found for found, _ in profile.troubles)


def test_what_a_model_writes_does_not_reach_the_terminal_as_commands():
    r"""A model of bytes soon writes ESC: it is shown as \x1b."""
    assert quoted("a\x1b[2J\tb\nc\x07") == "  | a\\x1b[2J\tb\n  | c\\x07"
