"""Rows of streamed data: as the index numbers them, through a cache that many processes share and may be killed in."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time

import datasets
import numpy as np
import pytest
from support.stream_shards import WRITERS, expected, lines, written

from app.data.streams import chunk_cache, chunks
from app.data.streams.chunk_cache import ChunkCache
from app.data.streams.index import index_of
from app.data.streams.rows import StreamedRows
from app.data.streams.shards import find_shards
from app.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Return a function that opens the rows of shards of a format, in small chunks."""
    monkeypatch.setattr(chunks, "LEAST", 400)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def opened(kind, limit=1 << 30, write=True):
        folder = written(tmp_path / "data", kind) if write else tmp_path / "data"
        index = index_of("--data.path", str(folder), find_shards("--data.path", str(folder)))
        return StreamedRows(index, ChunkCache("--data.path", index, tmp_path / "chunks", limit), window=4)

    return opened


@pytest.mark.parametrize("kind", WRITERS)
def test_rows_come_by_their_numbers_in_the_order_asked_for(kind, made):
    rows = made(kind)
    numbers = np.random.default_rng(0).integers(0, 100, 300).tolist()
    assert len(rows) == 100 and rows.__getitems__(numbers) == [expected(kind)[number] for number in numbers]
    assert rows[99] == expected(kind)[99] and rows.__getitems__([]) == []
    for number in (-1, 100):
        with pytest.raises(IndexError):
            rows[number]


def test_chunks_come_ahead_and_are_not_fetched_twice(made, monkeypatch):
    rows = made("jsonl")
    rows.prepare(np.arange(100))
    while rows._cache._coming and not all(each.done() for each in rows._cache._coming.values()):
        time.sleep(0.01)
    monkeypatch.setattr(ChunkCache, "_decoded", None)
    assert rows.__getitems__(range(100)) == expected("jsonl")


def test_the_cache_stays_below_its_limit_and_rows_right(made, tmp_path):
    one = made("jsonl")
    largest = max(one._cache._decoded(chunk).nbytes for chunk in range(len(one._index.rows)))
    rows = made("jsonl", limit=3 * largest)
    for _ in range(2):
        for number in np.random.default_rng(1).permutation(100).tolist():
            assert rows[number] == expected("jsonl")[number]
    held = [path.stat().st_size for path in (tmp_path / "chunks").glob("*.arrow")]
    assert 1 <= len(held) <= 3 and sum(held) < 3 * largest + 4096  # a file has a header besides


def _read(rows, numbers, answers):
    answers.put(rows.__getitems__(numbers))


def test_processes_share_the_cache(made, tmp_path):
    """Four read everything at once, with room for few chunks, so that they delete what the others look for."""
    rows = made("parquet", limit=6000)
    rows.prepare(np.arange(14))  # threads here, which processes that are forked do not have
    answers = FORK.Queue()
    orders = [np.random.default_rng(seed).permutation(100).tolist() for seed in range(4)]
    running = [FORK.Process(target=_read, args=(rows, order, answers)) for order in orders]
    for process in running:
        process.start()
    read = [answers.get(timeout=60) for _ in running]
    for process in running:
        process.join(30)
    wanted = [[expected("parquet")[number] for number in order] for order in orders]
    assert sorted(read, key=str) == sorted(wanted, key=str)


def test_a_process_that_is_forked_while_a_chunk_is_fetched_can_fetch_it_too(made, monkeypatch):
    """It has the open files of the thread that fetches, and none of its locks."""
    monkeypatch.setattr(chunk_cache, "LOCKS", 1)
    rows = made("jsonl")
    decoded, begun, goes_on = ChunkCache._decoded, threading.Event(), threading.Event()

    def slow(cache, chunk):
        begun.set()
        assert goes_on.wait(30)
        return decoded(cache, chunk)

    monkeypatch.setattr(ChunkCache, "_decoded", slow)
    rows.prepare(np.arange(1))
    assert begun.wait(30)
    answers = FORK.Queue()
    process = FORK.Process(target=_read, args=(rows, [0], answers), daemon=True)
    process.start()
    goes_on.set()
    assert rows[0] == expected("jsonl")[0]
    assert answers.get(timeout=20) == [expected("jsonl")[0]]


def test_a_lock_that_the_system_takes_for_a_deadlock_is_waited_for(made, monkeypatch):
    """As of threads in two processes that each hold one lock and wait for another."""
    rows, lockf, calls = made("jsonl"), fcntl.lockf, []

    def deadlock_once(file, how):
        calls.append(how)
        if len(calls) == 1:
            raise OSError(errno.EDEADLK, "Resource deadlock avoided")
        lockf(file, how)

    monkeypatch.setattr(fcntl, "lockf", deadlock_once)
    rows.prepare(np.arange(1))
    assert rows[0] == expected("jsonl")[0] and len(calls) == 2


def test_a_chunk_that_goes_before_it_is_mapped_is_fetched_again(made, monkeypatch):
    rows, mapped, calls = made("jsonl"), chunk_cache._map, []

    def gone_once(file):
        calls.append(file)
        if len(calls) == 1:
            file.unlink()
        return mapped(file)

    monkeypatch.setattr(chunk_cache, "_map", gone_once)
    assert rows[0] == expected("jsonl")[0] and len(calls) == 2


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_to_believe(made, monkeypatch, tmp_path):
    rows = made("jsonl")

    def killed(file, table):
        with chunk_cache.drafted(file) as draft:
            draft.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(chunk_cache, "_write", killed)
        process = FORK.Process(target=rows.__getitem__, args=(0,))
        process.start()
        process.join(30)
    assert process.exitcode == -signal.SIGKILL
    (draft,) = (tmp_path / "chunks").glob("*.tmp")
    assert rows.__getitems__(range(100)) == expected("jsonl") and draft.exists()
    os.utime(draft, (0, 0))  # long ago
    made("jsonl", limit=1, write=False)[0]
    (tmp_path / "chunks" / "0.arrow").unlink()
    made("jsonl", limit=1, write=False)[0]
    assert not draft.exists()


def test_a_shard_that_has_changed_is_refused_by_name(made, tmp_path):
    rows = made("jsonl")
    assert rows[0] == expected("jsonl")[0]
    file = tmp_path / "data" / "part-2.jsonl"
    file.write_bytes(file.read_bytes().replace(b"the", b"one"))
    with pytest.raises(UserError, match=r"--data.path .*part-2.jsonl has changed since the data were indexed"):
        rows[99]
    file.unlink()
    with pytest.raises(UserError, match=r"part-2.jsonl is gone since"):
        rows[99]


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda data: data[:100], "ends .* bytes before its chunk"),
        (lambda data: data.replace(b"{", b"x"), "line 1: "),
        (lambda data: data.replace(b"\n", b" ", 1), "line 1: "),
        (lambda data: lines([{"number": 1}]).ljust(len(data)), "has 1 rows, where the index has"),
    ],
)
def test_a_damaged_chunk_is_named_with_its_rows(harm, says, made, tmp_path, monkeypatch):
    rows = made("jsonl")
    monkeypatch.setattr(ChunkCache, "_check_unchanged", lambda *_: None)  # as where it is damaged on its way
    file = tmp_path / "data" / "part-2.jsonl"
    file.write_bytes(harm(file.read_bytes()))
    with pytest.raises(UserError, match=rf"part-2.jsonl, chunk 0 \(\d+ rows from byte 0\): cannot be read: .*{says}"):
        rows[41]
    rows.prepare(np.array([41]))
    with pytest.raises(UserError, match=r"part-2\.jsonl"):
        rows[41]
    assert rows[40] == expected("jsonl")[40]


def test_a_full_disk_says_what_to_do(made, monkeypatch):
    rows = made("jsonl")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chunk_cache, "_write", full)
    with pytest.raises(UserError, match=r"--data.cache-gb: .*No space left on device\): make room there"):
        rows[0]
