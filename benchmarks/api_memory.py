"""What `petalnode api` still holds after thousands of requests.

    python benchmarks/api_memory.py --requests 10000 [--readers 8] [--trace] [--json]

A server of a tiny model and one `petalnode api`, which is sent short requests of all kinds: chats, completions,
responses, messages, embeddings, forms, with and without a stream, some abandoned in the middle, some that are no valid
requests. After 1,000, half and all of them, when nothing is being answered, it collects garbage and tells its resident
memory, open files, tasks, sessions and Python objects, and of which types there have come to be more since the first of
these moments. `--trace` names the lines of code whose memory has grown most since (tracemalloc), and makes all slower.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import itertools
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from api_chaos import started, swarm

QUIET_SECONDS = 60.0
WHOLE = "0:6"
SHOWN = 25

# --- inside the process of `petalnode api`


def look_at(file: Path, snapshots: list[tracemalloc.Snapshot], types: list[Counter[str]]) -> None:
    """Writes what this process holds; called in its main thread, where trio runs."""
    import psutil
    import trio

    gc.collect()
    process, objects = psutil.Process(), gc.get_objects()
    types.append(Counter(f"{type(found).__module__}.{type(found).__qualname__}" for found in objects))
    told: dict[str, Any] = {
        "rss": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "objects": len(objects),
        "more": dict((types[-1] - types[0]).most_common(SHOWN)),
    }
    del objects
    if tracemalloc.is_tracing():
        snapshots.append(tracemalloc.take_snapshot())
        grown = snapshots[-1].compare_to(snapshots[0], "traceback")
        told["traced"] = tracemalloc.get_traced_memory()[0]
        told["grown"] = [
            f"{stat.size_diff / 1024:.0f} KiB in {stat.count_diff}: " + " < ".join(stat.traceback.format()[::-2])
            for stat in grown[:SHOWN]
        ]
    whole = file.with_suffix(".new")
    whole.write_text(json.dumps(told))
    whole.replace(file)


def be_api(file: Path, trace: bool, arguments: list[str]) -> None:
    """`petalnode api ARGUMENTS`, which writes into `file` what it holds when SIGUSR2 comes."""
    from petalnode.__main__ import main

    snapshots: list[tracemalloc.Snapshot] = []
    types: list[Counter[str]] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: look_at(file, snapshots, types))
    if trace:
        tracemalloc.start(4)
    sys.argv = ["petalnode", "api", *arguments]
    main()


class Api:
    """The process, and its port."""

    def __init__(self, home: Path, trace: bool, *arguments: str) -> None:
        from tests.swarm.processes import environment

        home.mkdir()
        self._file = home / "held.json"
        command = [sys.executable, __file__, "--be-api", str(self._file), *(["--trace"] if trace else []), "--"]
        command += [*arguments, "--http-port", "0", "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(home))
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]
        self.port = int(self.url.rpartition(":")[2])

    def held(self) -> dict[str, Any]:
        """What it holds, once no session is open."""
        deadline = time.monotonic() + QUIET_SECONDS
        while (sessions := self._sessions()) and time.monotonic() < deadline:
            time.sleep(0.5)
        self._file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR2)
        while not self._file.exists():
            assert self.process.poll() is None, "petalnode api has ended"
            time.sleep(0.1)
        return {"sessions": sessions, **json.loads(self._file.read_text())}

    def _sessions(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return int(float(next(line for line in lines if line.startswith("petalnode_client_sessions ")).split()[1]))

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


# --- requests


class Reader:
    """One client, which keeps its connection where it can."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self.statuses: Counter[str] = Counter()

    def one(self, kind: Callable[[Reader], None]) -> None:
        try:
            kind(self)
        except (http.client.HTTPException, OSError):
            self.statuses["broken"] += 1
            self._connection.close()
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port)

    def words(self) -> str:
        return "".join(self._random.choice("abcdefgh ") for _ in range(self._random.randint(3, 40)))

    def post(self, path: str, body: dict[str, Any] | bytes) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps({"model": "tiny-llama", **body}).encode()
        self._connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        self.statuses[f"{path} {response.status}"] += 1
        return response.read()

    def abandon(self, path: str, body: dict[str, Any]) -> None:
        """Goes when the answer has begun."""
        data = json.dumps({"model": "tiny-llama", **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.sendall(head.encode() + data)
            connection.recv(1)
        self.statuses[f"{path} abandoned"] += 1


def _chat(reader: Reader, **fields: Any) -> None:
    messages = [{"role": "user", "content": reader.words()}]
    reader.post("/v1/chat/completions", {"messages": messages, "max_tokens": 3, **fields})


def _completion(reader: Reader, **fields: Any) -> None:
    reader.post("/v1/completions", {"prompt": reader.words(), "max_tokens": 3, **fields})


def _response(reader: Reader) -> None:
    made = json.loads(reader.post("/v1/responses", {"input": reader.words(), "max_output_tokens": 3}))
    reader.post("/v1/responses", {"input": "more", "max_output_tokens": 4, "previous_response_id": made["id"]})


def _message(reader: Reader) -> None:
    messages = [{"role": "user", "content": reader.words()}]
    reader.post("/v1/messages", {"messages": messages, "max_tokens": 3, "stream": True})


def _schema(reader: Reader) -> None:
    schema = {"type": "object", "properties": {reader.words(): {"type": "integer"}}}  # another one each time
    form = {"type": "json_schema", "json_schema": {"name": "some", "schema": schema}}
    _chat(reader, response_format=form)


KINDS: list[Callable[[Reader], None]] = [
    _chat,
    lambda reader: _chat(reader, stream=True, temperature=0, logprobs=True, top_logprobs=2),
    _completion,
    lambda reader: _completion(reader, stream=True, n=2, stop=["a"]),
    lambda reader: _completion(reader, echo=True, logprobs=1, max_tokens=0),
    lambda reader: reader.post("/v1/embeddings", {"input": [reader.words()]}) and None,
    _response,
    _message,
    lambda reader: reader.post("/api/generate", {"prompt": reader.words(), "options": {"num_predict": 3}}) and None,
    _schema,
    lambda reader: reader.abandon("/v1/completions", {"prompt": reader.words(), "max_tokens": 60, "stream": True}),
    lambda reader: reader.abandon("/v1/completions", {"prompt": reader.words(), "max_tokens": 60}),
    lambda reader: reader.post("/v1/completions", b'{"prompt": ') and None,
    lambda reader: reader.post("/v1/completions", {"prompt": "a", "temperature": -1}) and None,
    lambda reader: reader.post("/v1/nothing", {}) and None,
]


def send(port: int, count: int, readers: int, seed: int) -> Counter[str]:
    """So many requests, by some readers at once."""
    numbers = itertools.count()
    found: Counter[str] = Counter()

    def read(reader: Reader) -> None:
        while (number := next(numbers)) < count:
            reader.one(KINDS[number % len(KINDS)])
        found.update(reader.statuses)

    threads = [threading.Thread(target=read, args=(Reader(port, seed + index),)) for index in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@contextmanager
def measured_api(trace: bool, keep: int) -> Iterator[Api]:
    with tempfile.TemporaryDirectory() as folder, swarm(Path(folder)) as (pool, model):
        started(pool, WHOLE)
        options = ["--peer", pool.peer, "--keep-sessions", str(keep)]
        api = Api(Path(folder) / "api", trace, str(model), *options)
        try:
            yield api
        finally:
            api.end()


def run(options: argparse.Namespace) -> dict[str, Any]:
    looks: list[dict[str, Any]] = []
    statuses: Counter[str] = Counter()
    with measured_api(options.trace, options.keep_sessions) as api:
        sent, begun = 0, time.perf_counter()
        for until in (options.requests // 10, options.requests // 2, options.requests):
            statuses += send(api.port, until - sent, options.readers, seed=sent)
            sent = until
            looks.append({"requests": sent, "seconds": round(time.perf_counter() - begun, 1), **api.held()})
            print(looks[-1], file=sys.stderr)
    return {"looks": looks, "answers": dict(sorted(statuses.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--keep-sessions", type=int, default=0, help="as of `petalnode api`")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--be-api", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if options.be_api is not None:
        be_api(options.be_api, options.trace, options.arguments)
        return
    result = run(options)
    if options.json:
        print(json.dumps(result))
        return
    for look in result["looks"]:
        print(", ".join(f"{name} {value}" for name, value in look.items() if name not in ("grown", "more")))
    print(f"more objects than at first: {result['looks'][-1]['more']}")
    for line in result["looks"][-1].get("grown", ()):
        print(line)
    print(result["answers"])


if __name__ == "__main__":
    main()
