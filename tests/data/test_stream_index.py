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

from app.data.loading import open_source
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
    reader = index.FORMATS[made.shards.format]("--data.path", "x", "x")
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
        "the column text holds string in .*data/a.parquet and List.* in .*data/b.parquet: give it one type",
    ),
    "a sample with other files": (
        lambda folder: (write_tar(folder / "a.tar", ROWS[:2]), write_members(folder / "b.tar", [("x.json", b"{}")])),
        r"the sample x of .*data/b.tar has .json, and the first one \(.*data/a.tar, part/0000\) .cls, .txt",
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
    "two columns of one name": (
        lambda folder: parquet.write_table(
            pa.table([pa.array([1]), pa.array(["a"])], ["text", "text"]), folder / "a.parquet"
        ),
        "data/a.parquet has two columns named text: give each a name of its own",
    ),
    "two fields of one name": (
        lambda folder: parquet.write_table(
            pa.table({"a": pa.array([[]], pa.list_(pa.struct([("b", pa.int64()), ("b", pa.string())])))}),
            folder / "a.parquet",
        ),
        "data/a.parquet has two columns named a.b: give each a name of its own",
    ),
    "a zstd file that is none": (
        lambda folder: (folder / "a.jsonl.zst").write_bytes(lines(ROWS)),
        "a.jsonl.zst: cannot be read: byte 0: .*: correct the ending",
    ),
    "a name in a tar file that is not UTF-8": (
        lambda folder: write_members(folder / "a.tar", [("caf\udce9.txt", b"a")]),
        r"the name 'caf\\udce9.txt' holds bytes that are not UTF-8: rename the file",
    ),
    "a text in a tar file in another encoding": (
        lambda folder: write_members(folder / "a.tar", [("1.txt", "a text".encode("utf-16-le"))]),
        "a.tar: cannot be read: 1.txt: it holds bytes as UTF-16 does",
    ),
    "a class in a tar file that is written as Python does": (
        lambda folder: write_members(folder / "a.tar", [("1.cls", b"1_0")]),
        "a.tar: cannot be read: 1.cls: b'1_0' is no whole number",
    ),
    "a sample in a tar file without an ending": (
        lambda folder: write_members(folder / "a.tar", [("1.txt", b"a"), ("2", b"b")]),
        "a.tar: cannot be read: 2 has no ending behind a dot, as a sample's file has: rename it, or leave it out",
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
    reader = index.FORMATS["jsonl"]("--data.path", "x", "x")
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


LEFT_OUT = (
    *("README", "LICENSE", "data/License", "__meta__", "__shard__/0.txt", "._0.txt", "data/._0.txt", ".DS_Store"),
    *("data/.DS_Store", "__MACOSX/._0.txt", "Thumbs.db", "data/desktop.ini", ".hidden.txt"),
)
SAMPLES = (
    "0.txt",
    "./1.txt",
    "data/2.txt",
    ".cache/3.txt",
    "__4.txt",
    "a/__b__/5.txt",
    "6.TXT",
    "readme.txt",
    "v1.2/7.txt",
)


def test_what_is_no_sample_of_a_tar_file_is_left_out_and_nothing_else(tmp_path):
    """Wherever it stands: between samples, in the middle of one, in front and at the end."""
    other = [(name, b"\xff" * 700) for name in LEFT_OUT]
    samples = [(f"{name[:-4]}{ending}", name.encode()) for name in SAMPLES for ending in (".bin", name[-4:])]
    members = [each for i, sample in enumerate(samples) for each in (other[i % len(other)], sample)]
    write_members(tmp_path / "a.tar", [*other, *members, *other])
    with tarfile.open(tmp_path / "a.tar", "a") as tar:
        folder = tarfile.TarInfo("folder.txt")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    made = index.make_index("--data.path", "x", find_shards("--data.path", str(tmp_path)))
    rows = list(rows_of(made))
    assert [row["__key__"] for row in rows] == [name[:-4] for name in SAMPLES]
    assert [row["txt"] for row in rows] == [*SAMPLES] and [row["bin"].decode() for row in rows] == [*SAMPLES]
    assert len(made.rows) > 3


def test_a_byte_order_mark_is_no_letter_of_a_text_in_a_tar_file(tmp_path):
    write_members(tmp_path / "a.tar", [("1.txt", b"\xef\xbb\xbfa")])
    assert [row["txt"] for row in rows_of(index.make_index("x", "x", find_shards("x", str(tmp_path))))] == ["a"]


def test_a_zstd_file_of_the_widest_window_is_read(tmp_path):
    """As `zstd --ultra --long=31` writes it: the header of its frame asks for two gigabytes of what came before."""
    data = lines(ROWS)
    window, is_last = (31 - 10) << 3, 1
    frame = b"\x28\xb5\x2f\xfd\0" + bytes([window]) + (len(data) << 3 | is_last).to_bytes(3, "little") + data
    (tmp_path / "a.jsonl.zst").write_bytes(frame)
    assert list(rows_of(index.make_index("x", "x", find_shards("x", str(tmp_path))))) == ROWS


def _labelled(file, kind, values):
    features = datasets.Features({"text": datasets.Value("string"), "label": kind})
    datasets.Dataset.from_dict({"text": ["a"] * len(values), "label": values}, features).to_parquet(file)


ABC = datasets.ClassLabel(names=["a", "b", "c"])
OTHER_LABELS = {
    "another order": (
        datasets.ClassLabel(names=["a", "c", "b"]),
        [0],
        "the class 1 is b in .*/1/part.parquet and c in",
    ),
    "one more": (datasets.ClassLabel(names=["a", "b", "c", "d"]), [0], "the class 3 is none in .* and d in .*2/part"),
    "texts": (
        datasets.Value("string"),
        ["a"],
        "holds the classes a, b, c in .*1/part.* and string in .*2/part.*: give",
    ),
    "numbers": (
        datasets.Value("int64"),
        [0],
        "holds the classes a, b, c in .*/1/part.* and int64 in .*/2/part.*: give",
    ),
}


def test_lists_of_other_classes_are_told_by_the_first_that_differs(tmp_path):
    for number, names in enumerate((["a", "b"], ["a", "c"])):
        kind = datasets.List(datasets.ClassLabel(names=names))
        _labelled(tmp_path / f"{number}.parquet", kind, [[0]])
    with pytest.raises(UserError, match=r"column label has other classes in each: the class 1 is b in .* and c in"):
        index.index_of("--data.path", str(tmp_path), find_shards("--data.path", str(tmp_path)))


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("other", OTHER_LABELS)
def test_labels_of_another_kind_are_refused_with_the_whole_names_of_both_files(other, streamed, tmp_path):
    kind, values, says = OTHER_LABELS[other]
    for folder in ("1", "2"):
        (tmp_path / folder).mkdir()
    _labelled(tmp_path / "1/part.parquet", ABC, [0, 1])
    _labelled(tmp_path / "2/part.parquet", kind, values)
    with pytest.raises(UserError, match=f"the column label .*{says}"):
        if streamed:
            index.index_of("--data.path", str(tmp_path), find_shards("--data.path", str(tmp_path)))
        else:
            open_source("--data.path", [str(tmp_path / "?" / "part.parquet")])
