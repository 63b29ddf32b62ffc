"""A web server that gives files, whole or in ranges, and lists none, as most do."""

import contextlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder's files; yield the server's URL, and what it is asked, such as "HEAD /a.parquet"."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.answer(with_body=False)

        def do_GET(self):
            self.answer(with_body=True)

        def answer(self, with_body):
            asked.append(f"{self.command} {self.path}")
            file = folder / unquote(self.path).lstrip("/")
            data = file.read_bytes() if file.is_file() else b""
            part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start, end = (int(part[1]), int(part[2] or len(data) - 1) + 1) if part else (0, len(data))
            self.send_response((206 if part else 200) if file.is_file() else 403)
            if file.is_file():
                self.send_header("Last-Modified", self.date_time_string(int(file.stat().st_mtime)))
                self.send_header("ETag", f'"{hash(data)}"')
            if part:
                self.send_header("Content-Range", f"bytes {start}-{min(end, len(data)) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data[start:end])))
            self.end_headers()
            if with_body:
                self.wfile.write(data[start:end])

        def log_message(self, *args):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
