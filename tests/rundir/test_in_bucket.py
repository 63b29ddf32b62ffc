"""A run's folder in a bucket: what lies there, what a run goes on from, and what happens while the store is away."""

import functools
import json
import time
from pathlib import Path

import pytest
from support.buckets import BUCKET, IMPATIENT, SECRET, Fault
from support.tiny import train, train_and_score

from app import storage
from app.checkpoints import patience
from app.errors import UserError
from app.rundir import history, logs
from app.storage.bucket import BucketStorage, scratch
from app.storage.bucket_log import PARTS

pytestmark = pytest.mark.launches  # moto is a process


@pytest.fixture
def place(near, tmp_path, monkeypatch) -> str:
    """Give the URL of a folder that is not there yet, to a machine that has staged nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    monkeypatch.chdir(tmp_path)
    return f"s3://{BUCKET}/{str(tmp_path).strip('/')}/run"


@pytest.fixture
def impatient(monkeypatch):
    """Have nobody wait long for a store."""
    short = IMPATIENT._replace(retries=1, seconds=1)
    monkeypatch.setattr(storage, "BucketStorage", functools.partial(BucketStorage, patience=short))
    monkeypatch.setattr(patience, "PAUSE", 0.1)
    monkeypatch.setattr(logs, "PAUSE", 0.1)


def lines_of(place) -> list[dict]:
    return [json.loads(line) for line in storage.at(place).open_log("metrics.jsonl").read().splitlines()]


def steps_of(place) -> list[str]:
    return storage.at(f"{place}/checkpoints").published("manifest.json")


def bits_of(lines: list[dict]) -> list[tuple]:
    """Return what two runs must agree on, of each step."""
    return [(line["step"], line["loss"], line["ids"]) for line in lines if "ids" in line]


def test_a_run_in_a_bucket_has_the_bits_of_one_on_a_disk_and_leaves_the_same_files(place, tmp_path):
    on_disk, files = tmp_path / "disk", storage.at(place)
    settings = {"log_every": 1, "save_every": 8, "keep": 1}
    train(on_disk, **settings)
    train(place, stop_at=5, **settings)
    assert history.read(Path(place)).status == "preempted"
    train(place, **settings)
    assert bits_of(lines_of(place)) == bits_of(lines_of(on_disk)) and len(bits_of(lines_of(place))) == 8
    names = {entry.name for entry in storage.at(on_disk).files()}
    assert {entry.name for entry in files.files()} == names
    assert files.read("model/model.safetensors") == (on_disk / "model" / "model.safetensors").read_bytes()
    assert history.read(Path(place)).status == "finished"


def test_nothing_of_a_run_in_a_bucket_stays_on_the_machine_and_no_secret_goes_up(place, tmp_path):
    train(place)
    here = {path.name for path in tmp_path.iterdir()}
    assert "s3:" not in here and here <= {"machine"}
    assert [path for path in (scratch() / "staged").rglob("*") if path.is_file()] == []
    for entry in storage.at(place).files():
        assert SECRET.encode() not in storage.at(place).read(entry.name)
    keys = {about.key for about in storage.at(place)._objects.below(storage.at(place)._key(""))}
    assert not any(PARTS in key or ".tmp" in key for key in keys)  # lines are one file, and no draft is left


def test_processes_that_load_data_are_forked_from_a_run_in_a_bucket(place):
    """They use no bucket, so they neither hang nor take the lock along."""
    train(place, log_every=1, workers=2)
    train(place, log_every=1, workers=2, epochs=3.0)
    assert [line["step"] for line in lines_of(place)] == [*range(1, 13)]


def test_messages_show_urls_as_they_are_typed(place, capfd):
    train(place, stop_at=4)
    train(place, stop_at=6)
    assert f"resuming {place} after step 4" in capfd.readouterr().out
    with pytest.raises(UserError, match=f"--run.resume never: {place} holds a run"):
        train(place, resume="never")


def test_a_damaged_checkpoint_in_a_bucket_is_left_out_and_one_without_a_manifest_is_none(place, capfd):
    train(place, stop_at=4)
    files = storage.at(place)
    name = "checkpoints/step-00000004/state/__0_0.distcp"
    files.write(name, files.read(name)[:-1] + b"?")
    train(place, stop_at=6)
    assert "after step 2" in capfd.readouterr().out
    files.delete("checkpoints/step-00000006/manifest.json")
    assert "step-00000006" not in steps_of(place)


def test_a_manifest_that_names_a_file_outside_is_refused(place, capfd):
    train(place, stop_at=4)
    files = storage.at(place)
    manifest = json.loads(files.read("checkpoints/step-00000004/manifest.json"))
    manifest["files"]["../../config.yaml"] = {"size": 1, "xxh3": "0"}
    files.write("checkpoints/step-00000004/manifest.json", json.dumps(manifest))
    train(place, stop_at=6)
    assert "does not lie in the folder" in capfd.readouterr().err


def test_what_arrives_damaged_is_not_committed(place, proxy, monkeypatch, capfd):
    up = BucketStorage.up

    def flip(files, name="", on_block=lambda: None):
        staged = files._below("staged", name)
        if name.endswith(".distcp"):
            staged.write_bytes(staged.read_bytes()[:-1] + b"?")
        up(files, name, on_block)

    monkeypatch.setattr(BucketStorage, "up", flip)
    with pytest.raises(UserError, match="no checkpoint of step 8 could be saved"):
        train(place, timeout=5, save_every=8)
    assert "the store has other contents than were sent" in capfd.readouterr().err
    assert steps_of(place) == []


def test_a_store_that_ignores_conditions_is_refused_before_anything_is_written(place, proxy):
    proxy.lies = True
    with pytest.raises(UserError, match="ignores the condition of a write"):
        train(place)
    proxy.lies = False
    assert storage.at(place).files() == []


def test_two_runs_do_not_share_a_folder_in_a_bucket(place):
    def start_another(run, model):
        if run.steps_done == 3:
            with pytest.raises(UserError, match="is in use by"):
                train(place)

    train(place, start_another)


@pytest.mark.parametrize("url", ["https://example.org/run", "hf://datasets/a/b/run"])
def test_a_url_that_is_only_read_is_refused(url):
    with pytest.raises(UserError, match=f"--run.dir {url}: a run is written there"):
        train(url)


def test_a_store_that_is_away_costs_warnings_and_no_training(place, proxy, impatient, capfd):
    """Away from step 3 to step 7: the save of step 4 goes up later, and that of step 6 is left out."""
    said, times = [""], []

    def after(run, model):
        if run.steps_done == 3:
            run.services.checkpoint_manager._writing.join()
            proxy.faults = [Fault("reset", times=10**9)]
        times.append(time.monotonic())
        if run.steps_done == 7:
            while "The checkpoint of step 4 goes up once the store is back" not in said[0]:
                said[0] += capfd.readouterr().err
                assert time.monotonic() < times[-1] + 60
            proxy.faults = []
            run.services.checkpoint_manager._writing.join()

    train(place, after, log_every=1)
    said[0] += capfd.readouterr().err
    assert times[6] - times[2] < 5
    assert "step 6 is not saved: the checkpoint of step 4, after 0:0" in said[0]
    assert "lines are kept until they can be written" in said[0]
    assert steps_of(place) == ["step-00000004", "step-00000008"]
    assert [line["step"] for line in lines_of(place)] == [*range(1, 9)]


def test_the_lines_of_a_checkpoint_are_kept_before_it_is(place, monkeypatch):
    """As a run that is killed after the checkpoint goes on behind them."""
    kept: list[bool] = []
    publish = BucketStorage.publish

    def look(files, draft, name, seal):
        kept.append([line["step"] for line in lines_of(place)] == [1, 2, 3, 4])
        publish(files, draft, name, seal)

    monkeypatch.setattr(BucketStorage, "publish", look)
    monkeypatch.setattr(logs, "PACE", 30.0)
    train(place, log_every=1, save_every=4, stop_at=4)
    assert kept == [True]


def test_a_checkpoint_with_the_best_score_is_kept_in_a_bucket_and_no_worse_one_is_saved(place, monkeypatch):
    made: list[str] = []
    publish = BucketStorage.publish
    monkeypatch.setattr(BucketStorage, "publish", lambda *args: (made.append(args[2]), publish(*args)))
    scores = {2: 0.1, 4: 0.9, 6: 0.5, 8: 0.4}
    settings = {"save_every": 100, "eval_every": 2, "keep": 1, "best": "eval/x", "save_async": False}
    train_and_score(place, scores=lambda step: {"eval/x": scores[step]}, **settings)
    assert made == ["step-00000002", "step-00000004", "step-00000008"]
    assert steps_of(place) == ["step-00000004", "step-00000008"]


def test_a_run_whose_lock_was_taken_over_writes_no_more(place):
    def take_over(run, model):
        if run.steps_done == 3:
            storage.at(place).write(
                "lock", json.dumps({"text": "process 1 on elsewhere since then\n1 x\n", "renewals": 1})
            )

    with pytest.raises(UserError, match="was taken over by process 1 on elsewhere"):
        train(place, take_over, save_every=4)
    assert steps_of(place) == []


def test_a_store_that_takes_no_lines_at_the_end_is_told(place, monkeypatch, tmp_path):
    said: list[str] = []
    monkeypatch.setattr(logs, "LAST", 0.2)

    class Away:
        def append(self, data):
            raise OSError(5, "the store cannot be reached")

    log = logs._LaterLog(Away(), Path("s3:/b/metrics.jsonl"), said.append)
    log.append(b"line\nline\n")
    with pytest.raises(OSError):
        log.flush()
    log.close()
    assert len(said) == 2 and "the last 2 lines are lost: the store cannot be reached" in said[1]
