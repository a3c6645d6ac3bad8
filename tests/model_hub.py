"""A small model hub on loopback: the few endpoints that fetching a model needs, with gates and broken connections."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """What the hub holds and what it was asked for.

    Attributes:
        folder: the files of the one model, "org/tiny".
        token: if given, the model is gated: only requests with it get files.
        cut: file name -> bytes after which the connection breaks, once.
        gets: (file name, first byte asked for) of every GET of a file.
    """

    folder: Path
    token: str | None = None
    cut: dict[str, int] = field(default_factory=dict)
    gets: list[tuple[str, int]] = field(default_factory=list)
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
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        words = self.path.partition("?")[0].strip("/").split("/")
        api = words[:2] == ["api", "models"]
        if api:
            words = words[2:]
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
        content = json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": files}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _file(self, name: str, *, body: bool) -> None:
        path = self.served.folder / name
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        content = path.read_bytes()
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if body:
            self.served.gets.append((name, start))
        if start and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if body:
            cut = self.served.cut.pop(name, None)
            self.wfile.write(content[start:cut])
            if cut is not None:
                self.wfile.flush()
                self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
