"""app.run, in one process: what is saved when, and which runs are refused."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from app import OptimConfig, Run, RunConfig, UserError

DATA = list(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)


def train(folder, rows=DATA, lengths=None, scores=lambda step: {"eval/x": float(step)}, **settings):
    """Train a small model, four steps an epoch unless told otherwise; `scores` gives what a step's evaluation gives."""
    settings = {"global_batch": 10, "micro_batch": 5, "trackers": (), "epochs": 2.0, **settings}
    with Run(Config(RunConfig(dir=str(folder), **settings))) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
        for batch in run.batches(rows, torch.stack, lengths):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            if run.due(run.config.eval_every):
                run.log(scores(run.steps_done))
        return run.finish(model)


def saved(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


def test_an_evaluation_that_improves_is_saved_with_its_own_step(tmp_path):
    """The best checkpoint has the weights that were scored, whatever --run.save-every is."""
    curve = {2: 0.1, 4: 0.9, 6: 0.5, 8: 0.7}
    train(
        tmp_path,
        scores=lambda step: {"eval/x": curve[step]},
        eval_every=2,
        save_every=3,
        keep=1,
        best="eval/x",
    )
    assert saved(tmp_path) == [4, 8]
    record = json.loads((tmp_path / "checkpoints" / "step-00000004" / "record.json").read_text())
    assert record["metrics"] == {"eval/x": 0.9}


def test_the_best_is_remembered_over_sittings(tmp_path):
    curve = {2: 0.9, 4: 0.5, 6: 0.6, 8: 0.7}
    for stop in (4, 0):
        flags = {"eval_every": 2, "save_every": 4, "keep": 1, "best": "eval/x", "stop_at": stop}
        train(tmp_path, scores=lambda step: {"eval/x": curve[step]}, **flags)
    assert saved(tmp_path) == [2, 8]


def test_a_best_that_no_evaluation_gives_is_said_once(tmp_path, capsys):
    train(tmp_path, best="eval/acuracy")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "--run.best" in line]
    assert "eval/acuracy" in line and "there are eval/x" in line


def test_fewer_steps_than_were_made_are_refused(tmp_path):
    """Nothing changes in the folder."""
    train(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*") if path.is_file()}
    with pytest.raises(UserError, match=r"after step 8, and 4 steps are asked for.*--run\.epochs"):
        train(tmp_path, epochs=1.0)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("rows", "lengths", "words"),
    [
        (DATA[:-1], np.arange(39), "40 rows, and now there are 39"),
        (DATA, np.arange(40)[::-1], "40 rows of other lengths"),
    ],
)
def test_other_data_is_refused(tmp_path, rows, lengths, words):
    """Laws 1 and 4 would be broken without a word: every step's samples depend on the number of rows and lengths."""
    train(tmp_path, lengths=np.arange(40), stop_at=3)
    with pytest.raises(UserError, match=words):
        train(tmp_path, rows=rows, lengths=lengths)
    train(tmp_path, lengths=np.arange(40))


@pytest.mark.parametrize(("flags", "words"), [({"epochs": 2.0}, "--run.epochs"), ({"steps": 8}, "--run.steps")])
def test_advice_names_the_flag_that_decides(tmp_path, capsys, flags, words):
    train(tmp_path, stop_at=3, **flags)
    assert "the same command without --run.stop-at goes on after step 3" in capsys.readouterr().out
    train(tmp_path, **flags)
    assert f"a larger {words}" in capsys.readouterr().out
