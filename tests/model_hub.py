"""A small model hub on loopback: the few endpoints that fetching a model needs, with gates and broken connections, and
those with which adapters are found and uploaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """What the hub holds and what it was asked for.

    Attributes:
        folder: the files of the one model, "org/tiny".
        token: if given, the model is gated: only requests with it get files.
        cut: file name -> bytes after which the connection breaks, once.
        gets: (file name, first byte asked for) of every GET of a file.
        sent: file name -> bytes of it that were sent.
        elsewhere: whether the hub redirects to addresses that hold for a number of GETs.
        gated: what the hub says of that: False, "auto" or "manual".
        uploaded: repositories that were made here, by their ids, and their files.
    """

    folder: Path
    token: str | None = None
    cut: dict[str, int] = field(default_factory=dict)
    gets: list[tuple[str, int]] = field(default_factory=list)
    uploaded: dict[str, dict[str, bytes]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    elsewhere: int = 0
    no_ranges: bool = False
    moved: Counter[str] = field(default_factory=Counter)
    gated: str | bool = False
    url: str = ""


@contextmanager
def serve_hub(folder: Path) -> Iterator[Hub]:
    """Serves `folder` as "org/tiny", whose "main" and "v1" are one commit, until the block ends."""
    hub = Hub(folder)

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/api/models":
            return self._search()
        if self.path.startswith("/signed/"):
            _, _, number, name = self.path.split("/", 3)
            self.served.moved[number] += 1
            if self.served.moved[number] > self.served.elsewhere or "Authorization" in self.headers:
                return self._refuse(403, "")
            return self._file(name, body=True)
        self._answer(body=True)

    def do_POST(self) -> None:
        given = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {self.served.token}":
            return self._refuse(401, "")
        words = self.path.strip("/").split("/")
        if words == ["api", "validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        if words == ["api", "repos", "create"]:
            asked = json.loads(given)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.served.uploaded:
                return self._json({"error": "You already created this model repo"}, status=409)
            self.served.uploaded[name] = {}
            return self._json({"url": f"{self.served.url}/{name}"})
        name = "/".join(words[2:4])
        if words[4] == "preupload":
            files = json.loads(given)["files"]
            return self._json({"files": [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in files]})
        assert words[4] == "commit"
        for line in map(json.loads, given.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.served.uploaded[name][line["value"]["path"]] = content
        self._json({"success": True, "commitOid": COMMIT, "commitUrl": f"{self.served.url}/{name}/commit/{COMMIT}"})

    def _search(self) -> None:
        wanted = set(parse_qs(self.path.partition("?")[2]).get("filter", []))
        found = []
        for name, files in self.served.uploaded.items():
            tags = _tags(files.get("README.md", b"").decode())
            if wanted <= set(tags):
                found.append({"id": name, "modelId": name, "tags": tags})
        self._json(found)

    def _json(self, answer: object, status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        words = self.path.partition("?")[0].strip("/").split("/")
        api = words[:2] == ["api", "models"]
        if api:
            words = words[2:]
        uploaded = self.served.uploaded.get("/".join(words[:2]))
        if uploaded is not None:
            return self._uploaded("/".join(words[:2]), uploaded, None if api else "/".join(words[4:]), body=body)
        if words[:2] != ["org", "tiny"]:
            return self._refuse(404, "RepoNotFound")
        revision = words[3] if len(words) > 3 else "main"
        if revision not in ("main", "v1", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        if api:
            return self._info()
        if self.served.token and self.headers.get("Authorization") != f"Bearer {self.served.token}":
            return self._refuse(403, "GatedRepo")
        return self._file("/".join(words[4:]), body=body)

    def _info(self) -> None:
        files = [{"rfilename": file.name, "size": file.stat().st_size} for file in sorted(self.served.folder.iterdir())]
        said = {"id": "org/tiny", "sha": COMMIT, "siblings": files, "private": False, "gated": self.served.gated}
        content = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _uploaded(self, name: str, files: dict[str, bytes], file: str | None, *, body: bool) -> None:
        if file is None:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            return self._json({"id": name, "sha": COMMIT, "siblings": siblings})
        if file not in files:
            return self._refuse(404, "EntryNotFound")
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(files[file]).hexdigest()}"')
        self.send_header("Content-Length", str(len(files[file])))
        self.end_headers()
        if body:
            self.wfile.write(files[file])

    def _file(self, name: str, *, body: bool) -> None:
        path = self.served.folder / name
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        content = path.read_bytes()
        if self.served.elsewhere and not self.path.startswith("/signed/"):
            number = len(self.served.moved)
            self.served.moved[str(number)] = 0
            self.send_response(302)
            self.send_header("Location", f"{self.served.url.replace('127.0.0.1', 'localhost')}/signed/{number}/{name}")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if self.served.no_ranges:
            del self.headers["Range"]
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, whole = int(first), content
        content = content[: int(last) + 1] if last else content
        if body:
            self.served.gets.append((name, start))
        if start and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(whole)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if "Range" in self.headers and (start or last) else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(whole).hexdigest()}"')
        self.send_header("Content-Length", str(len(content) - start))
        if start or last:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(whole)}")
        self.end_headers()
        if body:
            cut = self.served.cut.pop(name, None)
            self.wfile.write(content[start:cut])
            self.served.sent[name] += len(content[start:cut])
            if cut is not None:
                self.wfile.flush()
                self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _tags(card: str) -> list[str]:
    """Those of a model card's metadata."""
    lines = [line for line in card.splitlines() if line.startswith("tags: ")]
    return list(json.loads(lines[0].removeprefix("tags: "))) if lines else []
