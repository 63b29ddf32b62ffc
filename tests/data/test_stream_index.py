"""The index of streamed data: every row of every shard is in one chunk, and what cannot be read is named."""

import gzip
import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from PIL import Image
from pyarrow import parquet
from support.stream_shards import ROWS, WRITERS, expected, lines, write_members, write_parquet, write_tar, written

from app.data.streams import chunks, index
from app.data.streams.chunks import Chunk
from app.data.streams.shards import Shard, Shards, find_shards
from app.errors import UserError


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, tmp_path):
    """Let chunks be of 400 bytes, so that small shards have several; and keep indexes in a folder of their own."""
    monkeypatch.setattr(chunks, "LEAST", 400)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def rows_of(made):
    """Decode every chunk by itself."""
    reader = index.FORMATS[made.shards.format]("--data.path", "x")
    for number, shard in enumerate(made.shard):
        of_shard, tail = made.shards.files[shard], made.tails[shard]
        data = Path(made.shards.place_of(shard)).read_bytes()
        part = made.part(number)
        chunk = Chunk(
            of_shard,
            part,
            data[part.start : part.start + part.size],
            data[len(data) - tail :] if tail else b"",
        )
        table = reader.table(chunk, made.features)
        assert len(table) == part.rows
        yield from datasets.Dataset(datasets.table.InMemoryTable(table))


@pytest.mark.parametrize("kind", WRITERS)
def test_every_row_is_in_one_chunk(kind, tmp_path):
    folder = written(tmp_path / "data", kind)
    shards = find_shards("--data.path", str(folder))
    made = index.make_index("--data.path", str(folder), shards)
    assert list(rows_of(made)) == expected(kind)
    assert len(made.rows) > len(shards.files) and made.rows.sum() == 100


@pytest.mark.parametrize("kind", WRITERS)
def test_an_index_is_read_again_and_made_anew_where_a_shard_changes(kind, tmp_path, monkeypatch):
    folder = written(tmp_path / "data", kind)

    def find():
        return find_shards("--data.path", str(folder))

    first = index.index_of("--data.path", str(folder), find())
    with monkeypatch.context() as patch:
        patch.setattr(index, "make_index", None)
        again = index.index_of("--data.path", str(folder), find())
    assert again.fingerprint == first.fingerprint and list(rows_of(again)) == list(rows_of(first))
    WRITERS[kind](folder / f"part-1.{kind}", ROWS[:2])
    other = index.index_of("--data.path", str(folder), find())
    assert other.rows.sum() == 101 and other.fingerprint != first.fingerprint
    index.put_beside(other)
    monkeypatch.setattr(index, "make_index", None)
    monkeypatch.setattr(index, "_cached", lambda *_: None)
    assert index.index_of("--data.path", str(folder), find()).fingerprint == other.fingerprint


TEXT = b'{"a": [1, 2]}'


def test_an_index_beside_other_shards_is_not_believed(tmp_path):
    folder = written(tmp_path / "data", "jsonl")
    index.put_beside(index.index_of("--data.path", str(folder), find_shards("--data.path", str(folder))))
    WRITERS["jsonl"](folder / "part-1.jsonl", ROWS[:2])
    other = index.index_of("--data.path", str(folder), find_shards("--data.path", str(folder)))
    assert other.rows.sum() == 101


def test_row_groups_without_rows_are_no_chunks(tmp_path):
    table = pa.Table.from_pylist(ROWS[:5])
    with parquet.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for part in (table, table[:0], table):
            writer.write_table(part)
    assert parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups == 3
    made = index.make_index("--data.path", "x", find_shards("--data.path", str(tmp_path)))
    assert made.rows.tolist() == [5, 5] and list(rows_of(made)) == ROWS[:5] * 2


def test_pictures_in_tar_shards_are_pictures(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    files = [(f"{i}.{ending}", data) for i in range(3) for ending, data in (("PNG", stream.getvalue()), ("json", TEXT))]
    write_members(tmp_path / "a.tar", files)
    made = index.make_index("--data.path", "x", find_shards("--data.path", str(tmp_path)))
    rows = list(rows_of(made))
    assert [row["json"] for row in rows] == [{"a": [1, 2]}] * 3
    assert np.array_equal(np.asarray(rows[0]["png"]), pixels)


def test_a_split_is_taken_by_the_names_of_shards(tmp_path):
    for name in ("validation-0", "my-test-set", "contest", "deep/part-0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_bytes(lines(ROWS[:3]))
    (tmp_path / ".hidden.jsonl").write_bytes(b"x")
    (tmp_path / "_SUCCESS").write_bytes(b"")
    (tmp_path / "README.md").write_bytes(b"x")

    def named(path, split="train"):
        return [shard.name for shard in find_shards("--data.path", str(path), split).files]

    assert named(tmp_path) == ["contest.jsonl", "deep/part-0.jsonl"]
    assert named(tmp_path, "validation") == ["validation-0.jsonl"]
    assert named(tmp_path, "test") == ["my-test-set.jsonl"]
    assert named(tmp_path / "*test*.jsonl") == ["contest.jsonl", "my-test-set.jsonl"]
    assert named(tmp_path / "my-test-set.jsonl") == ["my-test-set.jsonl"]


def test_what_shards_hold_is_put_together_in_their_order(tmp_path):
    for number, value in enumerate((None, 1, 2.5, [{"x": 1}])):
        (tmp_path / f"{number}.jsonl").write_bytes(lines([{"first": value, f"own {number}": "x"}]))
    columns = index.make_index("x", "x", find_shards("x", str(tmp_path / "[0-2].jsonl"))).features
    assert columns["first"] == datasets.Value("float64") and list(columns) == ["first", "own 0", "own 1", "own 2"]
    columns = index.make_index("x", "x", find_shards("x", str(tmp_path))).features
    assert columns["first"] == datasets.Json()


BAD = {
    "no such folder": (lambda folder: folder.rmdir(), "there is nothing of this name; "),
    "no shards": (lambda folder: (folder / "a.csv").write_text("a"), "it has no shards; what is streamed: parquet"),
    "two formats": (
        lambda folder: (written(folder, "tar"), written(folder, "jsonl")),
        "several formats, such as part-2.jsonl and part-2.tar",
    ),
    "an empty shard": (lambda folder: (folder / "a.jsonl").write_bytes(b""), "a.jsonl is empty"),
    "a shard without rows": (lambda folder: (folder / "a.jsonl").write_bytes(b"\n"), "a.jsonl: it has no rows"),
    "a shard with other columns": (
        lambda folder: (
            write_parquet(folder / "a.parquet", ROWS[:5]),
            write_parquet(folder / "b.parquet", [{"number": "x", "text": [1]}]),
        ),
        "the column text holds string in a.parquet and List",
    ),
    "a sample with other files": (
        lambda folder: (write_tar(folder / "a.tar", ROWS[:2]), write_members(folder / "b.tar", [("x.json", b"{}")])),
        r"the sample x of b.tar has .json, and the first one \(a.tar, part/0000\) .cls, .txt",
    ),
    "a packed tar": (lambda folder: (folder / "a.tar.gz").write_bytes(b"x"), "a.tar.gz cannot be read in parts"),
    "a line that is no record": (
        lambda folder: (folder / "a.jsonl").write_bytes(lines(ROWS) + b"[1]\n"),
        r"a.jsonl: cannot be read: line 101 is \[1\]",
    ),
    "a line that is no json": (
        lambda folder: (folder / "a.jsonl").write_bytes(lines(ROWS) + b'{"a": \n'),
        "a.jsonl: cannot be read: line 101: ",
    ),
    "gzip that ends early": (
        lambda folder: (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS))[:-20]),
        "a.jsonl.gz: cannot be read: .*end too early",
    ),
    "zstd that ends early": (
        lambda folder: (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines(ROWS))[:-20]),
        "a.jsonl.zst: cannot be read: .*end too early",
    ),
    "gzip that is damaged": (lambda folder: (folder / "a.jsonl.gz").write_bytes(b"x" * 99), "byte 0: "),
    "parquet that is cut": (
        lambda folder: (write_parquet(folder / "a.parquet", ROWS), cut(folder / "a.parquet")),
        "a.parquet: cannot be read: ",
    ),
    "a tar that is cut": (
        lambda folder: (write_tar(folder / "a.tar", ROWS[1:2]), cut(folder / "a.tar", 520)),
        "a.tar: cannot be read: ",
    ),
    "a tar without samples": (
        lambda folder: (folder / "a.tar").write_bytes(b"\0" * 10240),
        "a.tar: it has no rows",
    ),
}


def cut(file, size=0):
    data = file.read_bytes()
    file.write_bytes(data[: size or len(data) // 2])


@pytest.mark.parametrize("name", BAD)
def test_bad_shards_are_named(name, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    make, says = BAD[name]
    make(folder)
    with pytest.raises(UserError, match=says) as told:
        index.index_of("--data.path", str(folder), find_shards("--data.path", str(folder)))
    assert "\n" not in str(told.value) and str(told.value).startswith("--data.path ")


def test_a_chunk_that_changed_after_it_was_indexed_is_refused(tmp_path):
    folder = written(tmp_path / "data", "jsonl")
    made = index.index_of("--data.path", str(folder), find_shards("--data.path", str(folder)))
    reader = index.FORMATS["jsonl"]("--data.path", "x")
    other = lines([{"number": "no number", "text": "", "score": 1}])
    chunk = Chunk(made.shards.files[0], made.part(0), other, b"")
    with pytest.raises(ValueError, match="something else than when it was indexed"):
        reader.table(chunk, made.features)


def test_an_index_is_made_of_damaged_chunks_if_these_are_left_out(tmp_path, monkeypatch):
    """It is decoded chunks that tell how large they become, and the largest ones are damaged."""
    folder = written(tmp_path / "data", "parquet")
    shards = find_shards("--data.path", str(folder))
    good = index.make_index("--data.path", str(folder), shards)
    decoded = index.ParquetChunks.table
    largest = sorted(good.size.tolist())[-index.MEASURED]

    def damaged(reader, chunk, features):
        if chunk.part.size >= largest:
            raise ValueError("it is damaged")
        return decoded(reader, chunk, features)

    monkeypatch.setattr(index.ParquetChunks, "table", damaged)
    with pytest.raises(
        UserError, match=r"part-\d.parquet: cannot be read: it is damaged; leave .* --data.bad skip, or"
    ):
        index.make_index("--data.path", str(folder), shards)
    made = index.make_index("--data.path", str(folder), shards, skips=True)
    assert made.fingerprint == good.fingerprint and made.growth == pytest.approx(good.growth, rel=0.3)


LOADED = """
import resource, sys, time
import datasets, pyarrow
from app.data.streams import index
from app.data.streams.shards import Shard, Shards
shards = Shards("s3://bucket/data", tuple(Shard(f"part-{i:05}.parquet", 1 << 30, f"tag-{i}") for i in range(10_000)))
begun = time.monotonic()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = index._cached(index.Path(sys.argv[1]), shards)
assert found.fingerprint and found.rows.sum() == 10**9
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, time.monotonic() - begun)
"""


@pytest.mark.parametrize("kind", WRITERS)
def test_data_of_the_same_size_are_told_apart_and_a_copy_is_the_same(kind, tmp_path):
    folder = written(tmp_path / "data", kind)
    shutil.copytree(folder, tmp_path / "copy")
    other = [{**row, "text": row["text"].swapcase()} for row in ROWS]
    (tmp_path / "other").mkdir()
    for file in folder.iterdir():
        start, size = {"0": (0, 40), "1": (40, 1), "2": (41, 59)}[file.name.split(".")[0][-1]]
        WRITERS[kind](tmp_path / "other" / file.name, other[start : start + size])
    prints = {}
    for name in ("data", "copy", "other"):
        path = str(tmp_path / name)
        prints[name] = index.make_index("--data.path", path, find_shards("--data.path", path)).fingerprint
    assert prints["copy"] == prints["data"] != prints["other"]


def noise(size, change=None):
    """Return bytes that do not compress, of which one is another if there is a change."""
    data = bytearray(np.random.default_rng(0).bytes(size))
    if change is not None:
        data[change] ^= 0xFF
    return bytes(data)


SIZE = 200_000
UNSEEN = 20_000  # a place between those that are looked at
PLAIN = {"write_statistics": False, "use_dictionary": False, "compression": "none"}


@pytest.mark.parametrize(
    ("where", "is_seen"), [(100, True), (SIZE // 3 + 100, True), (SIZE - 100, True), (UNSEEN, False)]
)
def test_parquet_without_statistics_is_told_by_samples_of_its_contents(where, is_seen, tmp_path):
    """As docs/streams.md says: a change between the samples of a large shard is not seen."""
    made = []
    for change in (None, where):
        folder = tmp_path / str(change)
        folder.mkdir()
        table = pa.table({"x": np.frombuffer(noise(SIZE, change), np.int64)})
        parquet.write_table(table, folder / "a.parquet", **PLAIN)
        made.append(index.make_index("x", str(folder), find_shards("x", str(folder))))
    assert made[0].shards.files[0].size == made[1].shards.files[0].size
    assert (made[0].fingerprint != made[1].fingerprint) == is_seen


@pytest.mark.parametrize(("where", "is_seen"), [(100, True), (SIZE - 100, True), (UNSEEN, False)])
def test_pictures_in_tar_files_are_told_by_their_ends(where, is_seen, tmp_path):
    prints = set()
    for change in (None, where):
        folder = tmp_path / str(change)
        folder.mkdir()
        content = [("1.txt", b"a"), ("1.bin", noise(SIZE)), ("2.txt", b"b"), ("2.bin", noise(SIZE, change))]
        write_members(folder / "a.tar", content)
        prints.add(index.make_index("x", str(folder), find_shards("x", str(folder))).fingerprint)
    assert len(prints) == 1 + is_seen


def test_an_index_of_a_million_chunks_is_read_in_little_memory(tmp_path):
    shards = Shards("s3://b", tuple(Shard(f"part-{i:05}.parquet", 1 << 30, f"tag-{i}") for i in range(10_000)))
    count = np.arange(10**6)
    large = index.Index(
        shards,
        (1000,) * 10_000,
        ("0123456789abcdef",) * 10_000,
        (count // 100).astype(np.int32),
        count % 100 * 1_000_000,
        np.full(10**6, 1_000_000),
        np.full(10**6, 1000, np.int32),
        datasets.Features({"text": datasets.Value("string")}),
    )
    (tmp_path / "index").write_bytes(index.to_bytes(large))
    words = [sys.executable, "-c", LOADED, str(tmp_path / "index")]
    megabytes, seconds = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert float(megabytes) < 100 and float(seconds) < 10


def test_a_chunk_takes_24_bytes():
    assert sum(np.dtype(kind).itemsize for kind in index.COLUMNS.values()) == 24


def _tar(tmp_path, change):
    """Write five samples into a tar file, change its bytes, and return its path."""
    file = tmp_path / "a.tar"
    write_members(file, [(f"{i}.txt", b"some text") for i in range(5)])
    data = file.read_bytes()
    file.write_bytes(change(data))
    return str(file)


TAR_BLOCKS = 2  # of a sample: its header and its text
DAMAGED_TARS = {
    "a header that is damaged": lambda data: data[:2048] + b"\xff" * 512 + data[2560:],
    "a hole": lambda data: data[:2048] + bytes(1024) + data[3072:],
    "two in one": lambda data: data + data,
    "cut between samples": lambda data: data[: 2 * TAR_BLOCKS * 512],
    "cut in a header": lambda data: data[: 2 * TAR_BLOCKS * 512 + 100],
}


@pytest.mark.parametrize("harm", DAMAGED_TARS)
def test_a_tar_file_that_does_not_end_where_its_samples_do_is_refused(harm, tmp_path):
    path = _tar(tmp_path, DAMAGED_TARS[harm])
    with pytest.raises(UserError, match=r"a\.tar: cannot be read: .*(goes on|is cut|damaged|bytes)"):
        index.make_index("--data.path", path, find_shards("--data.path", path))
    path = _tar(tmp_path, lambda data: data)
    assert index.make_index("--data.path", path, find_shards("--data.path", path)).rows.sum() == 5


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_in_a_tar_file_are_refused(kind, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("0.txt", "1.txt"):
            member = tarfile.TarInfo(name)
            member.size = 0 if name == "1.txt" else 4
            if name == "1.txt":
                member.type, member.linkname = kind, "0.txt"
            tar.addfile(member, io.BytesIO(b"text"))
    path = str(tmp_path / "a.tar")
    with pytest.raises(UserError, match=r"1\.txt is a link: pack the files themselves"):
        index.make_index("--data.path", path, find_shards("--data.path", path))
