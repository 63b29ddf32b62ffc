"""A run in a bucket, on one layout and another machine's disk after the other, with real launches."""

import json
import shutil

import pytest
from support.buckets import BUCKET, Fault
from support.launching import ROOT, Training, file_of, launch, metrics
from support.launching import environment as usual

from app import storage
from app.launching.launcher import kill_tree, launcher_words

TOY, APART = (ROOT / "tests" / "laws" / f"{name}.py" for name in ("toy", "toy_apart"))
FLAGS = ["--run.exact", "true", "--run.save-every", 5]
pytestmark = pytest.mark.launches


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """Give the run that nothing happens to."""
    folder = tmp_path_factory.mktemp("disk") / "run"
    result = launch("cpu", 1, TOY, "--run.dir", folder, *FLAGS)
    assert result.status == 0, result.output
    return folder


def check_same(place: str, on_disk) -> None:
    """Compare a run in a bucket with one on a disk: each step's loss and samples, and the weights, in every bit."""
    files = storage.at(place)
    lines = [json.loads(line) for line in files.open_log("metrics.jsonl").read().splitlines()]
    assert [(line["step"], line.get("loss"), line.get("ids")) for line in lines] == [
        (line["step"], line.get("loss"), line.get("ids")) for line in metrics(on_disk)
    ]
    assert files.read("model/model.safetensors") == (on_disk / "model" / "model.safetensors").read_bytes()


def test_a_run_in_a_bucket_goes_on_on_other_layouts_and_machines(near, on_disk, tmp_path):
    """One process, then DDP x2, then FSDP2 x2: no rank shares a disk with another, or finds anything on its own."""
    place = f"s3://{BUCKET}/{str(tmp_path).strip('/')}/run"
    for profile, processes, stop in (("cpu", 1, 12), ("ddp_cpu", 2, 27), ("fsdp_cpu", 2, 0)):
        machine = {"XDG_CACHE_HOME": str(tmp_path / profile)}
        words = [APART, "--run.dir", place, *FLAGS, "--run.stop-at", stop]
        result = launch(profile, processes, *words, env=usual(machine))
        assert result.status == 0, result.output
        assert (tmp_path / profile / f"rank-{processes - 1}").is_dir()
        assert not any(path.is_file() for path in (tmp_path / profile).rglob("staged/**/*")), result.output
    assert f"resuming {place} after step 27 of 40 (saved on" in result.output
    check_same(place, on_disk)


@pytest.mark.parametrize("going_up", ["__0_0.distcp", "manifest.json"])
def test_a_run_that_is_killed_while_a_checkpoint_goes_up_goes_on_without_its_disk(
    proxy, on_disk, tmp_path, monkeypatch, going_up
):
    place, machine = f"s3://{BUCKET}/{str(tmp_path).strip('/')}/run", tmp_path / "machine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine))
    proxy.faults = [fault := Fault("slow", "PUT", f"{going_up}", times=0, seconds=5)]
    words = [*launcher_words(file_of("cpu"), 0, TOY), "--run.dir", place, *FLAGS]
    monkeypatch.setenv("PAUSE", "0.3")
    training = Training(tmp_path, words)
    try:
        training.wait_for(lambda: "step-00000005" in storage.at(f"{place}/checkpoints").published("manifest.json"), 200)
        fault.times = 1
        training.wait_for(fault.met.is_set, 100)
        kill_tree(training.process.pid)
    finally:
        training.end()
    shutil.rmtree(machine)
    monkeypatch.setenv("PAUSE", "0")
    result = launch("cpu", 1, TOY, "--run.dir", place, *FLAGS)
    assert result.status == 0, result.output
    assert f"resuming {place} after step " in result.output
    check_same(place, on_disk)
