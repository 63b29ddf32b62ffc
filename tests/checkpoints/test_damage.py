"""Whatever file of a run is damaged: it is named, the newest good checkpoint is taken, and no other run goes on."""

import json
import shutil

import pytest
import torch
from support.damage import DAMAGE, contents
from support.launching import metrics
from support.tiny import DATA, saved, train

from app import UserError
from app.checkpoints.record import RECORD
from app.distributed.state.manifest import MANIFEST

# Every file that a checkpoint of one process has.
FILES = [MANIFEST, RECORD, "state/.metadata", "state/__0_0.distcp", "state/objects.json"]
HARM = ("missing", "truncated", "emptied", "zeroed", "flipped inside")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(folder, log_every=1)
    assert saved(folder) == [6, 8]
    checkpoint = folder / "checkpoints" / "step-00000008"
    assert sorted(str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()) == sorted(FILES)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("file", FILES)
def test_the_newest_good_checkpoint_is_taken(run, finished, file, harm, capsys):
    DAMAGE[harm](run / "checkpoints" / "step-00000008" / file)
    train(run, log_every=1)
    captured = capsys.readouterr()
    (warning,) = [line for line in captured.err.splitlines() if line.startswith("warning")]
    assert "step-00000008 is damaged" in warning and (file in warning or file == MANIFEST)
    assert "after step 6 of 8" in captured.out
    assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(finished)]


@pytest.mark.parametrize("file", FILES)
def test_where_no_checkpoint_is_good_nothing_is_overwritten(run, file):
    for step in (6, 8):
        DAMAGE["flipped inside" if file != MANIFEST else "truncated"](run / "checkpoints" / f"step-{step:08d}" / file)
    before = contents(run)
    with pytest.raises(UserError, match=r"no checkpoint in .* is good"):
        train(run)
    assert contents(run) == before


def test_damaged_records_do_not_keep_a_run_from_going_on(run, finished, capsys):
    """All of them at once; what they said is found again where a checkpoint knows it."""
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_bytes(bytes(99))
    (run / "config.yaml").unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[:2], b"\0" * 50 + b"\n", lines[3][:9] + b"\n", *lines[4:]]))
    train(run, log_every=1, epochs=3.0)
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert "run.json is damaged" in said and "config.yaml is damaged or missing" in said
    assert "metrics.jsonl: 2 damaged lines" in said
    assert "run.epochs was 2.0, is 3.0" in said
    assert [line["step"] for line in metrics(run)] == [1, 2, *range(5, 13)]
    assert json.loads((run / "run.json").read_text())["versions"] == info["versions"]
    assert (run / "config.yaml").exists()


def test_a_damaged_config_lets_no_other_settings_in(run):
    (run / "config.yaml").write_bytes(b"{")
    before = contents(run)
    with pytest.raises(UserError, match=r"run\.seed: 0 before, 1 now"):
        train(run, seed=1)
    assert contents(run) == before


def test_trackers_know_a_run_whose_run_json_is_lost(tmp_path):
    ids = {"wandb": "abc"}
    train(tmp_path, after=lambda run, model: run.folder.trackers.update(ids), stop_at=4)
    (tmp_path / "run.json").unlink()
    train(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["trackers"] == ids


def test_other_contents_in_as_many_rows_are_refused(run, capsys):
    """With the difference, before anything is trained; and accepted where that is asked for."""
    before, rows = contents(run), [*DATA]
    rows[0] = rows[0] + 1
    with pytest.raises(UserError, match=r"1 of 40 rows that were compared differ; the first is row 0.*--run\.changed"):
        train(run, rows=rows, epochs=3.0)
    assert contents(run) == before
    train(run, rows=rows, epochs=3.0, changed="accept")
    assert "the training data have changed, which is accepted" in capsys.readouterr().out
    train(run, rows=rows, epochs=4.0)
    with pytest.raises(UserError, match=r"--run\.changed"):
        train(run, epochs=5.0)


class Noisy:
    """Rows with an augmentation of their own."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return DATA[index] + torch.randn(4)


def test_rows_that_are_random_by_construction_go_on(tmp_path):
    """And looking at them changes nothing of what is drawn for training."""
    train(tmp_path / "a", rows=Noisy(), stop_at=4)
    train(tmp_path / "a", rows=Noisy())
    train(tmp_path / "b", rows=Noisy())
    a, b = ([line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in "ab")
    assert a == b
