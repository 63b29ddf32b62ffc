"""Training on streamed data while the store and the training are killed again and again."""

import json
import random
import sys
import time

import pytest
from support.buckets import BUCKET, environment
from support.launching import PROFILES, ROOT, Training, metrics
from support.seaweed import seaweed
from support.stream_shards import write_texts

from app import storage

SEED, STEPS = 0, 120
SHARDS, ROWS, IN_CHUNK = 40, 120, 12
SMALL = ["--scratch.width", 32, "--scratch.vocab", 300, "--scratch.layers", 1, "--data.max-length", 32]
SMALL += ["--run.steps", STEPS, "--run.global-batch", 16, "--run.micro-batch", 4, "--run.eval-every", 60]
# The cache holds an eighth of the data, so chunks are fetched to the end of a run.
SMALL += ["--data.window", 2, "--data.cache-gb", 0.0025, "--data.classes", "a", "b", "c"]


@pytest.mark.apart
@pytest.mark.launches
@pytest.mark.exhaustive  # minutes: `make laws` has it
@pytest.mark.parametrize("kills", [2, 20])
def test_no_sample_is_lost_or_doubled_by_kills_of_the_store_and_of_the_training(kills, tmp_path, monkeypatch):
    with seaweed(tmp_path / "store") as store:
        for name, value in environment(store.endpoint).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        write_texts(tmp_path / "data", SHARDS, ROWS, IN_CHUNK)
        bucket = storage.at(f"s3://{BUCKET}/corpus")
        for file in sorted((tmp_path / "data").iterdir()):
            bucket.write(file.name, file.read_bytes())
        flags = ["--kills", kills, "--seed", SEED, "--folder", tmp_path / "runs", "--json", tmp_path / "found.json"]
        flags += ["--profiles", PROFILES / "cpu.yaml", PROFILES / "ddp_cpu.yaml", "--save-every", 10]
        words = [sys.executable, "-m", "app", "torture", ROOT / "recipes" / "cls.py", *flags, *SMALL]
        began, torture = time.monotonic(), Training(tmp_path, [*words, "--data.path", f"s3://{BUCKET}/corpus"])
        try:
            torture.wait_for((tmp_path / "runs" / "tortured-1").exists, 120)
            with store.killed_at_random(random.Random(SEED), up=15, down=3):
                torture.wait_for(lambda: torture.process.poll() is not None, 120 * (kills + 2))
        finally:
            torture.end()
        assert torture.process.returncode == 0, torture.output()
    found = json.loads((tmp_path / "found.json").read_text())
    print(f"{kills} kills of training, {store.kills} of the store, in {time.monotonic() - began:.0f} s")
    assert len(found["kills"]) == kills <= store.kills and found["finished"]
    assert not found["lost"] and not found["differences"]
    ledgers = [
        [line["ids"] for line in metrics(folder) if "ids" in line]
        for folder in (tmp_path / "runs").iterdir()
        if folder.is_dir()
    ]
    assert len({tuple(ledger) for ledger in ledgers}) == 1 and len({*ledgers[0]}) == 120
