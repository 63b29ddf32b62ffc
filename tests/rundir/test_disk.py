"""Disks that are full or cannot be written: real ones, small, where this process may mount them."""

import json
import re
import shutil
import subprocess
import threading

import pytest
import torch
from support.disks import mounted
from support.launching import ROOT, metrics
from support.tiny import saved, train

from app import UserError, parse
from app.__main__ import main
from app.training.loop import ending
from laws.many import load

WIDTH = 20_000
ROWS = list(torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("beside", [True, False])
def test_training_goes_on_while_the_disk_is_full(tmp_path, capsys, beside):
    """Two saves fail, with the numbers and without a trace; when there is room again, the next one works."""
    found = []
    with mounted(tmp_path / "disk") as disk:
        ballast = disk / "ballast"

        def after(run, model):
            if run.steps_done == 3:
                run.services.checkpoint_manager.wait()
                free = 0.2 * WIDTH * 12
                ballast.write_bytes(bytes(int(shutil.disk_usage(disk).free - free)))
            if run.steps_done == 7:
                run.services.checkpoint_manager.wait()
                found.append(sorted(path.name for path in (disk / "run" / "checkpoints").iterdir()))
                ballast.unlink()

        train(disk / "run", after, rows=ROWS, width=WIDTH, save_async=beside, log_every=1)
        assert found == [["step-00000002"]]
        assert saved(disk / "run") == [2, 8]
        assert len(metrics(disk / "run")) == 8
        train(disk / "run", rows=ROWS, width=WIDTH, epochs=3.0, stop_at=9)
    captured = capsys.readouterr()
    assert "after step 8 of 12" in captured.out
    warnings = [line for line in captured.err.splitlines() if "no checkpoint was saved" in line]
    assert [re.search(r"at step (\d+)", line)[1] for line in warnings] == ["4", "6"]
    for line in warnings:
        needed, free = (
            int(n.replace(",", "")) for n in re.search(r"needs ([\d,]+) bytes \(.*, and .* has ([\d,]+)", line).groups()
        )
        assert abs(needed - 3 * 4 * WIDTH) < 100 and free < needed and "newest checkpoint is step 2" in line


def leave(disk, checkpoints, more):
    """Fill a disk up to so much room: for some checkpoints, and so many bytes more."""
    free = int(shutil.disk_usage(disk).free - checkpoints * WIDTH * 12 - more)
    (disk / "ballast").write_bytes(bytes(free))


def told(folder):
    info = json.loads((folder / "run.json").read_text())
    return info["status"], info["error"] or ""


def test_a_full_disk_at_the_finished_model_costs_no_training(tmp_path):
    """The error names the folder, the need and the room; the same command writes the model and trains nothing."""
    trained = []

    def after(run, model):
        trained.append(run.steps_done)
        if run.steps_done == 8 and len(trained) == 8:
            run.services.checkpoint_manager.wait()
            leave(disk, 1, 0.6 * WIDTH * 4)

    with mounted(tmp_path / "disk") as disk:
        folder, more = disk / "run", {"rows": ROWS, "width": WIDTH, "save_every": 4}
        with pytest.raises(UserError, match=r"model: the model is not written: No space left on device") as refused:
            train(folder, after, **more)
        words = re.search(r"it needs ([\d,]+) bytes \(0\.1 MiB\), and (\S+) has ([\d,]+) bytes", str(refused.value))
        needed, there = (int(words[place].replace(",", "")) for place in (1, 3))
        assert needed == 4 * (WIDTH + 1) > there and words[2] == str(folder / "model")
        assert "as the newest checkpoint is step 8" in str(refused.value) and "\n" not in str(refused.value)
        assert saved(folder) == [4, 8] and told(folder) == ("failed", f"UserError: {refused.value}")
        assert not list(folder.glob("model*"))
        (disk / "ballast").unlink()
        train(folder, after, **more)
        assert trained == [*range(1, 9)] and (folder / "model" / "model.safetensors").is_file()
        assert told(folder)[0] == "finished"


def test_an_older_checkpoint_makes_room_for_that_of_the_last_step(tmp_path):
    def after(run, model):
        if run.steps_done == 8:
            run.services.checkpoint_manager.wait()
            leave(disk, 0.4, 0)

    with mounted(tmp_path / "disk") as disk:
        train(disk / "run", after, rows=ROWS, width=WIDTH)
        assert saved(disk / "run") == [6, 8] and told(disk / "run")[0] == "finished"


@pytest.mark.parametrize("made", [True, False])
def test_a_run_waits_for_room_for_its_last_step(tmp_path, monkeypatch, capsys, made):
    """Until there is some; or ends with what it has, and the same command goes on from there."""
    monkeypatch.setattr(ending, "PAUSE", 0.1)

    def after(run, model):
        if run.steps_done == 8:
            run.services.checkpoint_manager.wait()
            leave(disk, 0.4, 0)
            run.config.timeout = 30.0 if made else 0.3
            if made:
                threading.Timer(1.0, (disk / "ballast").unlink).start()

    with mounted(tmp_path / "disk") as disk:
        folder, more = disk / "run", {"rows": ROWS, "width": WIDTH, "keep": 1}
        if made:
            train(folder, after, **more)
        else:
            with pytest.raises(
                UserError, match=r"no checkpoint of step 8 could be saved: it needs .* step 6, from which"
            ):
                train(folder, after, **more)
            assert saved(folder) == [6] and told(folder)[0] == "failed"
            (disk / "ballast").unlink()
            train(folder, **more)
        assert saved(folder) == [8] and told(folder)[0] == "finished" and (folder / "model").is_dir()
    assert "waiting to save step 8 until there is room: it needs" in capsys.readouterr().err


def test_a_folder_on_a_disk_that_is_read_only_is_refused_before_anything_is_trained(tmp_path):
    train(tmp_path / "run", stop_at=4)
    trained = []
    with mounted(tmp_path / "same", "--bind", str(tmp_path / "run")) as same:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(same)], check=True)
        for folder in (same, same / "new"):
            with pytest.raises(UserError, match=rf"--run\.dir {folder}: Read-only file system"):
                train(folder, after=lambda run, model: trained.append(1))
    assert not trained
    train(tmp_path / "run")


def test_a_full_disk_at_an_export_is_one_line(tmp_path):
    """It names the folder, the need and the room, leaves nothing, and the same command exports when there is room."""
    recipe = load(ROOT / "tests" / "laws" / "toy.py")
    recipe.train(
        parse(recipe.Config, ["--run.dir", str(tmp_path / "run"), "--run.steps", "2", "--run.save-every", "1"])
    )
    with mounted(tmp_path / "disk") as disk:
        leave(disk, 0, 0)
        words = ["export", str(tmp_path / "run"), "--to", str(disk / "out")]
        with pytest.raises(UserError) as refused:
            main(words)
        (line,) = str(refused.value).splitlines()
        assert "No space left on device: it needs" in line and str(disk) in line and "MiB) free" in line
        assert sorted(path.name for path in disk.iterdir()) == ["ballast"]
        (disk / "ballast").unlink()
        assert main(words) == 0 and (disk / "out" / "model.safetensors").is_file()
