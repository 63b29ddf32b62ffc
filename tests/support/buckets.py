"""A bucket for tests: moto as a process of its own, and a proxy in front of it that does what networks do."""

import contextlib
import http.client
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from app.storage.addresses import Address
from app.storage.bucket import BucketStorage
from app.storage.objects import PATIENCE, Patience

BUCKET = "bucket"
SECRET = "not-for-anybodys-eyes"
SIGNED = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
"""What makes a request one of S3 in the eyes of moto, which checks no signature."""
IMPATIENT = Patience(retries=3, seconds=20, silence=1, first_wait=0.02)


def environment(endpoint: str) -> dict[str, str]:
    """Return what a user sets to reach a store."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def storage_of(place: Path, patience: Patience = PATIENCE) -> BucketStorage:
    """Return the storage of a folder in the bucket that is called as a local one is; the environment says where."""
    return BucketStorage(Address("s3", BUCKET, str(place).strip("/")), place.parent / "scratch", patience)


@contextlib.contextmanager
def moto(log: Path) -> Iterator[str]:
    """Run a store with one empty bucket, and yield its endpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        _make_bucket(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _make_bucket(endpoint: str, server: subprocess.Popen, log: Path) -> None:
    request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT", headers={"Authorization": SIGNED})
    end = time.monotonic() + 60
    while True:
        try:
            return urllib.request.urlopen(request, timeout=10).close()
        except OSError:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.1)


@dataclass
class Fault:
    """What happens to the next requests of a kind."""

    does: str
    """403, 503, slow, truncated, flipped (one byte is another), reset, lost (done, and the answer is lost), or held."""
    method: str = ""
    holding: str = ""
    """What is in its path."""
    times: int = 1
    seconds: float = 3.0
    """How slow."""
    met: threading.Event = field(default_factory=threading.Event)


class Proxy:
    """A server in front of a store."""

    def __init__(self, endpoint: str):
        """Hand on to `endpoint`."""
        self.target = endpoint.removeprefix("http://")
        self.faults: list[Fault] = []
        self.lies = False
        """Whether conditions are kept from the store."""
        self.requests: list[str] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            of = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fault(self, method: str, path: str) -> Fault | None:
        """Note a request, and return what should happen to it."""
        with self._lock:
            self.requests.append(f"{method} {path}")
            for fault in self.faults:
                if fault.times and fault.method in ("", method) and fault.holding in path:
                    fault.times -= 1
                    fault.met.set()
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    of: Proxy

    def log_message(self, *args) -> None:
        """Say nothing."""

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.of.fault(self.command, self.path)
        does = fault.does if fault else ""
        if does == "reset":
            return self._reset()
        if fault and does == "slow":
            time.sleep(fault.seconds)
        if does == "held":
            time.sleep(60)
        if does == "403":
            return self._answer(403, [], b"<Error><Code>AccessDenied</Code></Error>")
        if does == "503":
            return self._answer(503, [], b"<Error><Code>SlowDown</Code></Error>")
        status, headers, data = self._forward(body)
        if does == "lost":
            return self._reset()
        if does == "flipped":
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
        self._answer(status, headers, data, len(data) // 2 if does == "truncated" else None)

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        hidden = {"if-match", "if-none-match"} if self.of.lies and self.command in ("PUT", "POST", "GET") else set()
        connection = http.client.HTTPConnection(self.of.target, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in hidden:
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), data

    def _answer(self, status: int, headers: list, data: bytes, sent: int | None = None) -> None:
        self.send_response_only(status)
        length = {name.lower(): value for name, value in headers}.get("content-length", str(len(data)))
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        with contextlib.suppress(OSError):  # nobody may wait for it any more
            self.wfile.write(b"" if self.command == "HEAD" else data[:sent])
        if sent is not None:
            self.close_connection = True

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _any
