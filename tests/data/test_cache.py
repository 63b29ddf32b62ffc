"""What is kept of data on disk: never older than the data, and not for ever."""

import os
from pathlib import Path

import datasets
import pyarrow
import pytest
from support.tables import load, refused, texts_of, write_card

from app.data.cache import remember, using_cache, written_once

pytestmark = pytest.mark.usefixtures("own_data_cache")


@pytest.mark.parametrize("folder", [False, True])
def test_files_changed_on_disk_are_read_again(tmp_path, folder):
    file = tmp_path / "rows.csv"
    keys = []
    for words in (["one", "two"], ["three", "four"]):
        file.write_text("label,text\n" + "".join(f"{word[0]},{word}\n" for word in words))
        os.utime(file, (len(keys), len(keys)))
        parts = load(str(tmp_path if folder else file))
        assert {row["text"] for part in parts for row in part} == set(words)
        keys.append(parts[0]._fingerprint)
    assert keys[0] != keys[1]


def test_a_folder_with_a_card_is_read_again_once_it_changes(tmp_path, own_data_cache):
    """The cache of datasets knows neither the files' content nor the folder's parent."""
    file = write_card(tmp_path / "a" / "rows")
    other = write_card(tmp_path / "b" / "rows")
    other.write_text(other.read_text().replace("one", "another"))
    first = load(str(tmp_path / "a" / "rows"), name="one")
    second = load(str(tmp_path / "b" / "rows"), name="one")
    assert (texts_of(first)[0], texts_of(second)[0]) == ("one 0", "another 0")
    file.write_text(file.read_text().replace("one", "new"))
    third = load(str(tmp_path / "a" / "rows"), name="one")
    assert texts_of(third)[0] == "new 0"
    assert len({tables[0]._fingerprint for tables in (first, second, third)}) == 3
    again = load(str(tmp_path / "a" / "rows"), name="one")
    assert again[0]._fingerprint == third[0]._fingerprint


def test_a_file_of_another_size_is_read_again_whatever_its_time(tmp_path):
    file = tmp_path / "rows.jsonl"
    for words in (["one", "two"], ["three", "fourteen"]):
        file.write_text("".join(f'{{"text": "{word}"}}\n' for word in words))
        os.utime(file, (1, 1))
        assert texts_of(load(str(file))) == sorted(words)


def test_what_an_earlier_version_left_in_the_cache_is_removed_the_day_after(tmp_path, own_data_cache):
    file = tmp_path / "rows.jsonl"
    before = set(own_data_cache.glob("samestep/tables/*"))
    for version in range(3):
        file.write_text('{"text": "a"}\n' * (2 + version))
        load(str(file))
        (folder,) = set(own_data_cache.glob("samestep/tables/*")) - before
        if version == 0:
            (first,) = folder.iterdir()
            os.utime(first, (1, 1))
    assert len(list(folder.iterdir())) == 2 and not first.exists()


def test_another_run_writes_the_same_file_meanwhile(tmp_path, monkeypatch):
    """Two containers that share a cache may have the same process id and the same host name."""
    write = Path.write_text

    def interrupted(self, text):
        write(self, text)
        monkeypatch.setattr(Path, "write_text", write)
        assert remember(tmp_path / "kept.json", lambda: ["a", "value"]) == ["a", "value"]

    monkeypatch.setattr(Path, "write_text", interrupted)
    assert remember(tmp_path / "kept.json", lambda: ["a", "value"]) == ["a", "value"]
    assert remember(tmp_path / "kept.json", lambda: None) == ["a", "value"]
    assert [file.name for file in tmp_path.iterdir()] == ["kept.json"]


def test_processes_that_write_the_same_table_at_once_do_not_disturb_each_other(tmp_path):
    features, part = datasets.Features({"text": datasets.Value("string")}), pyarrow.table({"text": ["one", "two"]})
    place, other = tmp_path / "rows.arrow", []

    def interrupted():
        yield part
        other.append(written_once(place, features, iter([part]), "json", "train"))

    table = written_once(place, features, interrupted(), "json", "train")
    assert [each["text"][:] for each in (table, *other)] == [["one", "two"]] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["rows.arrow"]


def test_a_cache_that_cannot_be_written_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with refused("No space left", str(tmp_path), "HF_DATASETS_CACHE"), using_cache():
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("while writing") from error
