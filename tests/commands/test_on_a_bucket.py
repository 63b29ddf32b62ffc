"""Commands that look at runs find in a bucket what they find on a disk; others refuse a URL."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support import buckets
from support.buckets import BUCKET, Fault
from support.launching import ROOT

from app import UserError, parse, storage
from app.__main__ import main as app
from app.commands.doctor import store as doctor
from app.commands.doctor.findings import OK, TROUBLE
from app.rundir import history
from laws.many import load
from laws.small import SMALL

pytestmark = pytest.mark.launches
FLAGS = ["--run.global-batch", 8, "--run.micro-batch", 4, "--run.trackers", "--run.steps", 4, "--run.save-every", 2]
FLAGS += ["--run.eval-every", 2, "--run.best", "eval/accuracy"]


@pytest.fixture(scope="module")
def run(store, tmp_path_factory, rows, data_cache):
    """Train a run of cls in a bucket, and give its URL and a copy of it on a disk."""
    root = tmp_path_factory.mktemp("bucket")
    place, copy = f"s3://{BUCKET}/{root.name}/cls", root / "copy" / "cls"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (buckets.environment(store) | {"XDG_CACHE_HOME": str(root / "machine")}).items():
            patch.setenv(name, value)
        patch.chdir(root)
        recipe = load(ROOT / "recipes" / "cls.py")
        words = [*SMALL["cls"].flags(rows), *FLAGS, "--run.dir", place]
        recipe.main(parse(recipe.Config, list(map(str, words))))
        for entry in storage.at(place).files():
            (copy / entry.name).parent.mkdir(parents=True, exist_ok=True)
            (copy / entry.name).write_bytes(storage.at(place).read(entry.name))
        yield place, copy


def said_of(words: list, place: str | Path, file: Path) -> dict:
    """Return what a command writes with --json, without the place and the time."""
    assert app([words[0], str(place), *map(str, words[1:]), "--json", str(file)]) == 0
    text = file.read_text().replace(str(place), "PLACE")
    file.unlink()
    return json.loads(text)


def test_runs_lists_a_run_in_a_bucket_and_its_checkpoints(run, tmp_path, capsys):
    place = run[0]
    found, on_disk = (said_of(["runs", "--verify"], each, tmp_path / "found.json") for each in run)
    assert [{**each, "saved": 0} for each in found["checkpoints"]] == [
        {**each, "saved": 0} for each in on_disk["checkpoints"]
    ]
    assert f"{place}: finished, step 4 of 4, 2 checkpoints" in capsys.readouterr().out
    assert app(["runs", place.rpartition("/")[0]]) == 0
    assert f"{place}  finished" in capsys.readouterr().out
    assert app(["runs", place, "--status"]) == 0


def test_watch_and_plot_show_it(run, tmp_path, capsys, monkeypatch):
    place, copy = run
    monkeypatch.chdir(tmp_path)
    assert app(["watch", place]) == 0
    assert "step 4 of 4" in capsys.readouterr().out
    assert app(["plot", place]) == 0 and app(["plot", str(copy), "--to", "disk"]) == 0
    assert Path("plot.png").read_bytes() == Path("disk.png").read_bytes()


@pytest.mark.parametrize("place", ["run", "model"])
def test_evaluate_scores_it_as_on_a_disk(run, rows, tmp_path, place):
    words = ["evaluate"] if place == "run" else ["evaluate", rows(11)]
    url, copy = run if place == "run" else (f"{run[0]}/model", run[1] / "model")
    assert said_of(words, url, tmp_path / "found.json") == said_of(words, copy, tmp_path / "found.json")


def test_export_takes_a_model_out_of_it_to_a_disk_or_into_the_bucket(run, tmp_path, capsys):
    place, copy = run
    for folder, to in ((place, ["--to", tmp_path / "one"]), (copy, ["--to", tmp_path / "two"]), (place, [])):
        assert app(["export", str(folder), *map(str, to)]) == 0
    assert f"{place}/export/step-00000004: " in capsys.readouterr().out
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all((one[name] == two[name]).all() for name in two) and one.keys() == two.keys()
    there = storage.at(f"{place}/export/step-00000004")
    assert there.read("model.safetensors") == (tmp_path / "one" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=f"{place}/export/step-00000004 exists already"):
        app(["export", place])


def test_predict_writes_the_table_that_it_writes_of_a_model_on_a_disk(run, rows, tmp_path):
    place, copy = run
    for number, model in enumerate((place, f"{place}/model", copy)):
        assert app(["predict", str(model), str(rows(11)), "--to", str(tmp_path / f"{number}.jsonl")]) == 0
    first, *others = ((tmp_path / f"{number}.jsonl").read_text() for number in range(3))
    assert first and others == [first, first]


def test_plan_says_what_resuming_restores_and_what_going_up_takes(run, rows, tmp_path, capsys):
    place, _ = run
    words = ["plan", ROOT / "recipes" / "cls.py", "--profile", "cpu", "--json", tmp_path / "found.json"]
    assert app([str(word) for word in (*words, *SMALL["cls"].flags(rows), *FLAGS, "--run.dir", place)]) == 0
    out = capsys.readouterr().out
    assert f"{place}: resuming restores step 4" in out and "on its way up" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["staged"] == found["checkpoint"] > 0


@pytest.mark.parametrize(
    "words",
    [
        ["plot", "RUN", "--to", "URL"],
        ["predict", "RUN", "data.csv", "--to", "URL"],
        ["runs", "RUN", "--json", "URL"],
        ["torture", "recipes/cls.py", "--folder", "URL"],
        ["prove", "recipes/cls.py", "--profiles", "cpu", "ddp_cpu", "--report", "URL"],
        ["lr-range", "recipes/cls.py", "--report", "URL"],
    ],
)
def test_what_is_written_to_a_disk_refuses_a_url(run, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    names = {"RUN": run[0], "URL": "s3://bucket/out"}
    with pytest.raises(UserError, match=f"{words[-2]} s3://bucket/out: this is written to a disk"):
        app([names.get(word, word) for word in words])
    assert [path.name for path in tmp_path.iterdir()] == ["recipes"]


def test_code_in_a_bucket_is_not_run_unasked(run, tmp_path):
    """A recipe that neither this installation has nor this user has trained with."""
    place = f"{run[0]}-other"
    for entry in storage.at(run[0]).files():
        storage.at(place).write(entry.name, storage.at(run[0]).read(entry.name))
    mark = tmp_path / "ran"
    storage.at(place).write("recipe.py", f"open({str(mark)!r}, 'w')\n")
    with pytest.raises(UserError, match="is code that came with its folder"):
        app(["export", place, "--to", str(tmp_path / "out")])
    assert not mark.exists()


def test_the_doctor_tries_a_store(run, proxy):
    place, _ = run
    assert {found.verdict for found in doctor.folder(place)} == {OK}
    before = {entry.name for entry in storage.at(place).files()}
    proxy.lies = True
    (found,) = doctor.folder(place)
    assert found.verdict == TROUBLE and "ignores the condition" in found.found
    assert {entry.name for entry in storage.at(place).files()} == before
    (found,) = doctor.folder("s3://no-such-bucket/runs")
    assert found.verdict == TROUBLE and found.fix


def test_a_place_without_a_run_is_named(run):
    with pytest.raises(UserError, match=f"{run[0]}/nothing holds no run"):
        history.read(Path(f"{run[0]}/nothing"))


@pytest.mark.parametrize("command", ["runs", "watch", "plot", "export", "evaluate", "predict"])
def test_a_store_that_refuses_is_said_to(run, proxy, command):
    proxy.faults = [Fault("403", times=10**9)]
    more = ["data.csv"] if command == "predict" else []
    with pytest.raises(UserError, match=f"{run[0]} cannot be read: the store refuses it: look at the credentials"):
        app([command, run[0], *more])
