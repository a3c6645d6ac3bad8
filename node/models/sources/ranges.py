"""Files on a hub by ranges, several at once, each going on after a cut. Answers are held against what was asked."""

from __future__ import annotations

import base64
import math
import os
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, TypeVar

from ...errors import ModelError
from ..progress import Progress

T = TypeVar("T")

PIECE_BYTES: Final = 16 << 20
_READ: Final = 1 << 18
_MOVED: Final = (401, 403, 410)
"""What a signed address that is too old answers."""


@dataclass(frozen=True)
class DownloadPolicy:
    """How many connections there are to a hub, and how long they are waited for."""

    at_once: int = 8
    timeout: float = 30.0  # seconds for a connection, and for silence on it
    attempts: int = 4  # in a row that bring nothing
    piece: float = 1800.0  # seconds for a piece, tries included: 9 KB a second. Each read has its own deadline beside


DOWNLOADS: Final = DownloadPolicy()


class NoRanges(ModelError):
    """The server sends whole files only."""


@dataclass
class RangedFile:
    """A file of a hub. May be read by several threads.

    Args:
        name: for messages.
        nbytes: what the hub says that it has.
        locate: asks the hub for where it is now, and the headers to ask there with.
    """

    name: str
    nbytes: int
    locate: Callable[[], tuple[str, Mapping[str, str]]]
    _place: tuple[str, Mapping[str, str]] | None = field(default=None, init=False)
    _etag: str | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def read(self, start: int, end: int, stop: threading.Event | None = None) -> bytes:
        """The bytes `start` .. `end` - 1. Raises as `stream`."""
        found = bytearray()
        for data in self.stream(start, end, stop):
            found += data
        return bytes(found)

    def download(self, target: Path, progress: Progress) -> None:
        """Brings `target` to the whole file; what it holds already is taken as its beginning. Raises as `stream`."""
        with target.open("ab") as stream:
            done = stream.tell() if stream.tell() <= self.nbytes else stream.truncate(0)
            progress(f"Downloading {self.name}", done, self.nbytes)
            for data in self.stream(done, self.nbytes, seconds=math.inf):
                stream.write(data)
                done += len(data)
                progress(f"Downloading {self.name}", done, self.nbytes)

    def stream(
        self, start: int, end: int, stop: threading.Event | None = None, *, seconds: float = DOWNLOADS.piece
    ) -> Iterator[bytes]:
        """These bytes, a few at a time and in order, within `seconds`; ends early when `stop` is set.

        Raises:
            NoRanges: the server does not send parts of files.
            ModelError: the file is another one than the hub says, or has changed meanwhile.
            OSError, HTTPException: it cannot be had, time after time.
        """
        if not 0 <= start <= end <= self.nbytes:
            raise ModelError(f"{self.name} on the hub has {self.nbytes:,} bytes, and was asked for those up to {end:,}")
        deadline, failures, place = time.monotonic() + seconds, 0, start
        stop = stop or threading.Event()
        while place < end and not stop.is_set():
            before = place
            try:
                for data in self._pull(place, end, stop, deadline):
                    place += len(data)
                    yield data
                problem: OSError | HTTPException = ConnectionError(f"the connection broke in {self.name}")
            except (OSError, HTTPException) as error:
                self._check(error)
                problem = error
            failures = 0 if place > before else failures + 1
            if failures >= DOWNLOADS.attempts or time.monotonic() > deadline:
                raise problem
            stop.wait(2.0 ** (failures - 1) if failures else 0)

    def _pull(self, place: int, end: int, stop: threading.Event, deadline: float) -> Iterator[bytes]:
        """What one connection brings."""
        with self._open(place, end) as response:
            while data := response.read1(min(_READ, end - place)):
                yield data
                place += len(data)
                if stop.is_set():
                    return
                if time.monotonic() > deadline:
                    raise ModelError(f"{self.name} comes too slowly: {DOWNLOADS.piece:.0f} s were not enough")

    def _open(self, start: int, end: int) -> Any:
        with self._lock:
            if self._place is None:
                self._place = self.locate()
            url, headers = self._place
        response = open_url(url, {**headers, "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"})
        try:
            if response.status != 206:
                raise NoRanges(f"the server of {self.name} sends whole files only")
            said = response.headers.get("Content-Range", "")
            if said.strip() != f"bytes {start}-{end - 1}/{self.nbytes}":
                raise ModelError(
                    f"{self.name}: bytes {start}-{end - 1} of {self.nbytes} were asked for, and the server sends "
                    f"{said[:80]!r}. Try again later"
                )
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise NoRanges(f"the server of {self.name} sends it in another encoding")
            self._note(response.headers.get("ETag"))
        except BaseException:
            response.close()
            raise
        return response

    def _note(self, etag: str | None) -> None:
        with self._lock:
            if etag is not None and self._etag not in (None, etag):
                raise ModelError(f"{self.name} changed on the server while it was downloaded. Run it again")
            self._etag = etag or self._etag

    def _check(self, error: Exception) -> None:
        """Raises ModelError if there is no use in asking again."""
        if not isinstance(error, urllib.error.HTTPError):
            return
        if error.code == 416:
            raise ModelError(f"{self.name} is shorter on the server than the hub says. Run it again") from error
        if error.code in _MOVED:
            with self._lock:
                self._place = None
        elif error.code < 500 and error.code != 429:
            raise error


def open_url(url: str, headers: Mapping[str, str]) -> Any:
    """An open response for `url`, with a deadline on every read. Proxies come from the environment, as do
    certificates (PIP_CERT, REQUESTS_CA_BUNDLE, SSL_CERT_FILE) and a login from the URL itself.

    Raises:
        OSError: if it cannot be had (urllib's URLError and HTTPError are OSErrors).
    """
    sent = dict(headers)
    parts = urllib.parse.urlsplit(url)
    if parts.username:
        login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        sent["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    bundle = os.environ.get("PIP_CERT") or os.environ.get("REQUESTS_CA_BUNDLE")
    context = ssl.create_default_context(cafile=bundle) if parts.scheme == "https" else None
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()
    request = urllib.request.Request(address)
    for name, value in sent.items():
        request.add_unredirected_header(name, value)  # a login is for this host, not for where it points to
    return urllib.request.urlopen(request, timeout=DOWNLOADS.timeout, context=context)


def in_threads(work: Callable[[T, threading.Event], None], items: Sequence[T]) -> None:
    """Calls `work` with each item, several at once, until all are done or one fails, which it raises.

    `work` looks at the event that it gets, which says to stop. The threads do not keep a process that ends.
    """
    waiting, stop, lock = list(reversed(items)), threading.Event(), threading.Lock()
    failed: list[BaseException] = []

    def run() -> None:
        while not stop.is_set():
            with lock:
                if not waiting:
                    return
                item = waiting.pop()
            try:
                work(item, stop)
            except BaseException as error:
                failed.append(error)
                stop.set()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(DOWNLOADS.at_once, len(items)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
    if failed:
        raise failed[0]
