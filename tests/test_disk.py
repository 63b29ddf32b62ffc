"""Disks that are full or cannot be written: real ones, small, where this process may mount them."""

import re
import shutil
import subprocess
from contextlib import contextmanager

import pytest
import torch

from app import UserError
from launching import metrics
from tiny import saved, train

WIDTH = 20_000
ROWS = list(torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0)))


@contextmanager
def mounted(folder, *options):
    """Mount a disk of memory of 1 MB, or skip."""
    folder.mkdir(exist_ok=True)
    command = ["mount", *(options or ("-t", "tmpfs", "-o", "size=1m", "none")), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"a disk of our own cannot be mounted here: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


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
            int(n.replace(",", "")) for n in re.search(r"needs ([\d,]+) bytes, and .* has ([\d,]+)", line).groups()
        )
        assert abs(needed - 3 * 4 * WIDTH) < 100 and free < needed and "newest checkpoint is step 2" in line


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
