"""Streams from a store that fails for a while or for good, and shards that are damaged after they were indexed."""

import contextlib
import io
import json
import os
import re
import shutil

import pytest
from pyarrow import parquet
from support.buckets import BUCKET, Fault
from support.launching import ROOT, launch, launch_many, saved_state, scores, steps, train_many
from support.stream_shards import write_texts

from app import UserError, storage
from laws import many

RECIPE = ROOT / "recipes" / "cls.py"
STEPS, STOP = 24, 9
SMALL = ["--scratch.width", 32, "--scratch.vocab", 300, "--scratch.layers", 1, "--data.max-length", 32]
SMALL += ["--run.log-every", 1, "--run.exact", "true", "--run.save-every", 100, "--optim.lr", 5e-3]
SMALL += ["--run.global-batch", 24, "--run.micro-batch", 5, "--run.steps", STEPS, "--run.eval-every", STEPS]
# The cache holds half of the data, so chunks are fetched to the end of a run.
SMALL += [
    "--data.cache-gb",
    0.0015,
    "--data.window",
    2,
    "--data.classes",
    "a",
    "b",
    "c",
    "--data.stream",
    "true",
    "--run.trackers",
]
SHARDS, ROWS, IN_CHUNK = 12, 48, 8
HARMS = ("503", "slow", "truncated", "reset", "flipped")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write the shards, and rows to evaluate on."""
    folder = tmp_path_factory.mktemp("data")
    write_texts(folder / "web", SHARDS, ROWS, IN_CHUNK)
    write_texts(folder / "held", 1, 9, 9)
    return folder


def flags(data, path, folder, *more):
    where = ["--data.path", path, "--data.eval-path", data / "held" / "part-000.parquet", "--run.dir", folder]
    return [*SMALL, *where, *more]


def same(one, other):
    assert len(steps(one)) == STEPS and steps(other) == steps(one)
    assert scores(other) == scores(one) and saved_state(other, STEPS) == saved_state(one, STEPS)


def test_a_store_that_fails_changes_nothing_and_one_that_stays_away_ends_the_run(data, proxy, data_cache, tmp_path):
    """Laws 1 to 4, from a bucket, with loading processes and without: requests fail in every way now and then.

    Then the store stays away in the middle of a run, which ends on all ranks, and later goes on elsewhere.
    """

    def bucket(name):
        place = f"s3://{BUCKET}{tmp_path}/{name}"
        for file in sorted((data / "web").iterdir()):
            storage.at(place).write(file.name, file.read_bytes())
        return flags(data, place, tmp_path / name)

    train_many("cpu", 1, RECIPE, [flags(data, data / "web", tmp_path / "local")], tmp_path)
    commands = [[*bucket(f"workers-{n}"), "--run.workers", n] for n in (0, 2)]
    away = bucket("away")
    places = [(does, f"workers-{n}/part-0{i:02}") for n in (0, 2) for i, does in enumerate(HARMS)]
    proxy.faults = [Fault(does, "GET", holding, seconds=1.5) for does, holding in places]
    proxy.faults += [Fault("503", times=2), Fault("reset", method="HEAD", times=2)]
    launch_many("ddp_cpu", 2, RECIPE, [*commands, [*away, "--run.stop-at", STOP]], tmp_path)
    assert all(fault.met.is_set() and not fault.times for fault in proxy.faults)
    for workers in (0, 2):
        same(tmp_path / "local", tmp_path / f"workers-{workers}")

    proxy.faults = [Fault("503", method="GET", holding="away/part-", times=10**6)]
    file = tmp_path / "away.json"
    file.write_text(json.dumps([(str(RECIPE), [str(word) for word in away], None)]))
    result = launch("ddp_cpu", 2, ROOT / "tests" / "laws" / "impatient.py", file, timeout=150)
    (tmp_path / "out").write_text(result.output)
    told = re.findall(r"^error: .*", result.output, re.M)
    assert 1 <= len(told) <= 2  # both ranks may fail at one time, in chunks of their own
    for line in told:
        assert re.match(r"error: --data.path s3://\S+/part-0\d+.parquet, chunk at byte \d+ \(8 rows\): cannot be", line)
        assert "the store answers 503 (SlowDown); it was asked for minutes; repeat the command when" in line
    assert result.status != 0 and json.loads((tmp_path / "away" / "run.json").read_text())["status"] == "failed"
    proxy.faults = []
    train_many("cpu", 1, RECIPE, [away], tmp_path)
    same(tmp_path / "local", tmp_path / "away")


LAYOUTS = {"one": ("cpu", 1), "ddp2": ("ddp_cpu", 2), "fsdp2": ("fsdp_cpu", 2)}


def damage(file):
    """Damage a row group of a shard, whose size and times stay."""
    about, group = os.stat(file), parquet.ParquetFile(file).metadata.row_group(1).column(0)
    with open(file, "r+b") as opened:
        opened.seek(group.dictionary_page_offset + 200)  # in its texts, behind the header of a page
        opened.write(b"\xff\x00" * 4)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.fixture(scope="module")
def skipped(tmp_path_factory, data, data_cache):
    """Train on shards of which one was damaged after they were indexed: on one process, and on two layouts in turn."""
    root = tmp_path_factory.mktemp("skipped")
    (root / "web").mkdir()
    for file in sorted((data / "web").iterdir())[: SHARDS // 2]:  # an epoch of 12 steps
        shutil.copy2(file, root / "web")
    first = flags(data, root / "web", root / "first", "--run.steps", 1)
    train_many("cpu", 1, RECIPE, [first], root)
    shutil.rmtree(data_cache / "samestep" / "chunks")
    damage(root / "web" / "part-005.parquet")

    def command(name, *more):
        words = flags(data, root / "web", root / name, "--data.bad", "skip", *more)
        return [str(RECIPE), [str(word) for word in words], None]

    said, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        many.main([command("one")])
    said["one"] = printed.getvalue()
    for name, more in (("ddp2", ["--run.stop-at", STEPS // 2 + 2]), ("fsdp2", [])):
        file = root / f"{name}.json"
        file.write_text(json.dumps([command("chain", *more)]))
        result = launch(*LAYOUTS[name], ROOT / "tests" / "laws" / "many.py", file)
        assert result.status == 0, result.output
        said[name] = result.output
    return root, said


def test_damaged_chunks_are_left_out_alike_on_every_layout(skipped):
    """Laws 1 to 5: the same ledger and bits without the rows, which are counted over the whole run.

    DDP x2 begins, and in the second epoch FSDP2 x2 goes on.
    """
    root, said = skipped
    lines = steps(root / "one")
    assert len(lines) == STEPS and len({line["ids"] for line in lines}) == STEPS
    assert lines[-1]["missing_samples"] == 2 * IN_CHUNK  # in each of two epochs
    assert steps(root / "chain") == lines
    assert saved_state(root / "chain", STEPS) == saved_state(root / "one", STEPS)
    for name, output in said.items():
        told = re.findall(r"^warning: .*left out \(--data.bad skip\)", output, re.M)
        assert 1 <= len(told) <= 2 * LAYOUTS[name][1]
        assert all("part-005.parquet, chunk at byte" in each and "(8 rows)" in each for each in told)


def test_a_damaged_chunk_ends_a_run_with_its_name(skipped, data):
    root, _ = skipped
    with pytest.raises(
        UserError, match=r"--data.path .*part-005.parquet, chunk at byte \d+ \(8 rows\): cannot be read"
    ):
        train_many("cpu", 1, RECIPE, [flags(data, root / "web", root / "ends")], root)
