"""Whether answers of `petalnode api` are the same while clients and servers are killed.

    python benchmarks/api_chaos.py --clients 64 --rounds 2 --tokens 100 [--seed 7] [--json]

Servers of a tiny model, each of two spans on three, `petalnode api`, and client processes that read streams side by
side, half of them greedy and half sampled with a seed. In every round one client in ten is killed when some of its
answer has come, and one server of each span while all others read theirs. Every text has to be the one that the same
request was given alone. Exits with an error if one differs or fails, or if a session or cache is left over.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.swarm.server_pool import PooledServer, ServerPool

SPANS = ("0:3", "3:6")
COPIES = 3
CACHE_TOKENS = 40_000
BEGUN = 5
"""Pieces of an answer after which its client says that it is in the middle of it."""
SETTLED_SECONDS = 60.0
"""For caches to be free again: servers keep a session whose stream was lost for 15 s."""


# --- a client process, which imports nothing but the standard library


def read_answer(port: int, request: dict[str, Any]) -> None:
    """Prints "begun" in the middle of the answer, and in the end {"text", "recoveries"}, or {"error"}."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        print(json.dumps({"error": response.read().decode()}))
        return
    pieces: list[str] = []
    told: dict[str, Any] = {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            print(json.dumps({"error": chunk["error"]["message"]}))
            return
        pieces.append(chunk["choices"][0]["text"])
        told = chunk.get("x_petalnode", told)
        if len(pieces) == BEGUN:
            print("begun", flush=True)
    (choice,) = told["choices"]
    print(json.dumps({"text": "".join(pieces), "recoveries": choice["recoveries"]}))


class Client:
    """A client process; `on_begun` is called in a thread of its own when some of its answer has come."""

    def __init__(self, port: int, request: dict[str, Any], on_begun: Callable[[Client], None]) -> None:
        self.killed = False
        self.answer: dict[str, Any] | None = None
        self._on_begun = on_begun
        command = [sys.executable, "-I", "-S", __file__, "--read-from", str(port), json.dumps(request)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == "begun\n":
                self._on_begun(self)
            else:
                self.answer = json.loads(line)

    def kill(self) -> None:
        self.killed = True
        self.process.kill()

    def wait(self) -> None:
        self.process.wait()
        self._reader.join()


# --- the swarm


@contextmanager
def swarm(folder: Path) -> Iterator[tuple[ServerPool, Path]]:
    """The pool of servers, and the folder of the model."""
    import torch
    from transformers.utils import logging

    from tests.api.tokenizer import EOS, save_api_tokenizer
    from tests.swarm.processes import nodes
    from tests.swarm.server_pool import server_pool
    from tests.tiny_models import save_tiny

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    model = save_tiny("llama", folder / "tiny-llama", max_position_embeddings=1024, eos_token_id=EOS)
    save_api_tokenizer(model)
    with nodes(folder / "home") as starter:
        peer = starter.meeting_point().event("ready")["addrs"][0]
        with server_pool(folder / "servers", model, peer) as pool:
            yield pool, model


@contextmanager
def api(pool: ServerPool, model: Path, home: Path, requests: int) -> Iterator[str]:
    """The URL of `petalnode api`, in a process that keeps no conversations."""
    from tests.swarm.processes import environment

    command = [sys.executable, "-m", "petalnode", "api", str(model), "--peer", pool.peer, "--http-port", "0", "--json"]
    command += ["--keep-sessions", "0", "--max-requests", str(requests)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(home)) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


class Round:
    """Client processes that read side by side, of which some are killed, and the servers that are killed meanwhile.

    Attributes:
        killed: those servers, each with how many sessions it had.
    """

    def __init__(self, port: int, requests: Sequence[dict[str, Any]], servers: Sequence[PooledServer]) -> None:
        self.killed: dict[PooledServer, int] = {}
        self._servers = servers
        self._lock = threading.Lock()
        self._reading = 0
        wanted = len(requests) - len(range(3, len(requests), 10))
        # One server when a third of them reads, the next one when two thirds do.
        self._due = {wanted * (1 + place) // (1 + len(SPANS)): span for place, span in enumerate(SPANS)}
        self._unlucky = range(3, len(requests), 10)
        begun = time.perf_counter()
        self.clients = [Client(port, request, partial(self._on_begun, index)) for index, request in enumerate(requests)]
        for client in self.clients:
            client.wait()
        self.seconds = time.perf_counter() - begun

    def _on_begun(self, index: int, client: Client) -> None:
        with self._lock:
            if index in self._unlucky:
                client.kill()
                return
            self._reading += 1
            span = self._due.get(self._reading)
            if span is not None:
                sessions = {server: sessions_of(server) for server in self._servers if covers(server, span)}
                server = max(sessions, key=lambda server: sessions[server])
                server.kill()
                self.killed[server] = sessions[server]


def requests_of(count: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Every other one greedy; none ends before its last token."""
    random_ = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz "
    asked = []
    for index in range(count):
        prompt = "".join(random_.choice(letters) for _ in range(random_.randint(4, 60)))
        sampled = {"temperature": 1.0, "top_p": 0.9, "seed": index} if index % 2 else {"temperature": 0}
        biased = {"logit_bias": {"127": -100, "0": -100, "1": -100}}
        asked.append({"prompt": prompt, "max_tokens": tokens, "stream": True, **sampled, **biased})
    return asked


def left_over(url: str, servers: Sequence[PooledServer]) -> dict[str, int]:
    """What is not as it was when nobody was being answered, after waiting for it for a while."""
    deadline = time.monotonic() + SETTLED_SECONDS
    while True:
        left = {
            "sessions": gauge(f"{url}/metrics", "petalnode_client_sessions"),
            "server_sessions": sum(sessions_of(server) for server in servers),
            "cache_tokens": sum(sessions_of(server, "cache_used_tokens") for server in servers),
        }
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(1)


def run(options: argparse.Namespace) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, swarm(Path(folder)) as (pool, model):
        servers = [started(pool, span) for span in SPANS for _ in range(COPIES)]
        with api(pool, model, Path(folder) / "api", max(64, options.clients)) as url:
            port = int(url.rpartition(":")[2])
            requests = requests_of(options.clients, options.tokens, options.seed)
            begun = time.perf_counter()
            alone = []
            for request in requests:
                client = Client(port, request, lambda client: None)
                client.wait()
                assert client.answer is not None and "text" in client.answer, client.answer
                alone.append(client.answer["text"])
            alone_seconds = time.perf_counter() - begun
            for _ in range(options.rounds):
                found = Round(port, requests, servers)
                rounds.append(told(found, alone))
                servers = [server for server in servers if server not in found.killed]
                servers += [started(pool, span) for span in SPANS]
            left = left_over(url, servers)
    return {
        "clients": options.clients,
        "tokens": options.tokens,
        "alone_tokens_per_s": round(options.clients * options.tokens / alone_seconds, 1),
        "rounds": rounds,
        "left": left,
    }


def started(pool: ServerPool, span: str) -> PooledServer:
    server = pool.start(span, "--cache-tokens", str(CACHE_TOKENS), "--metrics-port", "0")
    server.ready  # noqa: B018  (waits)
    return server


def covers(server: PooledServer, span: str) -> bool:
    return server.span == tuple(map(int, span.split(":")))


def gauge(url: str, name: str) -> int:
    """A number of a page of metrics, without labels."""
    import httpx

    lines = httpx.get(url, timeout=None).text.splitlines()
    return int(float(next(line for line in lines if line.startswith(f"{name} ")).split()[1]))


def sessions_of(server: PooledServer, what: str = "sessions") -> int:
    url = next(event["url"] for event in server.events if event["event"] == "metrics")
    return gauge(url, f"petalnode_server_{what}")


def told(found: Round, alone: Sequence[str]) -> dict[str, Any]:
    """What came of a round."""
    pairs = [(client, text) for client, text in zip(found.clients, alone, strict=True) if not client.killed]
    answers = [(client.answer or {"error": "it ended without an answer"}, text) for client, text in pairs]
    right = [answer for answer, text in answers if answer.get("text") == text]
    return {
        "clients_killed": len(found.clients) - len(pairs),
        "servers_killed": len(found.killed),
        "their_sessions": list(found.killed.values()),
        "equal": len(right),
        "different": sum("text" in answer for answer, _ in answers) - len(right),
        "failed": [answer["error"] for answer, _ in answers if "error" in answer],
        "recovered": sum(answer["recoveries"] > 0 for answer in right),
        "recoveries": sum(answer["recoveries"] for answer in right),
        "seconds": round(found.seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read-from", nargs=2, metavar=("PORT", "REQUEST"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read_from is not None:
        read_answer(int(options.read_from[0]), json.loads(options.read_from[1]))
        return
    sys.path.insert(0, str(Path(__file__).parents[1]))
    result = run(options)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            for line in value if name == "rounds" else [value]:
                print(f"{name}: {line}")
    if any(result["left"].values()) or any(row["different"] or row["failed"] for row in result["rounds"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
