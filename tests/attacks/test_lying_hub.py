"""A hub that lies about the bytes of a range, changes the file, cuts, or never ends: an error that says so, and nothing
half written that is later believed."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest

from petalnode.node.errors import ModelError
from petalnode.node.models import EMBEDDINGS, HEAD, Checkpoint, compute_manifest, resolve
from petalnode.node.models.disk_limit import no_disk_limit
from petalnode.node.models.progress import no_progress
from petalnode.node.models.sources import ranges
from petalnode.node.models.sources.hub_parts import HubParts
from petalnode.node.models.sources.ranges import NoRanges
from tests.attacks.lying_hub import Server, honest, place, send
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import save_tiny

Answer = Callable[[BaseHTTPRequestHandler, int, int, bytes], None]


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], Server]]:
    servers: list[Server] = []

    def start(data: bytes) -> Server:
        servers.append(Server(data))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ranges, "DOWNLOADS", replace(ranges.DOWNLOADS, attempts=1))


def endless(asked: BaseHTTPRequestHandler, first: int, last: int, data: bytes) -> None:
    body = data[first : last + 1] + b"more" * 1000
    send(asked, body, length=-1, Content_Range=place(first, last, data))


LIES: dict[str, tuple[Answer, type[Exception], str]] = {
    "other bytes than were asked for": (
        lambda asked, first, last, data: send(asked, data[:9], Content_Range=place(0, last - first, data)),
        ModelError,
        "were asked for, and the server sends",
    ),
    "another size": (
        lambda asked, first, last, data: send(asked, data[:9], Content_Range=f"bytes {first}-{last}/{1 << 60}"),
        ModelError,
        "were asked for, and the server sends",
    ),
    "no word of what it is": (lambda asked, first, last, data: send(asked, data[:9]), ModelError, "were asked for"),
    "the whole file": (lambda asked, first, last, data: send(asked, data, 200), NoRanges, "whole files only"),
    "compressed bytes": (
        lambda asked, first, last, data: send(
            asked, b"x", Content_Range=place(first, last, data), Content_Encoding="gzip"
        ),
        NoRanges,
        "another encoding",
    ),
    "a file that is shorter": (lambda asked, first, last, data: send(asked, b"", 416), ModelError, "shorter"),
    "a cut": (
        lambda asked, first, last, data: send(asked, b"", length=9, Content_Range=place(first, last, data)),
        OSError,
        "broke",
    ),
    "no file any more": (lambda asked, first, last, data: send(asked, b"", 404), OSError, "404"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_false_answer_is_an_error(lie: str, serve: Callable[[bytes], Server]) -> None:
    server = serve(bytes(range(100)))
    server.answer, kind, said = LIES[lie]
    with pytest.raises(kind, match=said):
        server.file().read(10, 20)
    assert server.requests == 1


def test_endless_body_is_read_no_further_than_asked(serve: Callable[[bytes], Server]) -> None:
    server = serve(bytes(range(100)))
    server.answer = endless
    assert server.file().read(10, 20) == bytes(range(10, 20))
    with pytest.raises(ModelError, match="has 100 bytes"):
        server.file().read(90, 101)


def test_a_file_that_changes_meanwhile_is_noticed(serve: Callable[[bytes], Server]) -> None:
    server = serve(bytes(100))
    file = server.file()
    file.read(0, 10)
    server.answer = lambda asked, first, last, data: send(
        asked, data[first : last + 1], Content_Range=place(first, last, data), ETag='"two"'
    )
    with pytest.raises(ModelError, match="changed on the server"):
        file.read(10, 20)


class Patient(threading.Event):
    """Notes how long it would have been waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout or 0.0)
        return self.is_set()


def refused(status: int) -> Answer:
    return lambda asked, first, last, data: send(asked, b"", status)


def gone(asked: BaseHTTPRequestHandler, first: int, last: int, data: bytes) -> None:
    """Says nothing, and closes."""


def a_few(asked: BaseHTTPRequestHandler, first: int, last: int, data: bytes) -> None:
    send(asked, data[first : first + 3], length=last + 1 - first, Content_Range=place(first, last, data))


@pytest.mark.parametrize(
    ("answer", "requests", "located"),
    [
        *((refused(status), 1, 1) for status in (400, 404, 451)),
        *((refused(status), 4, 1) for status in (429, 500, 503)),
        *((refused(status), 4, 4) for status in (401, 403, 410)),  # an address that is too old: the hub is asked anew
        (gone, 4, 1),
    ],
)
def test_what_may_pass_is_retried_with_growing_pauses(
    answer: Answer, requests: int, located: int, serve: Callable[[bytes], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "DOWNLOADS", replace(ranges.DOWNLOADS, attempts=4))
    server, stop = serve(bytes(range(100))), Patient()
    server.answer = answer
    with pytest.raises((OSError, HTTPException)):
        server.file().read(10, 20, stop)
    assert (server.requests, server.located, stop.waited) == (requests, located, [1.0, 2.0, 4.0][: requests - 1])


def test_who_gets_further_each_time_gets_all(serve: Callable[[bytes], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "DOWNLOADS", replace(ranges.DOWNLOADS, attempts=2))
    server, stop = serve(bytes(range(100))), Patient()
    answers = iter([a_few, gone, *[a_few] * 9, honest])
    server.answer = lambda *asked: next(answers)(*asked)
    file = server.file()
    assert file.read(10, 50, stop) == bytes(range(10, 50))
    assert server.requests == 12 and [seconds for seconds in stop.waited if seconds] == [1.0]
    server.answer = honest
    assert (file.read(0, 100), file.read(7, 7), file.read(100, 100)) == (bytes(range(100)), b"", b"")
    assert (server.requests, server.located) == (13, 1)


def test_full_disk_and_a_stop_end_it(serve: Callable[[bytes], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "DOWNLOADS", replace(ranges.DOWNLOADS, attempts=4))
    server, stop = serve(bytes(1 << 20)), threading.Event()

    def full() -> None:
        for _ in server.file().stream(0, 1 << 20, stop):
            raise OSError(errno.ENOSPC, "no room")

    with pytest.raises(OSError, match="no room"):
        full()
    assert server.requests == 1
    came = 0
    for data in server.file().stream(0, 1 << 20, stop):
        came += len(data)
        stop.set()
    assert 0 < came < 1 << 20 and server.requests == 2
    assert server.file().read(0, 10, stop) == b"" and server.requests == 2


def test_one_that_fails_ends_the_others() -> None:
    done: list[int] = []

    def work(item: int, stop: threading.Event) -> None:
        done.append(item)
        if item == ranges.DOWNLOADS.at_once - 1:
            raise ValueError(item)
        if item >= 0:
            assert stop.wait(60)

    with pytest.raises(ValueError, match=str(ranges.DOWNLOADS.at_once - 1)):
        ranges.in_threads(work, range(100))
    assert sorted(done) == list(range(ranges.DOWNLOADS.at_once))
    done.clear()
    ranges.in_threads(work, range(-100, 0))
    assert sorted(done) == list(range(-100, 0))


def test_a_drip_has_an_end(serve: Callable[[bytes], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "time", SimpleNamespace(monotonic=iter(range(0, 10**9, 10**6)).__next__))
    with pytest.raises(ModelError, match="too slowly"):
        serve(bytes(100)).file().read(0, 50)


def test_cut_download_goes_on_and_distrusts_the_disk(
    serve: Callable[[bytes], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from petalnode.node.models.sources import hub_parts

    monkeypatch.setattr(hub_parts, "PIECE_BYTES", 1000)
    source = write_tiny_gguf(tmp_path / "model.gguf")
    server = serve(source.read_bytes())
    parts = HubParts("org/tiny", "c" * 40, "model.gguf")
    parts.create("org/tiny:Q4_1", {"model": "org/tiny", "commit": "c" * 40}, [server.file()], (), no_progress)
    files = {"model.gguf": server.file()}
    came = [0]

    def cut(asked: BaseHTTPRequestHandler, first: int, last: int, data: bytes) -> None:
        came[0] += 1
        honest(asked, first, last, data) if came[0] <= 8 else send(asked, b"", 404)

    server.answer = cut
    with pytest.raises(OSError, match="404"):
        parts.fetch([1], files, no_progress, no_disk_limit)
    (partial,) = parts.path.glob("*.partial")
    assert not list(parts.path.glob("part-*.gguf"))
    with partial.open("r+b") as stream:  # a power cut leaves other bytes than were written
        stream.seek(parts.path.joinpath("part-00002.gguf.absent").stat().st_size + 10)
        stream.write(b"\xff" * 100)
    with (parts.path / f"{partial.stem}.log").open("a") as log:
        log.write("\n17 abc\n99999999999999999999999 x\n12")
    server.answer, server.asked = honest, 0
    parts.fetch([1], files, no_progress, no_disk_limit)
    whole = Checkpoint(resolve(source).path)
    ours = Checkpoint(parts.path)
    assert 0 < server.asked < whole.nbytes(1)
    for theirs, mine in zip(whole.tensors(1), ours.tensors(1), strict=True):
        assert theirs.key == mine.key
        assert source.read_bytes()[theirs.start : theirs.end] == mine.file.read_bytes()[mine.start : mine.end]
    with pytest.raises(ModelError, match="missing"):
        ours.tensors(0)


def test_safetensors_come_by_parts_too(serve: Callable[[bytes], Server], tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "tiny")
    server = serve((source / "model.safetensors").read_bytes())
    files = {"model.safetensors": server.file("model.safetensors")}
    parts = HubParts("org/tiny", "c" * 40, "safetensors")
    about = {"model": "org/tiny", "commit": "c" * 40}
    parts.create("org/tiny", about, list(files.values()), [source / "config.json"], no_progress)
    assert server.asked < 10_000
    parts.fetch([2, EMBEDDINGS], files, no_progress, no_disk_limit)
    assert sorted(path.name for path in parts.path.glob("part-*.safetensors")) == [
        "part-00000.safetensors",
        "part-00003.safetensors",
    ]
    parts.fetch([0, 1, 3, 4, 5, HEAD], files, no_progress, no_disk_limit)
    assert compute_manifest(resolve(parts.path)).version == compute_manifest(resolve(source)).version


@pytest.mark.parametrize(("start", "said"), [(b"\xff" * 8, "no safetensors"), (b"\x20" + bytes(40), "damaged header")])
def test_a_lying_header_leaves_no_folder(
    start: bytes, said: str, serve: Callable[[bytes], Server], tmp_path: Path
) -> None:
    source = save_tiny("llama", tmp_path / "tiny")
    server = serve(start + bytes(1000))
    parts = HubParts("org/tiny", "c" * 40, "safetensors")
    with pytest.raises(ModelError, match=said):
        parts.create("x", {}, [server.file("model.safetensors")], [source / "config.json"], no_progress)
    assert not parts.path.exists()
