"""A stand-in for the Hub's endpoint: what huggingface_hub asks for when it makes a repository and uploads a folder."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_let-me-in"


class Hub:
    """Repositories by name, each with its files, and whether it is private."""

    def __init__(self):
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.blobs: dict[str, bytes] = {}
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        pass

    def _answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def do_PUT(self):
        content = self._body()
        assert hashlib.sha256(content).hexdigest() == self.path.rsplit("/", 1)[1]
        self.hub.blobs[self.path.rsplit("/", 1)[1]] = content
        self._answer({})

    def do_GET(self):
        self._answer({"id": self.path, "siblings": []})

    def do_POST(self):
        hub, body = self.hub, self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            hub.files.setdefault(name, {})
            hub.private[name] = bool(asked.get("private") or asked.get("visibility") == "private")
            return self._answer({"url": f"{hub.url}/{name}", "id": name, "name": name})
        if self.path.endswith("/preupload/main"):
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".png")) else "regular",
                }
                for file in json.loads(body)["files"]
            ]
            return self._answer({"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{hub.url}/put/{o['oid']}"}}} for o in json.loads(body)["objects"]
            ]
            return self._answer({"transfer": "basic", "objects": objects})
        if self.path.endswith("/commit/main"):
            name = self.path.removeprefix("/api/models/").removesuffix("/commit/main")
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[name][value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "lfsFile":
                    hub.files[name][value["path"]] = hub.blobs[value["oid"]]
            return self._answer({"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1" * 40, "success": True})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        return self._answer({"error": f"no such thing: {self.path}"}, 404)


@contextmanager
def hub() -> Iterator[Hub]:
    """Serve a stand-in on a free port."""
    made = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": made}))
    made.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
