"""A hub that answers ranges as a test says."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from petalnode.node.models.sources.ranges import RangedFile


class Server:
    """Answers a range as `answer` says, which may be exchanged; counts the requests and the bytes asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.answer, self.requests, self.asked, self.located = data, honest, 0, 0, 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                server.requests += 1
                server.asked += int(last) + 1 - int(first)
                self.close_connection = True
                server.answer(self, int(first), int(last), server.data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.http.request_queue_size = 100
        self.http.server_bind(), self.http.server_activate()
        self.thread = threading.Thread(target=self.http.serve_forever, args=[0.02])
        self.thread.start()

    def file(self, name: str = "model.gguf", nbytes: int | None = None) -> RangedFile:
        url = f"http://127.0.0.1:{self.http.server_port}/{name}"

        def locate() -> tuple[str, dict[str, str]]:
            self.located += 1
            return url, {}

        return RangedFile(name, len(self.data) if nbytes is None else nbytes, locate)

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def send(
    asked: BaseHTTPRequestHandler, body: bytes, status: int = 206, length: int | None = None, **headers: str
) -> None:
    asked.send_response(status)
    for name, value in headers.items():
        asked.send_header(name.replace("_", "-"), value)
    if length != -1:
        asked.send_header("Content-Length", str(len(body) if length is None else length))
    asked.end_headers()
    asked.wfile.write(body)


def place(first: int, last: int, data: bytes) -> str:
    return f"bytes {first}-{last}/{len(data)}"


def honest(asked: BaseHTTPRequestHandler, first: int, last: int, data: bytes) -> None:
    send(asked, data[first : last + 1], Content_Range=place(first, last, data), ETag='"one"')
