"""A run in a bucket, on one layout and another machine's disk after the other, with real launches."""

import json

import pytest
from support.buckets import BUCKET
from support.launching import ROOT, launch, metrics
from support.launching import environment as usual

from app import storage

TOY, APART = (ROOT / "tests" / "laws" / f"{name}.py" for name in ("toy", "toy_apart"))
FLAGS = ["--run.exact", "true", "--run.save-every", 5]


@pytest.mark.launches
def test_a_run_in_a_bucket_goes_on_on_other_layouts_and_machines(near, tmp_path):
    """One process, then DDP x2, then FSDP2 x2: no rank shares a disk with another, or finds anything on its own."""
    on_disk, place = tmp_path / "disk", f"s3://{BUCKET}/{str(tmp_path).strip('/')}/run"
    result = launch("cpu", 1, TOY, "--run.dir", on_disk, *FLAGS)
    assert result.status == 0, result.output
    for profile, processes, stop in (("cpu", 1, 12), ("ddp_cpu", 2, 27), ("fsdp_cpu", 2, 0)):
        machine = {"XDG_CACHE_HOME": str(tmp_path / profile)}
        words = [APART, "--run.dir", place, *FLAGS, "--run.stop-at", stop]
        result = launch(profile, processes, *words, env=usual(machine))
        assert result.status == 0, result.output
        assert not any(path.is_file() for path in (tmp_path / profile).rglob("staged/**/*")), result.output
    assert f"resuming {place} after step 27 of 40 (saved on" in result.output
    files = storage.at(place)
    lines = [json.loads(line) for line in files.open_log("metrics.jsonl").read().splitlines()]
    assert [(line["step"], line.get("loss"), line.get("ids")) for line in lines] == [
        (line["step"], line.get("loss"), line.get("ids")) for line in metrics(on_disk)
    ]
    assert files.read("model/model.safetensors") == (on_disk / "model" / "model.safetensors").read_bytes()
