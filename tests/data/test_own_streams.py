"""A recipe of one's own over a stream: rows by their numbers, weights that only a row knows, and scores."""

import json
import shutil

import datasets
import pytest
import torch
from support.launching import steps
from support.tiny import Config
from torch import nn

from app import OptimConfig, Run, RunConfig, UserError
from app.data.fingerprint import contents, difference
from app.data.streams.opening import stream

pytestmark = pytest.mark.usefixtures("own_data_cache")
ROWS = [{"x": [i / 100, 1.0], "y": i % 7 / 7, "weight": float(i % 3)} for i in range(100)]


@pytest.fixture
def shards(tmp_path):
    """Return a folder of two shards of parquet, in chunks of seven rows, and one to evaluate on."""
    (tmp_path / "shards").mkdir()
    for name, part in (("train-0", ROWS[:60]), ("train-1", ROWS[60:]), ("validation-0", ROWS[:9])):
        datasets.Dataset.from_list(part).to_parquet(tmp_path / "shards" / f"{name}.parquet", batch_size=7)
    return tmp_path / "shards"


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in ("x", "y", "weight")}


def train(folder, rows, scored=None, weights=None, **more):
    """Train a linear model, by weights of rows if asked for, and return its scores."""
    settings = RunConfig(dir=str(folder), global_batch=20, micro_batch=5, trackers=(), log_every=1, exact=True, **more)
    with Run(Config(settings)) as run:
        model, optimizer = run.prepare(nn.Linear(2, 1), OptimConfig(lr=0.1, warmup=0.0))
        for batch in run.batches(rows, collate, weights=weights):
            for micro in batch.micros(model):
                each = (model(micro.inputs["x"])[:, 0] - micro.inputs["y"]).square()
                weight = micro.inputs["weight"] if weights else torch.ones_like(each)
                run.backward((each * weight).sum() / weight.sum(), micro)
            run.step(optimizer)
            if scored is not None and run.due(run.config.eval_every):
                scores = run.scores_of()
                for micro in run.evaluation(model, scored, collate):
                    each = (model(micro.inputs["x"])[:, 0] - micro.inputs["y"]).square()
                    scores.update(micro.weight, loss=each.mean())
                run.log(scores.compute())
        return run.finish(model)


def test_rows_are_those_of_the_shards(shards):
    rows = stream(str(shards))
    assert [rows[i] for i in range(100)] == ROWS
    assert [*map(stream(str(shards), "validation").__getitem__, range(9))] == ROWS[:9]
    assert (len(rows), len(stream(str(shards), "validation"))) == (100, 9)


def test_a_loop_of_ones_own_trains_and_scores(shards, tmp_path):
    """An epoch has each row once; a run that was stopped goes on as if it had not been."""
    scored = stream(str(shards), "validation")
    scores = train(tmp_path / "whole", stream(str(shards), window=2), scored, epochs=4.0)
    assert scores["eval/samples"] == 9 and scores["eval/loss"] < 0.2
    train(tmp_path / "parts", stream(str(shards), window=2), scored, epochs=4.0, stop_at=7)
    assert train(tmp_path / "parts", stream(str(shards), window=2), scored, epochs=4.0) == scores
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    record = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert record["status"] == "finished" and len(steps(tmp_path / "whole")) == 20


@pytest.mark.parametrize("rows", [60, 59])
def test_a_run_over_shards_that_have_changed_is_refused_by_their_names(rows, shards, tmp_path):
    """Also one of as many rows; and a copy elsewhere is no change."""
    train(tmp_path / "run", stream(str(shards)), steps=4, stop_at=2)
    shutil.copytree(shards, tmp_path / "copy")
    train(tmp_path / "run", stream(str(tmp_path / "copy")), steps=4, stop_at=3)
    other = datasets.Dataset.from_list([{**row, "y": 0.5} for row in ROWS[60 : 40 + rows]])
    other.to_parquet(shards / "train-1.parquet", batch_size=7)
    with pytest.raises(UserError, match=r"run holds a run.*train-1.parquet has changed"):
        train(tmp_path / "run", stream(str(shards)), steps=4)
    (shards / "train-1.parquet").unlink()
    with pytest.raises(UserError, match=r"run holds a run .*train-1.parquet is gone"):
        train(tmp_path / "run", stream(str(shards)), steps=4)
    with pytest.raises(UserError, match=r"it was streamed, and now is not: try --data.stream true"):
        train(tmp_path / "run", ROWS, steps=4)


def test_of_many_shards_the_neighbours_of_the_one_that_has_changed_are_named(tmp_path):
    def written(number, text="a"):
        (tmp_path / f"{number:04}.jsonl").write_text(json.dumps({"text": text}))

    for number in range(600):
        written(number)
    before = contents(stream(str(tmp_path)))
    assert len(before["shards"]) == 200 and len(json.dumps(before)) < 20_000
    written(301, "b")
    now = contents(stream(str(tmp_path)))
    assert difference(before, now) == "one of 0300.jsonl to 0302.jsonl is another one"


def test_weights_are_a_function_of_a_row(shards, tmp_path):
    """Rows of weight 0 count for nothing: the loss of a step is the weighted mean over its rows."""
    rows, seen = stream(str(shards)), []

    def weight(row):
        seen.append(row)
        return row["weight"]

    train(tmp_path / "run", rows, weights=weight, steps=1)
    assert len(seen) == 20 and {row["weight"] for row in seen} == {0.0, 1.0, 2.0}
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(expected(tmp_path / "again", seen), rel=1e-6)


def expected(folder, rows):
    """Return the weighted loss of rows that are one micro-batch, by a run of them alone."""
    settings = RunConfig(dir=str(folder), global_batch=20, micro_batch=20, trackers=(), steps=1)
    with Run(Config(settings)) as run:
        model, _ = run.prepare(nn.Linear(2, 1), OptimConfig())
        inputs = collate(rows)
        with torch.no_grad():
            each = (model(inputs["x"])[:, 0] - inputs["y"]).square()
        return float((each * inputs["weight"]).sum() / inputs["weight"].sum())


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"stream .*nowhere: there is nothing of this name"):
        stream(str(tmp_path / "nowhere"))


def test_a_cache_that_is_too_small_is_refused_before_the_first_step(shards, tmp_path):
    with pytest.raises(UserError, match=r"--data.cache-gb: it allows 1e-06 GB, .*for each of 4 micro-batches"):
        train(tmp_path / "run", stream(str(shards), cache_gb=1e-6), steps=1)
    assert not (tmp_path / "run").exists()
