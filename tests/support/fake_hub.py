"""A stand-in for the Hub's endpoint: what huggingface_hub asks for when it makes a repository and uploads a folder."""

import base64
import hashlib
import json
import re
import threading
import urllib.parse
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
        self.datasets: dict[str, dict[str, bytes]] = {}
        """Data sets by name, each with its files; a name may end in @ and a revision other than main."""
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}
        """By a data set's name and a commit that was told to somebody: the files as they were then."""
        self.gated: set[str] = set()
        self.failing: list[int] = []
        """Statuses of the next answers about data sets, in place of what is asked for."""
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

    def _refuse(self, status: int, code: str = ""):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _about_dataset(self, path: str, query: str, form: str) -> None:
        """Answer what is asked of a data set: whether it is there, its tree, some of its paths, or a file."""
        found = re.fullmatch(
            r"(?:/api)?/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info|resolve)/([^/]+)/?(.*))?", path
        )
        name, what, revision, inner = found.groups()
        files = self.hub.datasets.get(name if revision in (None, "main") else f"{name}@{revision}")
        files = files or self.hub.commits.get((name, revision))
        if self.hub.failing:
            return self._refuse(self.hub.failing.pop(0))
        if files is None:
            known = name in self.hub.datasets
            return self._refuse(404, "RevisionNotFound" if known else "RepoNotFound")
        for content in files.values():
            self.hub.commits.setdefault((name, _oid(content)), dict(files))
        if what == "resolve":
            return self._send_file(name, files.get(inner))
        if what == "tree":
            entries = list(_entries(files, f"{inner}/" if inner else "", "recursive=true" in query.lower()))
            return self._answer(entries) if entries else self._refuse(404, "EntryNotFound")
        if what == "paths-info":
            asked = urllib.parse.parse_qs(form)["paths"]
            everything = {each["path"]: each for each in _entries(files, "", True)}
            return self._answer([everything[each] for each in asked if each in everything])
        self._answer({"id": name, "siblings": [], "sha": "1" * 40})

    def _send_file(self, name: str, content: bytes | None) -> None:
        if name in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if content is None:
            return self._refuse(404, "EntryNotFound")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "bytes=0-")
        part = content[int(wanted[1]) : int(wanted[2]) + 1 if wanted[2] else None]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if path.removeprefix("/api").startswith("/datasets/"):
            return self._about_dataset(urllib.parse.unquote(path), query, "")
        self._answer({"id": self.path, "siblings": []})

    def do_POST(self):
        hub, body = self.hub, self._body()
        if self.path.startswith("/api/datasets/"):
            return self._about_dataset(urllib.parse.unquote(self.path), "", body.decode())
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


def _oid(content: bytes) -> str:
    """Name contents; the commit that has brought them has the same name here."""
    return hashlib.sha1(content).hexdigest()


def _entries(files: dict[str, bytes], below: str, recursive: bool) -> Iterator[dict]:
    """Yield what the Hub says of the files and folders below a folder."""
    folders = set()
    for path, content in sorted(files.items()):
        if not path.startswith(below):
            continue
        head, slash, _ = path[len(below) :].partition("/")
        if slash and head not in folders:
            folders.add(head)
            yield {"type": "directory", "oid": "0" * 40, "size": 0, "path": below + head}
        if recursive or not slash:
            oid = _oid(content)
            commit = {"id": oid, "title": "x", "date": "2026-01-01T00:00:00.000Z"}
            yield {"type": "file", "oid": oid, "size": len(content), "path": path, "lastCommit": commit}


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
