"""Forked processes ask the one that they were forked from to bring chunks to the disk: they can use no bucket.

A socket in a private folder, which only this user can enter, takes the number of a chunk in a line, and answers with
a line when the chunk is there, or when it cannot be.
"""

import contextlib
import json
import os
import shutil
import socket
import socketserver
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil

from app.data.streams.chunk_reader import BadChunk
from app.errors import UserError

LONGEST = 100  # letters of a socket's path, of which some systems allow 103
SECONDS = 1.0  # between two looks whether who should answer is still there


class ReaderEndedError(RuntimeError):
    """The process that fetches chunks has ended, or fetches no more."""


class Answering:
    """What brings chunks for the processes that are forked from this one."""

    def __init__(self, bring: Callable[[int], None]):
        """Call `bring` in threads, each for one process that asks, until `close`."""
        folder = tempfile.gettempdir()
        folder = tempfile.mkdtemp(prefix="samestep-", dir=folder if len(folder) < LONGEST - 30 else "/tmp")
        self.address = str(Path(folder) / "chunks")
        self._server = _Server(self.address, bring)
        threading.Thread(target=self._server.serve_forever, name="chunks-for-forks", daemon=True).start()
        self._remove = weakref.finalize(self, _remove, folder, os.getpid())

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()
        self._remove()


class Asking:
    """The way of a forked process to the one that it was forked from."""

    def __init__(self, address: str, owner: psutil.Process):
        """Ask at an address, as long as its owner lives. Nothing is asked yet."""
        self._address, self._owner = address, owner
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def bring(self, chunk: int) -> None:
        """Wait until a chunk is on the disk.

        Raises:
            UserError: it cannot be brought, as the owner says.
            ReaderEndedError: the owner has ended.
        """
        with self._lock:
            try:
                answer = json.loads(self._asked(chunk))
            except OSError as error:
                raise self._ended() from error
        if answer is None:
            return
        kind, message = answer
        if kind == "bad":
            raise BadChunk(chunk, message)
        raise UserError(message) if kind == "user" else RuntimeError(message)

    def _asked(self, chunk: int) -> bytes:
        if self._connection is None:
            self._connection = socket.socket(socket.AF_UNIX)
            self._connection.settimeout(SECONDS)
            self._connection.connect(self._address)
        self._connection.sendall(b"%d\n" % chunk)
        answer = b""
        while not answer.endswith(b"\n"):
            # Other forked processes may hold the owner's end of the connection, so its end alone shows nothing.
            with contextlib.suppress(TimeoutError):
                answer += self._connection.recv(1 << 16) or self._broken_off()
                continue
            if not self._owner.is_running() or self._owner.status() == psutil.STATUS_ZOMBIE:
                raise self._ended()
        return answer

    def _broken_off(self) -> bytes:
        raise self._ended()

    def _ended(self) -> ReaderEndedError:
        return ReaderEndedError(
            f"this process reads streamed data, and process {self._owner.pid}, which fetches them for it, has ended"
        )


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, bring: Callable[[int], None]):
        self.bring = bring
        super().__init__(address, _Handler)


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # who asked has ended
            for line in self.rfile:
                self.wfile.write(json.dumps(self._answer(int(line))).encode() + b"\n")

    def _answer(self, chunk: int) -> tuple[str, str] | None:
        try:
            self.server.bring(chunk)
        except BadChunk as error:
            return "bad", str(error)
        except UserError as error:
            return "user", str(error)
        except Exception as error:
            return "fault", f"{type(error).__name__} in the process that fetches chunks: {error}"
        return None


def _remove(folder: str, owner: int) -> None:
    """Delete the folder of a socket, unless this is a process that was forked from its owner."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
