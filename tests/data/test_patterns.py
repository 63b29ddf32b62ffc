"""Patterns of paths mean the same wherever data are named by them, and a real path is no pattern."""

import os

import pytest

from app.data.streams.shards import find_shards
from app.data.tables import parallel_files
from app.data.tables.files import find_files, is_file_name

FILES = ("a.{}", "b.{}", "deep/c.{}", "deep/er/d.{}", "set[1]/e.{}", "set1/f.{}", "x[1].{}", "x1.{}", "a?/g.{}")
PATTERNS = {
    "*.{}": ("a.{}", "b.{}", "x1.{}", "x[1].{}"),
    "?.{}": ("a.{}", "b.{}"),
    "*/*.{}": ("a?/g.{}", "deep/c.{}", "set1/f.{}", "set[1]/e.{}"),
    "**/*.{}": FILES,
    "deep/**/*.{}": ("deep/c.{}", "deep/er/d.{}"),
    "**/er/*": ("deep/er/d.{}",),
    "deep/**": ("deep/c.{}", "deep/er/d.{}"),
    "[!ab].{}": (),
    "set[1]/*.{}": ("set[1]/e.{}",),
    "set[0-9]/*.{}": ("set1/f.{}",),
    "x[1].{}": ("x[1].{}",),
    "x[12].{}": ("x1.{}",),
    "a?/*.{}": ("a?/g.{}",),
    "a?/g.{}": ("a?/g.{}",),
}


def shards(path):
    found = find_shards("--data.path", path)
    return [os.path.join(found.folder, shard.name) for shard in found.files]


def parallel(path):
    return [group["de"] for group in parallel_files.find([path], "--data.path")["train"]]


READERS = {
    "streamed": ("jsonl", shards),
    "mapped": ("jsonl", lambda path: find_files([path], "--data.path")),
    "parallel": ("de", parallel),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if PATTERNS[pattern]])
def test_a_pattern_names_the_same_files_to_every_reader(pattern, reader, tmp_path, monkeypatch):
    ending, read = READERS[reader]
    for name in FILES:
        (tmp_path / name.format(ending)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name.format(ending)).write_text("{}\n")
        if reader == "parallel":
            (tmp_path / name.format("en")).write_text("{}\n")
    expected = sorted(name.format(ending) for name in PATTERNS[pattern])
    path = str(tmp_path / pattern.format(ending))
    assert is_file_name(path)
    assert sorted(os.path.relpath(file, tmp_path) for file in read(path)) == expected
    monkeypatch.chdir(tmp_path)
    assert sorted(map(os.path.normpath, read(pattern.format(ending)))) == expected


LINKED = {
    "two names of a folder": ("latest", "v2", "**/*.jsonl", ("v2/a.jsonl", "v2/b.jsonl")),
    "one name that is meant": ("latest", "v2", "v*/*.jsonl", ("v2/a.jsonl", "v2/b.jsonl")),
    "a longer name": ("deep/a", "../v2", "**/*.jsonl", ("v2/a.jsonl", "v2/b.jsonl")),
    "a circle": ("self", ".", "**/*.jsonl", ("v2/a.jsonl", "v2/b.jsonl")),
    "a circle further down": ("v2/up", "..", "**", ("v2/a.jsonl", "v2/b.jsonl")),
    "a circle without **": ("v2/self", ".", "*/*/*.jsonl", ("v2/self/a.jsonl", "v2/self/b.jsonl")),
    "a linked file": ("c.jsonl", "v2/a.jsonl", "**/*.jsonl", ("c.jsonl", "v2/a.jsonl", "v2/b.jsonl")),
}
"""Of each case a link, where it leads, a pattern, and the files that it names."""


@pytest.mark.parametrize("case", LINKED)
@pytest.mark.parametrize("reader", ["streamed", "mapped"])
def test_a_pattern_goes_through_links_and_names_what_lies_in_a_folder_once(reader, case, tmp_path):
    link, target, pattern, expected = LINKED[case]
    for name in ("v2/a.jsonl", "v2/b.jsonl", "deep/none.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "deep/none.txt").unlink()
    (tmp_path / link).symlink_to(target)
    if case == "two names of a folder":  # by names of one length, the first one
        expected = tuple(name.replace("v2", link) for name in expected)
    _, read = READERS[reader]
    assert sorted(os.path.relpath(file, tmp_path) for file in read(str(tmp_path / pattern))) == sorted(expected)


def test_many_links_in_a_circle_are_no_long_walk(tmp_path):
    for number in range(8):  # 8 ** 40 names
        (tmp_path / f"{number}").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert find_files([f"{tmp_path}/**/*.jsonl"], "x") == [str(tmp_path / "a.jsonl")]
