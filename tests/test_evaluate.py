"""python -m app evaluate and predict: the scores of the run on any layout, on any data, and a table of predictions."""

import json

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torchmetrics.classification import MulticlassCalibrationError

from app import UserError, parse
from app.__main__ import main as app
from app.commands.predict import command as predict
from app.commands.predict import tables
from app.training.metrics import Calibration
from launching import ROOT, scores
from laws.many import load
from laws.small import SMALL

STEPS = 4
FLAGS = ["--run.global-batch", 8, "--run.micro-batch", 3, "--run.trackers", "--run.steps", STEPS, "--run.save-every", 2]
FLAGS += ["--run.exact", "true", "--run.eval-every", 2, "--ema.decay", 0.8, "--ema.use", "also"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, rows):
    """Return the folder of a run of cls, with an average of its weights."""
    folder = tmp_path_factory.mktemp("evaluate") / "cls"
    recipe = load(ROOT / "recipes" / "cls.py")
    words = [*SMALL["cls"].flags(rows), *FLAGS, "--run.dir", folder]
    recipe.main(parse(recipe.Config, list(map(str, words))))
    return folder


def evaluate(run, *words):
    file = run.parent / "found.json"
    file.unlink(missing_ok=True)
    assert app(["evaluate", str(run), *map(str, words), "--json", str(file)]) == 0
    return json.loads(file.read_text())


def logged(run, step, kind):
    """What the run itself has logged of a step, under the names of an evaluation."""
    (line,) = (line for line in scores(run) if line["step"] == step and f"{kind}/loss" in line)
    return {name.replace(f"{kind}/", "eval/"): value for name, value in line.items() if name != "step"}


@pytest.mark.launches
def test_scores_are_those_of_the_run(run):
    """To the last bit, on one process and two; of the newest weights, and of the average at an earlier step."""
    before = sorted(path.stat().st_mtime_ns for path in run.rglob("*"))
    one = evaluate(run)
    assert one["scores"] == logged(run, STEPS, "eval")
    same = yaml.safe_load((run / "config.yaml").read_text())["data"]["eval_path"]
    two = evaluate(run, same, "--profile", "fsdp_cpu:2", "--step", 2, "--weights", "ema")
    assert two["scores"] == logged(run, 2, "ema") != logged(run, 2, "eval")
    assert before == sorted(path.stat().st_mtime_ns for path in run.rglob("*"))
    names, matrix = list(one["classes"]), one["confusion"]
    assert [one["classes"][name]["samples"] for name in names] == [sum(row) for row in matrix]
    right = sum(matrix[i][i] for i in range(len(names)))
    assert right / one["scores"]["eval/samples"] == one["scores"]["eval/accuracy"]
    assert sum(one["calibration"]["samples"]) == one["scores"]["eval/samples"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "3"], "no checkpoint of step 3; there are 2, 4"),
        (["--best", "--step", "2"], "give one of the two"),
        (["--profile", "nothing"], "nothing"),
    ],
)
def test_what_cannot_be_evaluated(run, words, said):
    with pytest.raises(UserError, match=said):
        app(["evaluate", str(run), *words])


def test_calibration_is_torchmetrics():
    """And does not depend on how samples are spread."""
    random = torch.Generator().manual_seed(0)
    logits, target = torch.randn(203, 5, generator=random) * 2, torch.randint(5, (203,), generator=random)
    expected = MulticlassCalibrationError(5, n_bins=15, norm="l1")(logits, target).item()
    whole, parts = Calibration(), [Calibration() for _ in range(3)]
    whole.update(logits, target)
    for part, a, b in zip(parts, logits.split(70), target.split(70), strict=True):
        part.update(a, b)
    whole.alone()
    assert whole.report()["error"] == pytest.approx(expected, rel=1e-5)
    parts[0].state = parts[2].state + parts[0].state + parts[1].state
    parts[0].alone()
    assert parts[0].report() == whole.report()


@pytest.mark.parametrize("end", ["parquet", "jsonl"])
def test_predictions_are_in_the_order_of_the_data(run, rows, tmp_path, end, monkeypatch):
    monkeypatch.setattr(tables, "AT_ONCE", 7)
    file = tmp_path / "out" / f"predictions.{end}"
    assert app(["predict", str(run), str(rows(23)), "--to", str(file), "--keep", "label", "--batch", "5"]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()] if end == "jsonl" else []
    lines = lines or pq.read_table(file).to_pylist()
    data = [json.loads(line) for line in rows(23).read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(23))
    assert [line["label"] for line in lines] == [row["label"] for row in data]
    for line in lines:
        chances = {name.removeprefix("p/"): value for name, value in line.items() if name.startswith("p/")}
        assert sum(chances.values()) == pytest.approx(1) and line["probability"] == chances[line["prediction"]]
        assert max(chances, key=chances.get) == line["prediction"]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_table_that_is_not_whole_has_no_name(tmp_path):
    with pytest.raises(ZeroDivisionError), tables.Writer(tmp_path / "a.parquet") as writer:
        writer.add({"row": 0})
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "x.csv"], "ends in .parquet or .jsonl"),
        (["--to", __file__.replace(".py", ".parquet"), "--keep", "none"], "have no such column; they have text, label"),
        (["--text", "none"], "have no such column; they have text, label"),
        (["--batch", "0"], "--batch 0: must be 1 or more"),
    ],
)
def test_what_cannot_be_predicted(run, rows, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        app(["predict", str(run), str(rows(7)), *words])


def test_models_of_other_tasks(tmp_path):
    with pytest.raises(UserError, match="is no model that transformers can read"):
        predict._task(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    with pytest.raises(UserError, match="BertForMaskedLM: predict takes classifiers"):
        predict._task(str(tmp_path))
