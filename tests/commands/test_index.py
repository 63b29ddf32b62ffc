"""The index of streamed data, made by a command: what it says of them, where it lies, and what is damaged."""

import re

import datasets
import pytest
from support.buckets import BUCKET, Fault
from support.stream_shards import ROWS, lines, written

from app import storage
from app.__main__ import main as command
from app.data.streams import chunks, index
from app.data.streams.shards import find_shards
from app.errors import UserError


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, tmp_path):
    """Let chunks be of 400 bytes, so that small shards have several; and keep indexes in a folder of their own."""
    monkeypatch.setattr(chunks, "LEAST", 400)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def shown(capsys, *words):
    """Run the command; return its status, and what it prints by the first word of each line."""
    status = command(["index", *map(str, words)])
    return status, dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_it_says_what_the_data_are_and_lies_next_to_them(tmp_path, capsys, monkeypatch):
    folder = written(tmp_path / "data", "parquet")
    status, said = shown(capsys, folder)
    assert status == 0 and said["shards"] == "3 of parquet" and said["chunks"] == "16 of 1 to 7 rows"
    assert said["splits"] == "train 3 (part-0.parquet, part-1.parquet, part-2.parquet)" and "unread" not in said
    assert said["rows"] == "100" and said["columns"] == "number (int64), text (string), score (float64)"
    sizes = re.match(r"([\d.]+) kB; decoded about ([\d.]+) kB, the largest chunk \d+ B$", said["bytes"])
    stored, decoded = map(float, sizes.groups())
    assert float(re.match(r"(\d+) B; decoded about", said["a row"])[1]) == pytest.approx(stored * 10, abs=1)
    assert 1 < decoded < stored
    assert said["index"] == f"{folder}/.samestep-index-train" and (folder / ".samestep-index-train").exists()
    monkeypatch.setattr(index, "make_index", None)
    monkeypatch.setattr(index, "_cached", lambda *_: None)
    assert index.index_of("--data.path", str(folder), find_shards("--data.path", str(folder))).rows.sum() == 100


def test_a_split_has_an_index_of_its_own(tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train-0.jsonl").write_bytes(lines(ROWS[:3]))
    (folder / "validation-0.jsonl").write_bytes(lines(ROWS[:2]))
    assert shown(capsys, folder)[1]["rows"] == "3"
    (folder / "names.txt").write_text("x")
    said = shown(capsys, folder, "--split", "validation")[1]
    assert said["splits"] == "train 1 (train-0.jsonl); validation 1 (validation-0.jsonl)"
    assert said["unread"] == "names.txt"
    assert said["rows"] == "2" and said["index"].endswith(".samestep-index-validation")


def test_files_that_are_named_are_of_no_split(tmp_path, capsys):
    folder = written(tmp_path / "data", "jsonl", [10] * 10)
    said = shown(capsys, folder / "part-[0-4].jsonl")[1]
    assert said["files"] == "5 (part-0.jsonl, part-1.jsonl, part-2.jsonl and 2 more)" and "splits" not in said


def test_where_nothing_can_be_written_it_is_kept_here(tmp_path, capsys, monkeypatch):
    folder = written(tmp_path / "data", "jsonl")

    def refused(self, name, data, durable=False):
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(type(storage.at(folder)), "write", refused)
    where = re.match(r"(\S+), for this machine: .* \(Permission denied\)$", shown(capsys, folder)[1]["index"])[1]
    assert where == str(index.cached_at(find_shards("x", str(folder)))) and where.startswith(str(tmp_path / "cache"))
    monkeypatch.setattr(index, "make_index", None)
    assert shown(capsys, folder)[1]["rows"] == "100"


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "tar"])
def test_every_damaged_chunk_is_named(kind, tmp_path, capsys):
    folder = written(tmp_path / "data", kind)
    status, said = shown(capsys, folder, "--check")
    number = said["chunks"].split()[0]
    assert status == 0 and said["check"] == f"0 of {number} chunks are damaged"
    made = index.index_of("x", str(folder), find_shards("x", str(folder)))
    for chunk in (1, len(made.rows) - 1):
        file = folder / made.shards.files[made.shard[chunk]].name
        about, data = file.stat(), bytearray(file.read_bytes())
        start = made.start[chunk]
        data[start : start + 20] = b"\xff" * 20
        file.write_bytes(data)
    assert about.st_size == file.stat().st_size
    made = made.__class__(**{**vars(made), "shards": find_shards("x", str(folder))})
    index.put_beside(made)  # as where the damage is older than the index
    assert command(["index", str(folder), "--check"]) == 1
    printed = capsys.readouterr().out.splitlines()
    named = [line for line in printed if "cannot be read" in line]
    assert len(named) == 2 and printed[-1].endswith(f"2 of {number} chunks are damaged")
    for chunk, line in zip((1, len(made.rows) - 1), named, strict=True):
        assert f"chunk at byte {made.start[chunk]} ({made.rows[chunk]} rows): cannot be read: " in line


def test_what_cannot_be_streamed_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(UserError, match=r"^index .*: it has no shards; what is streamed: parquet"):
        command(["index", str(tmp_path)])
    with pytest.raises(UserError, match=r"^index .*none: there is nothing of this name"):
        command(["index", str(tmp_path / "none")])


def test_shards_in_a_bucket_are_looked_at_together(tmp_path, capsys, proxy):
    folder = written(tmp_path / "data", "jsonl", [10] * 10)
    for file in folder.iterdir():
        storage.at(f"s3://{BUCKET}{folder}").write(file.name, file.read_bytes())
    local = index.make_index("x", str(folder), find_shards("x", str(folder)))
    proxy.faults = [Fault("slow", method="GET", holding=f"part-{number}", seconds=1) for number in range(8)]
    status, said = shown(capsys, f"s3://{BUCKET}{folder}", "--check")
    assert status == 0 and not any(fault.times for fault in proxy.faults) and float(said["took"].split()[0]) < 4
    assert said["index"] == f"s3://{BUCKET}{folder}/.samestep-index-train"
    shards = find_shards("x", f"s3://{BUCKET}{folder}")
    assert index.index_of("x", shards.folder, shards).fingerprint == local.fingerprint
