"""A bucket: what goes wrong between it and us, what only it has, and addresses."""

import errno
import http.client
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from support import apart, buckets
from support.buckets import IMPATIENT, Fault, Proxy
from support.launching import ROOT

from app import storage
from app.errors import UserError
from app.storage import Changed, Kind, objects
from app.storage.addresses import address
from app.storage.bucket import BucketStorage
from app.storage.bucket_log import PARTS
from app.storage.local import LocalStorage
from app.storage.objects import PIECE

SEAL = "manifest.json"


@pytest.fixture
def files(near, tmp_path) -> BucketStorage:
    """Give an empty folder of the bucket."""
    return buckets.storage_of(tmp_path / "place")


@pytest.fixture
def shaky(proxy, tmp_path) -> BucketStorage:
    """Give a folder that is reached through the proxy, without long waits."""
    return buckets.storage_of(tmp_path / "place", IMPATIENT)


@pytest.mark.parametrize("does", ["503", "reset", "slow", "truncated"])
def test_reading_outlasts_a_fault(shaky, proxy, does):
    data = os.urandom(300_000)
    shaky.write("file", data)
    proxy.faults = [Fault(does, method="GET", holding="file", times=2)]
    assert shaky.read("file") == data
    proxy.faults = [Fault(does, method="GET", holding="file", times=2)]
    assert shaky.read("file", 1000, 200_000) == data[1000:201_000]
    proxy.faults = [Fault(does, times=1)]
    with shaky.open("file") as file:
        assert file.read() == data
    assert not any(fault.times for fault in proxy.faults)


def test_a_store_that_does_not_answer_is_told_once(near, monkeypatch, capfd, tmp_path):
    """As with a wrong address: long before it is given up, and without what may be secret in it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:secret@127.0.0.1:9")
    patience = buckets.PATIENCE._replace(seconds=1, longest_wait=0.2, quiet=0.3)
    files = BucketStorage(address("s3://nowhere"), tmp_path, patience)
    for act in (lambda: files.read("a"), lambda: files.entry("b"), files.files, files.entries):
        with pytest.raises(OSError, match="the store cannot be reached"):
            act()
    (line,) = capfd.readouterr().err.splitlines()
    told = r"waiting for the store of s3://nowhere at http://127.0.0.1:9, which does not answer; it is asked until "
    assert re.fullmatch(told + r"\d\d:\d\d:\d\d", line)


@pytest.mark.parametrize("does", ["503", "reset", "slow", "lost"])
def test_writing_outlasts_a_fault(shaky, proxy, does):
    proxy.faults = [Fault(does, method="PUT")]
    shaky.write("file", b"text")
    proxy.faults = [Fault(does, method="PUT")]
    version = shaky.put_if_absent("new", b"1")
    proxy.faults = [Fault(does, method="PUT")]
    version = shaky.replace_if_unchanged("new", b"2", version)
    assert shaky.version("new") == (b"2", version) and shaky.read("file") == b"text"
    log = shaky.log("log", b"1\n")
    for line in (b"2\n", b"3\n"):
        proxy.faults = [Fault(does, method="PUT")]
        log.append(line)
    assert shaky.open_log("log").read() == b"1\n2\n3\n"
    assert not any(fault.times for fault in proxy.faults)


def test_listing_and_deleting_outlast_a_fault(shaky, proxy):
    for does in ("503", "reset", "slow", "truncated", "lost"):
        shaky.write("folder/file", does)
        for act in (shaky.entries, lambda: list(shaky.walk()), lambda: shaky.delete("folder")):
            proxy.faults = [Fault(does, method="POST"), Fault(does, method="GET")]
            act()
        assert shaky.entries() == [] and not any(fault.times for fault in proxy.faults)


def test_a_lost_answer_does_not_hide_who_was_first(shaky, proxy):
    shaky.put_if_absent("file", b"same")
    proxy.faults = [Fault("lost", method="PUT")]
    with pytest.raises(FileExistsError):
        shaky.put_if_absent("file", b"same")  # the contents do not tell who wrote them


@pytest.mark.parametrize(("does", "number"), [("503", errno.EIO), ("reset", errno.EIO), ("slow", errno.ETIMEDOUT)])
def test_a_store_that_stays_away_is_an_error_that_names_the_url(proxy, tmp_path, does, number):
    shaky = buckets.storage_of(tmp_path / "place", IMPATIENT._replace(retries=1, silence=0.5))
    proxy.faults = [Fault(does, times=1000)]
    for act in (shaky.entry, shaky.read, lambda name: shaky.write(name, b""), shaky.entries):
        with pytest.raises(OSError, match=re.escape(f"s3://{buckets.BUCKET}")) as error:
            act("file")
        assert error.value.errno == number and "testing" not in str(error.value)


def test_a_store_that_restarts_is_waited_for(proxy, tmp_path):
    """The waits between tries are drawn at random, and must not add up to less than a store takes to start."""
    buckets.storage_of(tmp_path / "place").write("file", b"here")
    down = Fault("reset", times=10**6)
    proxy.faults = [down]
    back = threading.Timer(8, lambda: setattr(down, "times", 0))
    back.start()
    try:
        for act in (lambda files: files.read("file"), lambda files: len(files.files())):
            assert act(buckets.storage_of(tmp_path / "place")) in (b"here", 1)
        assert not down.times and len(proxy.requests) < 60
    finally:
        back.cancel()


def test_a_body_that_stays_short_is_an_error(shaky, proxy):
    shaky.write("file", bytes(1000))
    proxy.faults = [Fault("truncated", method="GET", times=1000)]
    with pytest.raises(OSError, match=r"s3://bucket/.*file"):
        shaky.read("file")


def test_an_append_that_failed_is_taken_back_by_the_next(shaky, proxy):
    log = shaky.log("log", b"1\n")
    proxy.faults = [Fault("lost", method="PUT"), *(Fault("503", method=each, times=100) for each in ("GET", "HEAD"))]
    with pytest.raises(OSError):
        log.append(b"2\n")
    proxy.faults = []
    log.append(b"2\n")  # as a writer does that was told that nothing was added
    log.append(b"3\n")
    assert shaky.open_log("log").read() == b"1\n2\n3\n"


def test_secrets_are_in_no_message(near, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OSError) as error:
        buckets.storage_of(tmp_path / "place", IMPATIENT).read("file")
    chain = [error.value, error.value.__cause__, error.value.__context__ and str(error.value.__suppress_context__)]
    assert buckets.SECRET not in str(chain) and "127.0.0.1" not in str(chain)


def test_a_bucket_that_is_not_there_is_named(near, tmp_path):
    absent = BucketStorage(address("s3://no-such-bucket/runs"), tmp_path, IMPATIENT)
    for act in (absent.entries, absent.exists, lambda: absent.write("file", b"")):
        with pytest.raises(FileNotFoundError, match="s3://no-such-bucket"):
            act()


def test_a_large_file_goes_up_and_down_in_parts(shaky, proxy):
    data = os.urandom(2 * PIECE + 12345)
    draft = shaky.draft("step-1")
    shaky.local(f"{draft}/big").write_bytes(data)
    shaky.up(f"{draft}/big")
    assert len({line for line in proxy.requests if "partNumber=" in line and "PUT" in line}) == 3
    assert not shaky.local(f"{draft}/big").exists()  # it has made room
    shaky.fill(f"{draft}/{SEAL}", "{}")
    shaky.publish(draft, "step-1", SEAL)
    assert shaky.published(SEAL) == ["step-1"] and shaky.entry("step-1/big").size == len(data)
    with shaky.open("step-1/big") as file:
        assert file.read(10) == data[:10] and file.seek(PIECE - 5) and file.read(10) == data[PIECE - 5 : PIECE + 5]
        assert file.seek(-7, os.SEEK_END) and file.read() == data[-7:]
    proxy.faults = [Fault("truncated", method="GET", times=1)]
    assert (shaky.down("step-1") / "big").read_bytes() == data
    before = len(proxy.requests)
    shaky.down("step-1")
    assert [line for line in proxy.requests[before:] if "list-type" not in line and "HEAD" not in line] == []


def test_a_file_is_fetched_again_once_it_has_changed(files):
    files.write("folder/one", "1")
    files.write("folder/two", "2")
    local = files.down("folder")
    files.write("folder/one", "3")
    files.delete("folder/two")
    assert files.down("folder") == local and (local / "one").read_text() == "3" and not (local / "two").exists()


def test_who_reads_a_file_that_is_written_anew_is_told(files):
    files.write("file", bytes(2_000_000))
    with files.open("file") as file:
        file.read(10)
        files.write("file", bytes([1]) * 2_000_000)
        with pytest.raises(OSError, match="written anew"):
            file.read()


def test_a_listing_of_many_objects_is_whole(files):
    names = [f"many/{number // 100}/{number:04d}" for number in range(1050)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: files.write(name, name), names))
    assert sorted(entry.name for entry in files.files("many")) == sorted(names)
    assert len([each for each in files.walk() if each.kind is Kind.FOLDER]) == 12
    assert len(files.entries("many")) == 11 and files.entry("many/3/0333").tag
    files.delete("many")
    assert list(files.walk()) == []


ODD = ["a b", 'it\'s "quoted"', "50%", "%2F%20", "größe-文", "#?&=+*[]{}|^~`", "back\\slash", "a.tmp", ".hidden", "s3:"]


@pytest.mark.parametrize("name", ODD)
def test_names_are_kept_as_they_are(files, name):
    files.write(f"{name}/{name}", name)
    files.publish(_drafted(files, name), f"{name} 2", SEAL)
    assert files.read_text(f"{name}/{name}") == name and files.entry(f"{name}/{name}").name == f"{name}/{name}"
    assert {entry.name for entry in files.files()} == {f"{name}/{name}", f"{name} 2/{name}", f"{name} 2/{SEAL}"}
    assert (files.down(name) / name).read_text() == name
    files.delete(name)
    files.retract(f"{name} 2", SEAL)
    assert list(files.walk()) == []


def _drafted(files: BucketStorage, inner: str) -> str:
    draft = files.draft("odd")
    files.fill(f"{draft}/{inner}", "text")
    files.fill(f"{draft}/{SEAL}", "{}")
    return draft


@pytest.mark.parametrize("name", ["a\nb", "\0"])
def test_names_that_no_object_can_have_are_refused(files, name):
    with pytest.raises((OSError, ValueError)):
        files.write(name, "text")


def test_an_object_whose_name_leads_out_is_refused(files, near):
    """Such as a malicious one, or one that a program has made by mistake."""
    files.write("folder/file", "text")
    connection = http.client.HTTPConnection(near.removeprefix("http://"))
    path = f"/{buckets.BUCKET}/{files.address.key}/folder/../../../outside"
    connection.request("PUT", path, b"outside", {"Authorization": buckets.SIGNED})
    assert connection.getresponse().status == 200
    for act in (files.down, lambda: list(files.walk()), lambda: list(files.walk("folder"))):
        with pytest.raises(OSError, match=re.escape(str(files.address))):
            act()
    assert not list(files._local.rglob("outside")) and files.read_text("folder/file") == "text"


def test_what_is_too_large_for_the_store_to_copy_goes_through_this_process(shaky, proxy, monkeypatch):
    monkeypatch.setattr(objects, "_LARGEST_COPY", objects._SMALL)
    draft, data = _drafted(shaky, "one"), os.urandom(PIECE + 1000)
    shaky.local(f"{draft}/big").write_bytes(data)
    shaky.up(f"{draft}/big")
    for method, holding in (("GET", "/big"), ("PUT", "partNumber=2")):
        proxy.faults = [Fault("503", method=method, holding=holding, times=100)]
        with pytest.raises(OSError, match="s3://"):
            shaky.publish(draft, "step-1", SEAL)
        proxy.faults = []
        assert not shaky.exists("step-1")
    shaky.publish(draft, "step-1", SEAL)
    assert shaky.read("step-1/big") == data and shaky.published(SEAL) == ["step-1"]


def test_a_draft_whose_writer_was_killed_between_parts_is_not_believed(shaky, proxy, near, monkeypatch):
    hold = Fault("held", method="PUT", holding="partNumber=2", times=100)
    proxy.faults = [hold]

    def write() -> None:
        draft = shaky.draft("step-1")
        shaky.fill(f"{draft}/{SEAL}", "{}")
        shaky.up(f"{draft}/{SEAL}")
        shaky.local(f"{draft}/big").write_bytes(bytes(3 * PIECE))
        shaky.up(f"{draft}/big")

    writer = apart.start(apart.SPAWN, write)
    assert hold.met.wait(60)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(30)
    proxy.faults = []
    assert shaky.published(SEAL) == [] and not shaky.exists("step-1")
    [draft] = shaky.drafts("step-1")
    elsewhere = BucketStorage(shaky.address, shaky.local().parent / "other machine", IMPATIENT)
    assert elsewhere.drafts("step-1") == [draft] and not elsewhere.exists(f"{draft}/big")
    shaky.delete(draft)
    assert shaky.drafts("step-1") == elsewhere.drafts("step-1") == [] and shaky.entries() == []


def test_a_publisher_that_fails_leaves_no_folder(shaky, proxy):
    draft = _drafted(shaky, "state/rank")
    shaky.up(f"{draft}/state/rank")
    shaky.up(f"{draft}/{SEAL}")
    proxy.faults = [Fault("503", method="PUT", holding=f"step-1/{SEAL}", times=100)]
    with pytest.raises(OSError):
        shaky.publish(draft, "step-1", SEAL)
    proxy.faults = []
    assert not shaky.exists("step-1") and shaky.drafts("odd") == [draft]
    shaky.publish(draft, "step-1", SEAL)
    assert shaky.published(SEAL) == ["step-1"]


def test_the_seal_comes_last_and_goes_first(shaky, proxy):
    draft = _drafted(shaky, "state/rank")
    shaky.publish(draft, "step-1", SEAL)
    written = [line for line in proxy.requests if line.startswith("PUT") and "/step-1/" in line]
    assert written[-1].endswith(f"/step-1/{SEAL}") and len(written) == 2
    deleted = [line for line in proxy.requests if line.startswith(("DELETE", "POST"))]
    proxy.faults = [Fault("503", holding="list-type", times=100)]
    shaky.retract("step-1", SEAL)  # which is stopped in its middle
    proxy.faults = []
    assert shaky.published(SEAL) == [] and shaky.exists("step-1/state/rank") and deleted != []
    shaky.retract("step-1", SEAL)
    assert not shaky.exists("step-1")


def test_a_folder_is_not_published_over_another(files):
    for _ in range(2):
        draft = _drafted(files, "one")
        if files.exists("step-1"):
            with pytest.raises(FileExistsError):
                files.publish(draft, "step-1", SEAL)
        else:
            files.publish(draft, "step-1", SEAL)
    assert files.published(SEAL) == ["step-1"] and files.drafts("odd") == [draft]


def test_of_many_that_publish_one_name_one_succeeds_with_files_of_its_own(files):
    barrier, answers = apart.SPAWN.Barrier(4), apart.SPAWN.Queue()

    def publish(number: int, barrier, answers) -> None:
        draft = files.draft("step-1")
        for inner in ("a", "b", "c", SEAL):
            files.fill(f"{draft}/{inner}", str(number))
            files.up(f"{draft}/{inner}")
        barrier.wait(60)
        try:
            files.publish(draft, "step-1", SEAL)
            answers.put(number)
        except FileExistsError:
            answers.put(None)

    running = [apart.start(apart.SPAWN, publish, number, barrier, answers) for number in range(4)]
    won = [each for each in (answers.get(timeout=60) for _ in running) if each is not None]
    for process in running:
        process.join(30)
    # All may meet, each with one file in place, and all give up. Never do two succeed, or files of two get mixed.
    assert len(won) <= 1 and files.published(SEAL) == ["step-1"] * len(won)
    for winner in won:
        assert {files.read_text(f"step-1/{inner}") for inner in ("a", "b", "c", SEAL)} == {str(winner)}


def test_a_store_that_keeps_conditions_is_told_from_one_that_lies(shaky, proxy):
    shaky.probe()
    assert shaky.entries() == []
    proxy.lies = True
    with pytest.raises(UserError, match="ignores the condition"):
        shaky.probe()
    assert shaky.entries() == []


def test_a_lease_is_lost_to_whoever_writes_it_first(files, tmp_path):
    holder, newcomer = files.lease("lock"), BucketStorage(files.address, tmp_path / "other machine").lease("lock")
    assert holder.take() is True
    holder.write("holder")
    assert newcomer.take() is None  # from another machine nobody can tell
    mark = newcomer.mark()
    holder.renew()
    with pytest.raises(OSError, match="another process"):
        newcomer.write("newcomer")  # over what it saw before
    assert newcomer.mark() != mark
    newcomer.write("newcomer")
    for act in (holder.renew, holder.clear):
        with pytest.raises(OSError, match="another process"):
            act()
    assert files.lease("lock").mark().text == "newcomer"
    holder.close()
    newcomer.close()


def test_a_lease_is_not_taken_where_a_folder_is(files):
    files.write("lock/file", "text")
    with pytest.raises(FileExistsError):
        files.lease("lock").take()


def test_a_log_has_few_parts_and_is_one_file_once_it_is_closed(files):
    log, lines = files.log("folder/log", b""), [b"%06d\n" % number * 5000 for number in range(20)]
    for line in lines:
        log.append(line)
    parts = files._objects.below(files._key(f"folder/log{PARTS}"))
    assert 2 < len(list(parts)) < 6
    assert [entry.name for entry in files.walk()] == ["folder", "folder/log"] and files.is_file("folder/log")
    assert files.open_log("folder/log", 600_000).read() == b"".join(lines)[600_000:]
    log.close()
    log.close()
    assert files.read("folder/log") == b"".join(lines) and len(list(files._objects.below(files._key("folder")))) == 1
    with pytest.raises(FileNotFoundError):
        log.append(b"line\n")


def test_a_log_that_another_process_begins_anew_is_lost(files):
    ours, theirs = files.log("log", b"ours\n"), files.log("log", b"theirs\n")
    for _ in range(2):
        with pytest.raises(OSError, match="taken the file away"):
            ours.append(b"line\n")
    ours.close()
    theirs.append(b"more\n")
    assert files.open_log("log").read() == b"theirs\nmore\n"


def test_a_draft_counts_with_what_is_staged_and_what_is_up(files):
    draft = files.draft("step-1")
    files.fill(f"{draft}/staged", "1")
    files.fill(f"{draft}/up", "2")
    files.up(f"{draft}/up")
    inside = BucketStorage(address(files.place / draft), files._local)  # as a rank has it that was told the name
    assert [entry.name for entry in inside.files()] == ["staged", "up"] and inside.read_text("staged") == "1"
    assert inside.is_file("staged") and [entry.name for entry in inside.entries()] == ["staged", "up"]
    with pytest.raises(FileNotFoundError):
        files.up(f"{draft}/absent")


def test_a_file_with_the_name_of_a_folder(files):
    """A bucket can have both, and no disk can."""
    files.write("name", "text")
    files.write("name/inner", "text")
    assert files.is_file("name") and files.read_text("name/inner") == "text"
    assert [(each.name, each.kind) for each in files.entries()] == [("name", Kind.FILE)]
    with pytest.raises(NotADirectoryError):
        files.write("file", "text")
        files.entries("file")
    with pytest.raises(FileNotFoundError):
        files.entries("absent")


def test_a_process_that_was_forked_too_late_is_told(files):
    files.exists("file")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # without the check it would wait forever
        try:
            files.exists("file")
        except OSError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    said = os.read(reading, 1000)
    os.close(reading)
    assert b"forked" in said


def test_a_storage_can_be_sent_to_another_process(files):
    files.write("file", "text")
    assert pickle.loads(pickle.dumps(files)).read_text("file") == "text"


# Without a store


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        *(("s3://bucket/runs/x", "s3://bucket/runs/x"), (Path("s3://bucket/runs/x"), "s3://bucket/runs/x")),
        *((Path("gs://bucket") / "x", "gs://bucket/x"), ("az://box/a/./b//c/", "az://box/a/b/c")),
        *(("s3://bucket", "s3://bucket"), (Path("https://host:8080/a%20b/c").parent, "https://host:8080/a b")),
    ],
)
def test_a_url_is_known_with_one_slash_or_two(place, shown):
    files = storage.at(place)
    assert isinstance(files, BucketStorage) and str(files.address) == shown
    assert str(storage.at(files.place).address) == shown


@pytest.mark.parametrize("place", ["/s3:/bucket", "runs/s3:/x", "s3", "s4://bucket/x", "runs/x", "./x"])
def test_other_places_are_local(place):
    assert isinstance(storage.at(place), LocalStorage) and isinstance(storage.at(Path(place)), LocalStorage)


@pytest.mark.parametrize(
    "place",
    [
        *("s3://", "s3:///x", "s3://bucket/../x", "https://host/%2e%2e/x"),
        *("https://me:secret@host/x", "https://host/x?sig=secret"),
    ],
)
def test_a_url_that_names_no_folder_is_refused(place):
    with pytest.raises(UserError) as error:
        storage.at(place)
    assert "secret" not in str(error.value)


def test_what_is_missing_is_named(tmp_path):
    """In a process of its own, which cannot import obstore."""
    program = f"""
import sys
sys.modules["obstore"] = None
from app import storage
from app.errors import UserError
assert not [name for name in sys.modules if name.startswith("obstore.")]
storage.at({str(tmp_path)!r}).write("file", "text")
try:
    storage.at("s3://bucket/x").exists("file")
except UserError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "pip install 'samestep[buckets]'" in said.stdout and said.stdout.count("\n") == 1, said.stderr


def test_a_web_server_is_read(tmp_path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "file").write_text("0123456789")

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args):
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    proxy = Proxy(f"http://127.0.0.1:{server.server_port}")
    try:
        files = BucketStorage(address(f"{proxy.endpoint}/a%20b"), tmp_path / "local", IMPATIENT)
        proxy.faults = [Fault("truncated", method="GET", times=2)]
        assert files.read_text("file") == "0123456789" and files.entry("file").size == 10
        assert files.down("file").read_text() == "0123456789"
        assert not files.exists("absent")
        with pytest.raises(FileNotFoundError):
            files.read("absent")
        for act in (files.entries, lambda: list(files.walk())):
            with pytest.raises(OSError, match="does not list"):
                act()
        writing = (files.delete, files.make, files.draft, lambda name: files.write(name, ""))
        for act in (*writing, lambda name: files.lease(name).take()):
            with pytest.raises(OSError, match=r"only read|does not list"):
                act("file")
    finally:
        proxy.close()
        server.shutdown()
        server.server_close()


def test_the_tag_of_a_local_file_changes_with_it(tmp_path):
    files = LocalStorage(tmp_path)
    files.write("file", "one")
    first = files.entry("file").tag
    assert first and files.entry("file").tag == first
    time.sleep(0.02)
    files.write("file", "two")
    assert files.entry("file").tag != first


def test_a_changed_object_has_another_tag(files):
    files.write("file", "one")
    first = files.entry("file").tag
    files.write("file", "two")
    assert first and files.entry("file").tag != first
    with pytest.raises(Changed):
        files.replace_if_unchanged("file", b"three", first)
