"""What lies in a folder of shards: all of it is read, said to be no data, or refused by its name."""

import os
import shutil
import socket

import pytest
from support.stream_shards import ROWS, lines, write_parquet, write_tar, written

from app.data.config import TextData
from app.data.images.class_folders import image_tables
from app.data.loading import open_source
from app.data.streams.opening import is_streamed, is_streamed_set, open_stream, stream
from app.data.streams.shards import find_shards, format_at, survey
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("own_data_cache")


def seen(folder):
    """Return what is said of the files of a folder: the shards by splits, and the others."""
    surveyed = survey("--data.path", str(folder))
    return surveyed.described(), surveyed.described_unread()


def refusal(act):
    with pytest.raises(UserError) as told:
        act()
    return str(told.value)


def touch(file, content=b"x"):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


@pytest.mark.parametrize("depth", range(5))
def test_a_split_is_seen_at_any_depth(depth, tmp_path):
    folder = tmp_path.joinpath("data", *"abcdefgh"[:depth])
    for split in ("train", "validation"):
        touch(folder / split / "part.jsonl", lines(ROWS[:3]))
    for number in range(1001):  # more than were looked at once
        touch(folder / f"{number}.md")
    path, below = str(tmp_path / "data"), "".join(f"{part}/" for part in "abcdefgh"[:depth])
    assert format_at(path) == "jsonl" and [*survey("x", path).by_split] == ["train", "validation"]
    for split in ("train", "validation"):
        assert [shard.name for shard in find_shards("x", path, split).files] == [f"{below}{split}/part.jsonl"]


def test_where_all_shards_are_of_another_split_that_is_said(tmp_path):
    for name in ("test-0", "test-1", "test-2", "x/test-3", "val"):
        touch(tmp_path / f"{name}.jsonl.gz")
    said = refusal(lambda: find_shards("--data.path", str(tmp_path)))
    assert said == (
        f"--data.path {tmp_path}: it has no shards of the split train; by the words in their names, there are "
        "validation 1 (val.jsonl.gz); test 4 (test-0.jsonl.gz, test-1.jsonl.gz, test-2.jsonl.gz and 1 more): name "
        f"files by a pattern, such as '{tmp_path}/**/*.jsonl.gz', to take them whatever they are called"
    )
    assert len(find_shards("--data.path", f"{tmp_path}/**/*.jsonl.gz").files) == 5


# Of each thing next to shards: how it is made, and what is said where there is a refusal.
NEXT_TO = {
    "a linked file": (lambda file: file.with_suffix(".jsonl").symlink_to(shard(file)), ""),
    "a linked folder": (lambda file: file.symlink_to(shard(file).parent, target_is_directory=True), ""),
    "a broken link": (lambda file: file.with_suffix(".jsonl").symlink_to("nowhere"), "is a link that leads nowhere"),
    "a link in a circle": (lambda file: file.with_suffix(".jsonl").symlink_to("odd.jsonl"), "leads nowhere"),
    "a pipe": (lambda file: os.mkfifo(file.with_suffix(".jsonl")), "is a pipe, a socket or a device"),
    "a socket": (lambda file: listening(file.with_suffix(".jsonl")), "is a pipe, a socket or a device"),
}


def shard(file):
    """Write a shard outside of the folder of a file."""
    outside = file.parent.parent / "outside" / "a.jsonl"
    touch(outside, lines([{"number": -1, "text": "linked", "score": 0.5}]))
    return outside


def listening(file):
    place = os.getcwd()
    os.chdir(file.parent)  # its path may be too long for a socket
    try:
        socket.socket(socket.AF_UNIX).bind(file.name)
    finally:
        os.chdir(place)


def mapped(folder):
    (table,) = open_source("--data.path", [str(folder)]).tables.values()
    return table["number"]


def streamed(folder):
    rows = stream(str(folder))
    return [row["number"] for row in rows.__getitems__(range(len(rows)))]


@pytest.mark.parametrize("read", [streamed, mapped])
@pytest.mark.parametrize("kind", NEXT_TO)
def test_what_is_no_plain_file_is_followed_or_refused_by_its_name(kind, read, tmp_path):
    folder = written(tmp_path / "data", "jsonl")
    make, says = NEXT_TO[kind]
    make(folder / "odd")
    if kind == "a linked folder" and read is mapped:  # datasets does not follow it
        says = "odd/a.jsonl lies in a folder that is a link"
    if says:
        said = refusal(lambda: read(folder))
        assert "odd" in said and says in said
    else:
        assert sorted(read(folder)) == [-1, *range(100)]


def test_a_folder_in_a_circle_is_read_once_and_one_with_two_names_is_refused(tmp_path):
    folder = written(tmp_path / "data", "jsonl")
    (folder / "up").symlink_to(folder, target_is_directory=True)
    assert len(find_shards("--data.path", str(folder)).files) == 3
    touch(folder / "test" / "a.jsonl", lines(ROWS[:3]))
    (folder / "validation").symlink_to(folder / "test", target_is_directory=True)
    assert "validation is test by another name" in refusal(lambda: find_shards("--data.path", str(folder)))


def test_a_folder_that_may_not_be_listed_is_refused(tmp_path, monkeypatch):
    folder, scandir = written(tmp_path / "data", "jsonl"), os.scandir
    touch(folder / "closed" / "a.jsonl", lines(ROWS[:3]))

    def refused(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    for act in (find_shards, lambda flag, path: open_source(flag, [path])):
        said = refusal(lambda act=act: act("--data.path", str(folder)))
        assert f"{folder}/closed: cannot be listed: Permission denied" in said


LOOK_LIKE_DATA = {
    "jsonl": ("a.json", "a.json.gz", "a.jsonl.bz2", "a.jsonl.gz.tmp", "a.csv", "a.csv.gz", "deep/a.JSON", "_a.jsonl"),
    "parquet": ("a.csv", "a.tsv", "a.arrow", "a.parquet.tmp", "a.parquet.gz.part", "a.json.xz", "_temporary/a.parquet"),
    "tar": ("a.tgz", "a.tar.bz2", "a.tar.xz", "a.csv", "_old/a.tar", "a.feather.zip"),
}
TOLD = {
    "jsonl": ("dataset_info.json", "index.json", "stats.json", "a.txt", "part-00001", "a.jsonl.bak", "a.gz"),
    "parquet": ("a.json", "a.yaml", "part-00001", "a.parquet.crc"),
    "tar": ("sizes.json", "0000_stats.json", "classes.txt"),
}
SILENT = ("README.md", "LICENSE", "_SUCCESS", "_metadata", "_committed_1", ".a.parquet", ".git/a.jsonl", "._a.tar")


@pytest.mark.parametrize("kind", LOOK_LIKE_DATA)
def test_a_file_that_looks_like_data_is_refused_and_another_one_is_named(kind, tmp_path):
    folder = written(tmp_path / "data", kind)
    for name in SILENT:
        touch(folder / name)
    assert seen(folder)[1] == ""
    for name in TOLD[kind]:
        touch(folder / name)
        assert seen(folder) == (f"train 3 (part-0.{kind}, part-1.{kind}, part-2.{kind})", name)
        (folder / name).unlink()
    for name in LOOK_LIKE_DATA[kind]:
        touch(folder / name)
        assert f"{folder}: {name} would be left out" in refusal(lambda: seen(folder))
        assert len(find_shards("--data.path", f"{folder}/part-*.{kind}").files) == 3
        (folder / name).unlink()


def test_what_spark_has_not_finished_is_refused(tmp_path):
    folder = written(tmp_path / "data", "parquet")
    touch(folder / "_SUCCESS")
    assert len(find_shards("--data.path", str(folder)).files) == 3
    (folder / "_temporary").mkdir()
    shutil.copy(folder / "part-0.parquet", folder / "_temporary")
    assert "_temporary/part-0.parquet would be left out" in refusal(lambda: streamed(folder))
    assert "_temporary/part-0.parquet is in _temporary, where Spark" in refusal(lambda: mapped(folder))


LOGS = {
    "Delta Lake": "_delta_log/00000000000000000000.json",
    "Apache Iceberg": "metadata/00001-a2b.metadata.json",
    "Apache Hudi": ".hoodie/hoodie.properties",
    "Spark's streaming": "_spark_metadata/0",
}


@pytest.mark.parametrize("program", LOGS)
def test_a_table_whose_log_says_which_files_count_is_refused(program, tmp_path):
    folder = tmp_path / "table"
    (folder / "data").mkdir(parents=True)
    write_parquet(folder / "data" / "a.parquet", ROWS)
    touch(folder / LOGS[program], b"{}")
    for act in (find_shards, lambda flag, path: open_source(flag, [path])):
        said = refusal(lambda act=act: act("--data.path", str(folder)))
        assert f"is of {program}, which says there which files of the table still count" in said
        assert act("--data.path", f"{folder}/data/*.parquet")


def test_pictures_behind_links_are_found_and_their_folders_are_too(tmp_path):
    """Class folders follow links too; shards next to images are looked for in the same walk."""
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "pool" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "pool" / name / "0.png")
    (tmp_path / "data").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "pool" / name, target_is_directory=True)
    assert len(image_tables("x", str(tmp_path / "data"), strict=True).tables["train"]) == 2
    assert format_at(str(tmp_path / "data")) == ""
    write_tar(tmp_path / "pool" / "dog" / "a.tar", ROWS[:2])
    assert format_at(str(tmp_path / "data")) == "tar"


def test_tar_files_are_streamed_also_where_they_are_refused_then(tmp_path):
    """Elsewhere datasets would read them, with other columns, and without a look at what lies next to them."""
    folder = written(tmp_path / "data", "tar")
    touch(folder / "a.csv")
    config = TextData(path=(str(folder),), stream="auto")
    assert is_streamed("--data.path", config) and is_streamed_set(str(folder))
    assert "a.csv would be left out" in refusal(lambda: open_stream(config, holdout=False))
    (folder / "a.csv").unlink()
    for file in folder.glob("part-*"):
        file.rename(folder / f"validation-{file.name}")
    assert is_streamed_set(str(folder)) and is_streamed("--data.path", config)


def test_a_run_that_was_trained_in_the_folder_of_its_data_is_no_data(tmp_path):
    """Its metrics.jsonl is no shard: a run that goes on has the data that it had."""
    (tmp_path / "part-0.jsonl").write_text('{"text": "a"}\n')
    before = find_shards("--data.path", str(tmp_path)).files
    (tmp_path / "runs/x/checkpoints").mkdir(parents=True)
    for name in ("run.json", "metrics.jsonl", "checkpoints/record.json"):
        (tmp_path / "runs/x" / name).write_text("{}\n")
    assert find_shards("--data.path", str(tmp_path)).files == before
