"""Data sets on the Hub: huggingface_hub's own file system, against a stand-in for its endpoint."""

import errno

import datasets
import numpy as np
import pytest
from huggingface_hub import HfFileSystem
from huggingface_hub.utils import close_session, http_backoff
from support import fake_hub
from support.stream_shards import ROWS, expected, written

from app import storage
from app.data.streams.chunk_cache import ChunkCache
from app.data.streams.index import index_of, put_beside
from app.data.streams.rows import StreamedRows
from app.data.streams.shards import find_shards
from app.errors import UserError

NAME = "hf://datasets/me/rows"
QUICK = {**http_backoff.__kwdefaults__, "max_retries": 2, "base_wait_time": 0.001}


@pytest.fixture
def there(monkeypatch, tmp_path):
    """Serve a data set, and have this process ask for it without long waits."""
    folder = written(tmp_path / "data", "parquet")
    with fake_hub.hub() as made:
        made.datasets["me/rows"] = {f"data/{file.name}": file.read_bytes() for file in folder.iterdir()}
        made.datasets["me/rows"]["README.md"] = b"a card"
        made.datasets["me/rows@v1"] = {"old.jsonl": b'{"x": 1}\n'}
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", made.url)
        template = f"{made.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.hf_file_system.http_backoff.__kwdefaults__", QUICK)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        yield made
    HfFileSystem.clear_instance_cache()


def test_a_data_set_is_listed_and_read_in_ranges(there):
    files = storage.at(NAME)
    entries = {each.name: each for each in files.files()}
    assert [*entries] == ["README.md", "data/part-0.parquet", "data/part-1.parquet", "data/part-2.parquet"]
    content = there.datasets["me/rows"]["data/part-0.parquet"]
    entry = entries["data/part-0.parquet"]
    assert entry.size == len(content) and entry == files.entry("data/part-0.parquet")
    assert [each.name for each in files.entries()] == ["README.md", "data"]
    assert files.read("data/part-0.parquet", 5, 7) == content[5:12] and files.read("README.md") == b"a card"
    with files.open("data/part-0.parquet") as file:
        file.seek(-8, 2)
        assert file.read() == content[-8:]
    assert files.entry("none") is None and files.exists("data") and not storage.at(f"{NAME}/none").files()
    there.datasets["me/rows"]["data/part-0.parquet"] = content[:-1] + b"x"
    assert files.entry("data/part-0.parquet").tag != entry.tag
    assert [each.name for each in storage.at(f"{NAME}@v1").files()] == ["old.jsonl"]
    assert storage.at(f"{NAME}@v1").read("old.jsonl") == b'{"x": 1}\n'
    with pytest.raises(OSError, match="the Hub is only read") as told:
        files.write("x", b"")
    assert told.value.errno == errno.EROFS


@pytest.mark.parametrize("path", [NAME, f"{NAME}/data/*.parquet", f"{NAME}/data"])
def test_rows_are_streamed(path, there, tmp_path):
    index = index_of("--data.path", path, find_shards("--data.path", path))
    cache = ChunkCache("--data.path", index, tmp_path / "chunks", 1 << 30)
    there.failing = [503, 503]
    rows = StreamedRows(index, cache, window=4)
    rows.prepare(np.arange(28))
    assert rows.__getitems__(range(100)) == expected("parquet") == ROWS and not there.failing
    cache.close()
    with pytest.raises(OSError, match="the Hub is only read"):
        put_beside(index)


def test_a_shard_that_changes_is_refused_and_one_that_was_begun_stays_what_it_was(there, tmp_path):
    index = index_of("--data.path", NAME, find_shards("--data.path", NAME))
    cache = ChunkCache("--data.path", index, tmp_path / "chunks", 1 << 30)
    rows = StreamedRows(index, cache, window=4)
    assert rows[0] == ROWS[0]
    files = there.datasets["me/rows"]
    for name in ("data/part-0.parquet", "data/part-2.parquet"):
        files[name] = files[name].replace(b"the text", b"the TEXT")
    assert rows.__getitems__(range(40)) == ROWS[:40]  # as the commit of the first read has it
    with pytest.raises(UserError, match=r"hf://\S+/part-2.parquet has changed since the data were indexed"):
        rows[41]
    cache.close()


def failed(act):
    with pytest.raises(UserError) as told:
        act()
    return str(told.value)


def test_what_goes_wrong_is_named(there, monkeypatch):
    def listed(name):
        return failed(lambda: find_shards("--data.path", name))

    assert "no such data set, or it is private: log in with `hf auth login`" in listed("hf://datasets/me/none")
    assert listed(f"{NAME}@v9").endswith("cannot be listed: the data set has no such revision")
    assert listed(f"{NAME}/none").endswith("there is nothing of this name")
    assert "give hf://datasets/ORG/NAME/FOLDER" in listed("hf://me/rows")
    assert listed("hf://datasets/me/--x").endswith("give hf://datasets/ORG/NAME")
    shards = find_shards("--data.path", NAME)
    there.gated.add("me/rows")
    gated = failed(lambda: index_of("--data.path", NAME, shards))
    assert "part-0.parquet: cannot be read: the data set is gated: accept its terms on its page" in gated
    there.failing = [500] * 100
    assert listed(f"{NAME}/data").endswith("cannot be listed: the Hub answers 500")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    HfFileSystem.clear_instance_cache()
    assert listed(NAME).endswith("cannot be listed: the Hub cannot be reached, or breaks off")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    close_session()
    assert "HF_HUB_OFFLINE is set" in listed(NAME)
