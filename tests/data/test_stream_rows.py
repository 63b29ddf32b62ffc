"""Rows of streamed data: as the index numbers them, through a cache that many processes share and may be killed in."""

import contextlib
import multiprocessing
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet
from support.buckets import BUCKET, IMPATIENT, Fault
from support.stream_shards import WRITERS, expected, lines, written
from torch.utils.data import DataLoader

from app import storage
from app.data.streams import chunk_cache, chunk_folder, chunks
from app.data.streams.chunk_cache import ChunkCache, folder_of
from app.data.streams.chunk_folder import ChunkFolder, check_room, lacking_disk, rounded_up
from app.data.streams.chunk_reader import BadChunk, ChunkReader
from app.data.streams.forked_readers import ReaderEndedError
from app.data.streams.index import index_of
from app.data.streams.rows import StreamedRows
from app.data.streams.shards import find_shards
from app.errors import UserError
from app.sampling.batch_plan import BatchPlan
from app.storage.addresses import address
from app.storage.bucket import BucketStorage
from app.storage.local import LocalStorage

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes"),
]
FORK = multiprocessing.get_context("fork")
ENDS = re.compile(r"\.[0-9a-f]{16}\.tmp$")  # of drafts


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Return a function that opens the rows of shards of a format, in small chunks."""
    monkeypatch.setattr(chunks, "LEAST", 400)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def opened(kind, limit=1 << 30, write=True, path=""):
        folder = path or (written(tmp_path / "data", kind) if write else tmp_path / "data")
        index = index_of("--data.path", str(folder), find_shards("--data.path", str(folder)))
        caches.append(ChunkCache("--data.path", index, tmp_path / "chunks", limit))
        return StreamedRows(index, caches[-1], window=4)

    caches: list[ChunkCache] = []
    yield opened
    for cache in caches:
        cache.close()


def test_micro_batches_share_a_lane_and_its_window(made, tmp_path):
    """A step mixes as many chunks as with lanes of their own."""
    index, plan = made("parquet")._index, BatchPlan(100, 200, 24, 4)

    def rows(shared):
        return StreamedRows(index, ChunkCache("--data.path", index, tmp_path / "chunks", 1 << 30), 2, sort_over=shared)

    for shared in (1, 2, 3, 6):
        order, (read,) = rows(shared).order(plan), rows(shared).read_by_chunks()
        assert (order.lanes, order.sort_over, read.window, read.lane_window) == (6 // shared, shared, 2, 2 * shared)
    assert len({rows(shared).order(plan).fingerprint for shared in (1, 2, 3, 6)}) == 4
    with pytest.raises(UserError, match=r"--data.sort-over 4: does not divide the 6 micro-batches .*one of 1, 2, 3, 6"):
        rows(4).order(plan)


@pytest.mark.parametrize("kind", WRITERS)
def test_rows_come_by_their_numbers_in_the_order_asked_for(kind, made):
    rows = made(kind)
    numbers = np.random.default_rng(0).integers(0, 100, 300).tolist()
    assert len(rows) == 100 and rows.__getitems__(numbers) == [expected(kind)[number] for number in numbers]
    assert rows[99] == expected(kind)[99] and rows.__getitems__([]) == []
    assert rows._cache.dataset(0) is rows._cache.dataset(0)  # it takes longer to make than to read
    for number in (-1, 100):
        with pytest.raises(IndexError):
            rows[number]


def test_chunks_come_ahead_and_are_not_fetched_twice(made, monkeypatch):
    rows = made("jsonl")
    rows.prepare(np.arange(100))
    while not all(each.done() for each in rows._cache._coming.values()):
        time.sleep(0.01)
    monkeypatch.setattr(ChunkReader, "table", None)
    assert rows.__getitems__(range(100)) == expected("jsonl")


def test_what_is_waited_for_comes_before_what_comes_ahead(made, monkeypatch):
    rows = made("jsonl")
    table, goes_on = ChunkReader.table, threading.Event()

    def slow(reader, chunk):
        assert chunk == 5 or goes_on.wait(30)
        return table(reader, chunk)

    monkeypatch.setattr(ChunkReader, "table", slow)
    rows._cache.prepare(range(chunk_cache.THREADS + 2))
    assert len(rows._cache.table(5)) == rows._index.rows[5]
    assert not rows._cache._coming[0].done()
    goes_on.set()


def sizes_in(folder):
    with chunk_folder._locked(folder, chunk_folder._ROOM):
        return {path.name: path.stat().st_size for path in folder.glob("*-*.arrow*")}


@pytest.mark.parametrize("ahead", [False, True])
def test_the_cache_stays_below_its_limit_and_rows_right(ahead, made, tmp_path):
    whole = made("jsonl")
    whole.__getitems__(range(100))
    largest = max(sizes_in(tmp_path / "chunks").values())
    for file in (tmp_path / "chunks").iterdir():
        file.unlink()
    rows, most, seen = made("jsonl", limit=8 * largest), 0, set()
    for _ in range(2):
        for number in np.random.default_rng(1).permutation(100).tolist():
            if ahead:
                rows._cache.prepare([int(each) for each in rows.places(np.arange(number, 100)[:30])[0]])
            assert rows[number] == expected("jsonl")[number]
            sizes = sizes_in(tmp_path / "chunks")
            most, seen = max(most, sum(sizes.values())), seen | {*sizes}
    assert 4 * largest < most <= 8 * largest and len(rows._index.rows) > 12
    assert len({*map(ENDS.sub, [""] * len(seen), seen)}) == len(rows._index.rows)


def test_chunks_that_are_announced_or_read_go_last(made, tmp_path):
    rows = made("parquet")
    sizes = []
    for chunk in range(4):
        rows._cache.table(chunk)
        sizes.append(sum(sizes_in(tmp_path / "chunks").values()))
    small = made("parquet", limit=sizes[-1] * 16 // 15 + 10, write=False)
    for chunk in range(4):
        os.utime(tmp_path / "chunks" / small._cache._name(chunk), (time.time() - 9 + chunk,) * 2)
    small._cache.prepare([0])
    small._cache.table(1)
    small._cache.table(4)
    kept = [small._cache._folder.has(small._cache._name(chunk)) for chunk in range(5)]
    assert kept == [True, True, False, True, True]
    assert len(rows._cache.table(2)) == 7  # it was mapped before it was deleted
    assert 2 not in rows._cache._mapped


def test_a_chunk_that_is_larger_than_the_cache_is_refused(made):
    with pytest.raises(UserError, match=r"--data.cache-gb: it allows 1e-09 GB, and a chunk takes .* GB: give more"):
        made("jsonl", limit=1)[0]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_cache_that_holds_too_few_chunks_is_refused_before_the_start(kind, made, tmp_path):
    rows = made(kind)
    rows.__getitems__(range(100))
    sizes = sizes_in(tmp_path / "chunks")
    decoded = sum(sizes.values())
    index = rows._index
    # Files of small chunks are mostly about their columns, so the data alone are compared.
    data = sum(rows._cache.table(chunk).nbytes for chunk in range(len(index.rows)))
    assert 0.5 * data < index.growth * index.size.sum() < 2 * data
    with pytest.raises(UserError, match=r"--data.cache-gb: .* each of 3 micro-batches .*: give (\S+) or more") as told:
        check_room("--data.path", index, 3, 1, 0)
    enough = float(re.search(r"give (\S+) or", str(told.value))[1]) * 1e9
    check_room("--data.path", index, 3, 1, enough)
    with pytest.raises(UserError, match="two windows of 2 chunks"):
        check_room("--data.path", index, 100, 2, 0.5 * data)
    check_room("--data.path", index, 1000, 1000, 2 * decoded)  # all of it, and no more


def test_a_disk_that_has_less_room_than_the_cache_may_take_is_told(tmp_path):
    free = storage.at(tmp_path).free()
    assert lacking_disk(tmp_path, free // 2) == "" == lacking_disk(tmp_path / "none" / "yet", 1)
    (tmp_path / "0-0.arrow").write_bytes(bytes(10))
    said = lacking_disk(tmp_path, 2 * free)
    assert said.startswith("--data.cache-gb allows ") and f"{tmp_path} has" in said


@pytest.mark.parametrize(("number", "text"), [(0.001234, "0.0013"), (1.0, "1"), (99.1, "100"), (123.0, "130")])
def test_numbers_are_rounded_up(number, text):
    assert rounded_up(number) == text


def test_a_full_cache_is_seldom_listed(made, monkeypatch, tmp_path):
    folder = ChunkFolder(tmp_path / "chunks", 2 << 20)
    table = pa.table({"x": np.zeros(1000)})
    listed, list_files = [], ChunkFolder._files

    def counted(folder):
        listed.append(folder)
        return list_files(folder)

    monkeypatch.setattr(ChunkFolder, "_files", counted)
    for number in range(800):
        with folder.bringing(f"0-{number}.arrow"):
            folder.put(f"0-{number}.arrow", table)
    assert len(listed) < 60
    assert 1.8 * 2**20 < sum(sizes_in(tmp_path / "chunks").values()) <= 2 << 20


def _read(rows, numbers, answers):
    try:
        answers.put(rows.__getitems__(numbers))
    except Exception as error:
        answers.put((type(error), str(error), getattr(error, "chunk", None)))


def forked(rows, numbers, seconds=60):
    """Return what a process that is forked now reads, or the kind and the text of its error."""
    answers = FORK.Queue()
    process = FORK.Process(target=_read, args=(rows, numbers, answers), daemon=True)
    process.start()
    answer = answers.get(timeout=seconds)
    process.join(30)
    return answer


def test_processes_share_the_cache(made, tmp_path):
    """Four read everything at once, with room for few chunks, so that they delete what the others look for."""
    rows = made("parquet", limit=12000)
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
    assert sum(sizes_in(tmp_path / "chunks").values()) <= 12000


def test_a_forked_process_fetches_nothing_itself(made, monkeypatch):
    rows, owner, table, readers = made("jsonl"), os.getpid(), ChunkReader.table, []

    def here(reader, chunk):
        assert os.getpid() == owner
        readers.append(chunk)
        return table(reader, chunk)

    monkeypatch.setattr(ChunkReader, "table", here)
    assert forked(rows, range(100)) == expected("jsonl")
    assert sorted(readers) == [*range(len(rows._index.rows))]
    rows._cache.close()
    assert rows[0] == expected("jsonl")[0]


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_of_a_loader_read_through_the_process_that_made_them(workers, made):
    rows = made("parquet")
    rows.prepare(np.arange(1))
    loader = DataLoader(rows, batch_size=9, num_workers=workers, collate_fn=list, multiprocessing_context="fork")
    for _ in range(2):  # workers of their own each time
        assert [row for batch in loader for row in batch] == expected("parquet")


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_read_from_a_bucket(workers, made, near, tmp_path):
    folder = written(tmp_path / "data", "parquet")
    bucket = f"s3://{BUCKET}/rows-{workers}"
    for file in folder.iterdir():
        storage.at(bucket).write(file.name, file.read_bytes())
    rows = made("parquet", path=bucket)
    rows.prepare(np.arange(1))
    loader = DataLoader(rows, batch_size=9, num_workers=workers, collate_fn=list, multiprocessing_context="fork")
    assert [row for batch in loader for row in batch] == expected("parquet")


@pytest.fixture
def unseen(monkeypatch):
    """Let changes of shards pass unseen, as if they were damaged on their way."""
    read = LocalStorage.read
    monkeypatch.setattr(LocalStorage, "read", lambda *args, tag="", **more: read(*args, **more))


def test_a_forked_process_gets_the_error_of_its_own_kind(made, monkeypatch, tmp_path, unseen):
    rows = made("jsonl")
    file = tmp_path / "data" / "part-2.jsonl"
    file.write_bytes(file.read_bytes().replace(b"{", b"x"))
    kind, text, chunk = forked(rows, [41])
    assert (kind, chunk) == (BadChunk, 6) and "part-2.jsonl, chunk at byte 0 (" in text and "line 1: " in text
    file.unlink()
    assert forked(rows, [41])[:2] == (
        UserError,
        f"--data.path {file} is gone since the data were indexed: put the shard back, or start a new run",
    )
    monkeypatch.setattr(ChunkReader, "table", lambda *_: 1 / 0)
    kind, text, _ = forked(rows, [41])
    assert kind is RuntimeError and text.startswith("ZeroDivisionError in the process that fetches chunks: ")


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_process_whose_owner_dies_ends_with_an_error(asked, made, monkeypatch):
    """Another process, forked from the same one, still holds the ends of its sockets."""
    rows = made("jsonl")
    answers, pids, dead = FORK.Queue(), FORK.Queue(), FORK.Event()
    monkeypatch.setattr(ChunkReader, "table", lambda *_: time.sleep(60))

    def reads(own):
        if asked == "after":
            assert dead.wait(30)
        _read(own, [0], answers)

    def owns():
        own = made("jsonl", write=False)
        sleeper, reader = FORK.Process(target=time.sleep, args=(60,)), FORK.Process(target=reads, args=(own,))
        reader.start()
        time.sleep(0.5)  # the reader has asked: the second process has its connection too
        sleeper.start()
        for each in (sleeper, reader):
            pids.put(each.pid)
        time.sleep(60)

    owner = FORK.Process(target=owns)
    owner.start()
    left = [pids.get(timeout=30) for _ in range(2)]
    try:
        time.sleep(0.2)
        os.kill(owner.pid, signal.SIGKILL)  # and nobody waits for it yet
        dead.set()
        kind, text, _ = answers.get(timeout=20)
        assert kind is ReaderEndedError and f"process {owner.pid}, which fetches them for it, has ended" in text
    finally:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        owner.join(30)
    rows._cache.close()


def test_the_socket_goes_with_its_process(made, tmp_path):
    rows = made("jsonl")
    folder = Path(rows._cache._answering.address).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    process = FORK.Process(target=rows.__getitem__, args=(0,))
    process.start()
    process.join(30)
    code = "import sys, weakref\nfrom app.data.streams.forked_readers import Answering\nprint(Answering(print).address)"
    address = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert folder.exists() and not Path(address).parent.exists()
    rows._cache.close()
    assert not folder.exists()


def test_a_process_that_is_forked_while_a_chunk_is_fetched_waits_for_it(made, monkeypatch):
    rows = made("jsonl")
    table, begun, goes_on = ChunkReader.table, threading.Event(), threading.Event()

    def slow(reader, chunk):
        begun.set()
        assert goes_on.wait(30)
        return table(reader, chunk)

    monkeypatch.setattr(ChunkReader, "table", slow)
    rows.prepare(np.arange(1))
    assert begun.wait(30)
    answers = FORK.Queue()
    process = FORK.Process(target=_read, args=(rows, [0], answers), daemon=True)
    process.start()
    goes_on.set()
    assert rows[0] == expected("jsonl")[0]
    assert answers.get(timeout=20) == [expected("jsonl")[0]]


@pytest.mark.parametrize("harm", [lambda data: bytes(len(data)), lambda data: data[:99], lambda data: b""])
def test_a_chunk_of_the_cache_that_is_not_whole_is_brought_anew(harm, made, tmp_path):
    made("jsonl").__getitems__(range(100))
    for file in (tmp_path / "chunks").glob("*.arrow"):
        file.write_bytes(harm(file.read_bytes()))
    assert made("jsonl", write=False).__getitems__(range(100)) == expected("jsonl")


def test_a_chunk_that_goes_before_it_is_mapped_is_fetched_again(made, monkeypatch):
    rows, mapped, calls = made("jsonl"), ChunkFolder.map, []

    def gone(folder, name):
        calls.append(name)
        if len(calls) < times:
            (folder._folder / name).unlink()
        return mapped(folder, name)

    monkeypatch.setattr(ChunkFolder, "map", gone)
    times = 2
    assert rows[0] == expected("jsonl")[0] and len(calls) == 2
    times = 100
    with pytest.raises(UserError, match=r"--data\.cache-gb: chunks are deleted before they are read"):
        rows[99]


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_to_believe(made, monkeypatch, tmp_path):
    def killed(draft, table):
        draft.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    def reads():
        made("jsonl", write=False)[0]

    rows = made("jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(chunk_folder, "_write", killed)
        process = FORK.Process(target=reads)
        process.start()
        process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert len([*(tmp_path / "chunks").glob("*.tmp")]) == 1
    assert rows.__getitems__(range(100)) == expected("jsonl")
    assert [*(tmp_path / "chunks").glob("*.tmp")] == []


@pytest.mark.parametrize("where", ["reads", "writes", "counts", "lists"])
def test_a_process_that_is_stopped_with_a_lock_keeps_others_for_some_time_only(where, made, monkeypatch, tmp_path):
    """It is stopped by a signal, while another one brings the same chunk; when it goes on, nothing is the worse."""
    places = {"reads": (ChunkReader, "table"), "writes": (chunk_folder, "_write")}
    places |= {"counts": (chunk_folder, "_set_count"), "lists": (ChunkFolder, "_emptied")}
    place, does = places[where], getattr(*places[where])

    def stopped(*args):
        monkeypatch.setattr(*place, does)
        os.kill(os.getpid(), signal.SIGSTOP)
        return does(*args)

    def reads():
        monkeypatch.setattr(*place, stopped)
        made("jsonl", write=False)._cache.table(0)

    rows = made("jsonl")
    monkeypatch.setattr(chunk_folder, "PATIENCE", 0.5)
    process = FORK.Process(target=reads)
    process.start()
    end = time.monotonic() + 30
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < end
        time.sleep(0.01)
    began = time.monotonic()
    assert rows.__getitems__(range(100)) == expected("jsonl")
    assert 0.5 < time.monotonic() - began < 5  # once for each lock, not for each chunk
    os.kill(process.pid, signal.SIGCONT)
    process.join(30)
    assert process.exitcode == 0 and [*(tmp_path / "chunks").glob("*.tmp")] == []
    assert made("jsonl", write=False).__getitems__(range(100)) == expected("jsonl")


def test_a_chunk_whose_draft_is_deleted_is_written_again(made, monkeypatch):
    """As by a process that was stopped, and does not know that it has lost its lock."""
    rows, write, drafts = made("jsonl"), chunk_folder._write, []

    def deletes(draft, table):
        drafts.append(draft)
        write(draft, table)
        if len(drafts) == 1:
            draft.unlink()

    monkeypatch.setattr(chunk_folder, "_write", deletes)
    assert rows[0] == expected("jsonl")[0] and len(drafts) == 2


def test_threads_that_wait_for_locks_of_two_processes_are_no_deadlock(tmp_path):
    """Each process holds a lock in one thread, and waits in another one for the lock that the other process holds."""
    holds, goes_on, got = FORK.Event(), FORK.Event(), queue.Queue()

    def take(lock, seconds=0.0):
        try:
            with chunk_folder._locked(tmp_path, lock):
                got.put(lock)
                time.sleep(seconds)
        except OSError as error:
            got.put(error)

    def other():
        with chunk_folder._locked(tmp_path, "b"):
            waits = threading.Thread(target=take, args=("a",))
            waits.start()
            holds.set()
            assert goes_on.wait(30)
        waits.join(30)
        os._exit(int(got.get() != "a"))

    with chunk_folder._locked(tmp_path, "a"):
        process = FORK.Process(target=other)
        process.start()
        assert holds.wait(30)
        time.sleep(0.5)  # until its thread waits
        waits = threading.Thread(target=take, args=("b",))
        waits.start()
        with pytest.raises(queue.Empty):
            got.get(timeout=0.5)
        goes_on.set()
        assert got.get(timeout=30) == "b"
    process.join(30)
    assert process.exitcode == 0


def test_what_others_write_now_is_not_deleted(made, monkeypatch, tmp_path):
    rows, begun, goes_on = made("jsonl"), FORK.Event(), FORK.Event()
    write = chunk_folder._write

    def slow(draft, table):
        begun.set()
        assert goes_on.wait(30)
        write(draft, table)

    def reads():
        monkeypatch.setattr(chunk_folder, "_write", slow)
        made("jsonl", write=False)._cache.table(0)

    process = FORK.Process(target=reads)
    process.start()
    assert begun.wait(30)
    assert rows.__getitems__(range(20, 100)) == expected("jsonl")[20:]  # which lists the folder
    assert len([*(tmp_path / "chunks").glob("*.tmp")]) == 1
    goes_on.set()
    process.join(30)
    assert process.exitcode == 0 and (tmp_path / "chunks" / rows._cache._name(0)).exists()


def test_chunks_of_before_the_machine_started_are_not_believed(made, tmp_path):
    rows = made("jsonl")
    assert rows[0] == expected("jsonl")[0]
    (file,) = (tmp_path / "chunks").glob("*.arrow")
    file.write_bytes(bytes(file.stat().st_size))  # as after a power failure
    os.utime(file, (psutil.boot_time() - 10,) * 2)
    assert made("jsonl", write=False)[0] == expected("jsonl")[0]


def test_the_folder_of_chunks_is_of_the_shards_as_they_are(made, tmp_path):
    index = made("jsonl")._index
    assert folder_of(index) == folder_of(index.take(np.array([3, 1])))
    assert folder_of(index).is_relative_to(tmp_path / "cache")
    changed = tmp_path / "data" / "part-2.jsonl"
    changed.write_bytes(changed.read_bytes().replace(b"the", b"one"))
    assert folder_of(made("jsonl", write=False)._index) != folder_of(index)


def test_indexes_of_parts_of_the_data_share_a_cache(made, monkeypatch, tmp_path):
    rows = made("parquet")
    index = rows._index
    chosen = np.array([9, 3, 4])
    part = index.take(chosen)
    assert part.fingerprint not in (index.fingerprint, index.take(chosen[::-1]).fingerprint)
    rows.__getitems__(range(100))
    monkeypatch.setattr(ChunkReader, "_fetched", None)  # all chunks are here
    some = StreamedRows(part, ChunkCache("--data.path", part, tmp_path / "chunks", 1 << 30), window=4)
    first = np.cumsum(index.rows) - index.rows
    numbers = [row for chunk in chosen for row in range(first[chunk], first[chunk] + index.rows[chunk])]
    assert some.__getitems__(range(len(some))) == [expected("parquet")[number] for number in numbers]
    some._cache.close()


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


@pytest.mark.parametrize("written", ["over", "anew"])
def test_a_shard_that_changes_while_it_is_read_is_refused_by_name(written, made, tmp_path):
    """Of the same size, after chunks of it were read."""
    rows = made("jsonl")
    assert rows[41] == expected("jsonl")[41]
    file = tmp_path / "data" / "part-2.jsonl"
    changed = file.read_bytes().replace(b"the", b"one")
    if written == "anew":
        file.unlink()
    file.write_bytes(changed)
    assert rows[41] == expected("jsonl")[41]  # it is in the cache
    with pytest.raises(UserError, match=r"--data.path \S+/part-2.jsonl has changed since the data were indexed"):
        rows[99]
    assert rows[0] == expected("jsonl")[0]


@pytest.mark.parametrize("keeps", [True, False])
def test_an_object_that_changes_while_it_is_read_is_refused_by_name(keeps, shaky, proxy, tmp_path):
    """By a store that keeps conditions, and by the tags of one that does not."""
    rows = shaky("jsonl")
    assert rows[41] == expected("jsonl")[41]
    proxy.lies = not keeps
    file = tmp_path / "data" / "part-2.jsonl"
    bucket = storage.at(f"s3://{BUCKET}{file.parent}")
    bucket.write(file.name, file.read_bytes().replace(b"the", b"one"))
    with pytest.raises(UserError, match=r"--data.path s3://\S+/part-2.jsonl has changed since the data were indexed"):
        rows[99]
    bucket.delete(file.name)
    with pytest.raises(UserError, match=r"part-2.jsonl is gone since"):
        rows[99]
    assert rows[0] == expected("jsonl")[0]


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda data: data[:100], "ends .* bytes before its chunk"),
        (lambda data: data.replace(b"{", b"x"), "line 1: "),
        (lambda data: data.replace(b"\n", b" ", 1), "line 1: "),
        (lambda data: lines([{"number": 1}]).ljust(len(data)), "has 1 rows, where the index has"),
    ],
)
def test_a_damaged_chunk_is_named_with_its_rows(harm, says, made, tmp_path, unseen):
    rows = made("jsonl")
    file = tmp_path / "data" / "part-2.jsonl"
    file.write_bytes(harm(file.read_bytes()))
    with pytest.raises(BadChunk, match=rf"part-2.jsonl, chunk at byte 0 \(\d+ rows\): cannot be read: .*{says}"):
        rows[41]
    rows._cache.prepare([int(rows.places(np.array([41]))[0][0])])
    assert not rows._cache._coming  # it would be fetched again for each step of its window
    with pytest.raises(UserError, match=r"part-2\.jsonl"):
        rows[41]
    assert rows[40] == expected("jsonl")[40]


@pytest.fixture
def shaky(made, proxy, tmp_path):
    """Return a function that opens rows in a bucket, which is reached through the proxy without long waits."""

    def opened(kind):
        folder = written(tmp_path / "data", kind)
        for file in folder.iterdir():
            storage.at(f"s3://{BUCKET}{folder}").write(file.name, file.read_bytes())
        rows = made(kind, path=f"s3://{BUCKET}{folder}")
        patience = IMPATIENT._replace(silence=0.5)
        rows._cache._reader._files = BucketStorage(address(f"s3://{BUCKET}{folder}"), tmp_path / "local", patience)
        return rows

    return opened


@pytest.mark.parametrize("does", ["503", "slow", "truncated", "reset", "flipped"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz"])
def test_reading_outlasts_what_goes_wrong_on_the_way(kind, does, shaky, proxy):
    rows = shaky(kind)
    fault = Fault(does, method="GET", holding="part-0", seconds=1.0)
    proxy.faults = [fault]
    assert forked(rows, range(40)) == expected(kind)[:40]
    assert fault.met.is_set() and not fault.times


@pytest.mark.parametrize("damaged", [False, True])
def test_the_end_of_a_shard_is_fetched_once_unless_it_came_damaged(damaged, made, monkeypatch):
    rows, read, tails = made("parquet"), LocalStorage.read, []

    def watched(self, name, start=0, size=None, **more):
        data = read(self, name, start, size, **more)
        if name != "part-0.parquet" or start + size < rows._index.shards.files[0].size:
            return data
        tails.append(start)
        return b"?" * len(data) if damaged and len(tails) == 1 else data

    monkeypatch.setattr(LocalStorage, "read", watched)
    assert rows.__getitems__(range(40)) == expected("parquet")[:40]  # six chunks
    assert len(tails) == 1 + damaged


@pytest.mark.parametrize("does", ["503", "reset", "slow"])
def test_a_store_that_stays_away_ends_in_a_line_with_the_place(does, shaky, proxy):
    rows = shaky("jsonl")
    proxy.faults = [Fault(does, times=10**6, seconds=1.0)]
    kind, text, _ = forked(rows, [41])
    assert kind is UserError and "\n" not in text
    assert re.search(r"--data.path s3://.*/part-2.jsonl, chunk at byte 0 \(7 rows\): cannot be read: the store ", text)
    assert text.endswith("; it was asked for minutes; repeat the command when it answers again")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz"])
def test_a_chunk_that_comes_damaged_again_and_again_is_bad(kind, shaky, proxy):
    rows = shaky(kind)
    proxy.faults = [Fault("flipped", method="GET", holding="part-2", times=10**6)]
    first = int(rows.places(np.array([41]))[0][0])
    kind_of_error, text, chunk = forked(rows, [41])
    assert (kind_of_error, chunk) == (BadChunk, first) and "part-2" in text and "\n" not in text
    assert rows[0] == expected(kind)[0]


def test_what_may_not_be_read_is_no_damage(shaky, proxy):
    rows = shaky("jsonl")
    proxy.faults = [Fault("403", times=10**6)]
    kind, text, _ = forked(rows, [41])
    assert kind is UserError and "the store refuses it: look at the credentials" in text


@pytest.mark.parametrize(("checksum", "bad", "says"), [(True, b"strong", "CRC"), (False, b"l\xffngth", "UTF8")])
def test_damage_that_parquet_can_show_is_looked_for(checksum, bad, says, made, tmp_path, unseen):
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "a.parquet"
    table = pa.table({"text": ["the same length"] * 100})
    parquet.write_table(table, file, compression="none", use_dictionary=False, write_page_checksum=checksum)
    rows = made("parquet", write=False)
    file.write_bytes(file.read_bytes().replace(b"length", bad, 60))
    with pytest.raises(BadChunk, match=rf"a.parquet, chunk at byte 4 \(100 rows\): cannot be read: .*{says}"):
        rows[0]


def test_a_full_disk_says_what_to_do(made, monkeypatch):
    rows = made("jsonl")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chunk_folder, "_write", full)
    with pytest.raises(UserError, match=r"--data.cache-gb: .*No space left on device\): make room there"):
        rows[0]
