"""Clients that go, read nothing or send nonsense, and servers that die, while an answer is made."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trio

from petalnode.node.api.engine.generation import ApiLimits
from petalnode.node.api.http.admission import Admission
from petalnode.node.client.router import ServerSearch
from petalnode.node.client.session import chain
from petalnode.node.errors import NoChainError
from petalnode.node.testing.memory_servers import MemorySwarm, in_loop, memory_swarm
from tests.api.conftest import Served
from tests.memory_api import MemoryApi, memory_api
from tests.patience import eventually

pytestmark = pytest.mark.usefixtures("blocks_as_served")
MODEL = "tiny-llama"
LONG: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 900, "temperature": 0, "stream": True}
BODY_BYTES = 100_000


@pytest.fixture(scope="module")
def alone(served: Served) -> Iterator[MemoryApi]:
    """An API that keeps no conversations: whatever is open is being answered."""
    limits = ApiLimits(context=1024, kept=0, body_bytes=BODY_BYTES)
    with memory_api(served.swarm, served.folder, limits=limits, admission=Admission(requests=4)) as running:
        yield running


def request(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def ask_endless(api: MemoryApi, **fields: Any) -> socket.socket:
    """A connection on which an answer of 900 tokens, unless `fields` say otherwise, is asked for."""
    biased = {"logit_bias": {"127": -100, "0": -100, "1": -100}}  # nothing ends it, and all of it is text
    connection = socket.create_connection(("127.0.0.1", api.port))
    connection.sendall(request(json.dumps({**LONG, **biased, **fields}).encode()))
    return connection


def settled(api: MemoryApi) -> None:
    """Until the API has no session at a server, and nothing to do."""

    async def idle() -> bool:
        return not any(await trio.to_thread.run_sync(lambda: (api.open_sessions, api.running)))

    trio.run(eventually, idle, "no request is being answered")


@pytest.mark.parametrize("after", ["request", "tokens"])
def test_abandoned_answer_stops_and_gives_its_caches_back(after: str, alone: MemoryApi) -> None:
    with ask_endless(alone) as connection:
        if after == "tokens":
            received = b""
            while received.count(b"data: ") < 3:
                received += connection.recv(4096)
    settled(alone)
    # Another one is answered as before.
    answer = httpx.post(f"{alone.url}/v1/completions", json={**LONG, "max_tokens": 2, "stream": False}, timeout=None)
    assert answer.status_code == 200


def test_requests_that_are_left_make_room_for_others(alone: MemoryApi) -> None:
    for _ in range(3):  # each time as many as there may be
        connections = [ask_endless(alone) for _ in range(4)]
        for connection in connections:
            assert connection.recv(12) == b"HTTP/1.1 200"
        for connection in connections:
            connection.close()
        settled(alone)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"\xff\xfe{}", 400, "invalid_json"),
        (b'{"prompt": NaN}', 400, "invalid_json"),
        (b"[" * 50_000, 400, "invalid_json"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, 400, "invalid_json"),
        (b'{"prompt": "' + b"x" * 2 * BODY_BYTES + b'"}', 413, "request_too_large"),
        (b'{"prompt": "\\ud800", "max_tokens": 1}', 400, "invalid_json"),
        (b'{"prompt": "a", "max_tokens": 1e400}', 400, "invalid_json"),
        (b'{"prompt": "a", "max_tokens": 1e300}', 400, "invalid_value"),
        (b'{"prompt": "a", "logit_bias": {"-1": 1}}', 400, "invalid_value"),
        (b'{"prompt": "a", "logit_bias": {"999999999": 1}, "max_tokens": 1}', 200, None),
        (b'{"prompt": [1, 2, true], "max_tokens": 1}', 400, "missing_field"),
        (b'{"prompt": [-1], "max_tokens": 1}', 400, "missing_field"),
        (b'{"prompt": [""], "max_tokens": 1}', 400, "invalid_value"),
        (b'{"prompt": "a", "guided_regex": "(((("}', 400, "invalid_schema"),
    ],
)
def test_nonsense_is_told_what_it_is(body: bytes, status: int, code: str | None, alone: MemoryApi) -> None:
    answer = httpx.post(f"{alone.url}/v1/completions", content=body, timeout=None)
    assert answer.status_code == status, answer.text
    if code is not None:
        assert answer.json()["error"]["code"] == code
        assert answer.json()["error"]["message"]
    assert alone.open_sessions == 0 or status == 200


def test_other_places_and_methods(alone: MemoryApi) -> None:
    assert httpx.get(f"{alone.url}/v1/nothing", timeout=None).json()["error"]["code"] == "unknown_url"
    assert httpx.get(f"{alone.url}/v1/chat/completions", timeout=None).status_code == 405


def test_body_without_end_is_refused_at_its_limit(alone: MemoryApi) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(BODY_BYTES // 1000 + 2):
            yield b" " * 1000

    answer = httpx.post(f"{alone.url}/v1/completions", content=endless(), timeout=None)
    assert answer.status_code == 413


def test_slow_reader_gets_all_of_it_in_end(alone: MemoryApi) -> None:
    """The answer is made at the servers' speed, and what is not read waits as text."""
    with ask_endless(alone, max_tokens=60) as connection:
        assert connection.recv(1) == b"H"
        settled(alone)
        rest = _until(connection, b"[DONE]")
    events = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith(b"data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert sum(len(event["choices"][0]["text"]) for event in events) == 60


def _until(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        data = connection.recv(1 << 16)
        assert data
        received += data
    return received


# --- servers


def sessions_at(server: Any) -> int:
    now = server.tallies.serving()
    return int(now.sessions)


@pytest.fixture
def spare_swarm(api_model: Path) -> Iterator[tuple[MemorySwarm, list[Any]]]:
    """Every block on two servers."""
    with memory_swarm() as swarm:
        started = [swarm.start(api_model, blocks, cache_tokens=20_000) for blocks in ("0:3", "0:3", "3:6", "3:6")]
        for server in started:
            server.ready  # noqa: B018  (waits)
        yield swarm, started


def test_answers_survive_dead_servers_or_end_in_503(
    spare_swarm: tuple[MemorySwarm, list[Any]], api_model: Path
) -> None:
    swarm, servers = spare_swarm
    asked: dict[str, Any] = {"model": MODEL, "prompt": "go on and on", "max_tokens": 24, "temperature": 0}
    with (
        memory_api(swarm, api_model, limits=ApiLimits(context=256)) as api,
        openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=None) as client,
    ):
        undisturbed = client.completions.create(**asked)
        hops = undisturbed.model_extra["x_petalnode"]["choices"][0]["route"]
        text = ""
        for count, chunk in enumerate(client.completions.create(**asked, stream=True)):
            if count == 0:
                next(server for server in servers if server.peer_id == hops[0]["peer_id"]).kill()
            text += chunk.choices[0].text
            last = chunk
        assert text == undisturbed.choices[0].text
        assert last.model_extra["x_petalnode"]["choices"][0]["recoveries"] in (0, 1)
        for server in servers[:2]:
            if server.alive:
                server.kill()
        # Nobody will come: there is nothing to wait for.
        in_loop(api.token, lambda: setattr(api.core.client, "reopen_timeout", 0.2))
        with pytest.raises(openai.InternalServerError) as raised:
            client.completions.create(**{**asked, "prompt": "another"}, stream=True)  # which has not begun
        assert raised.value.status_code == 503
        assert raised.value.code == "model_unavailable"
        assert raised.value.body["missing_blocks"] == [0, 1, 2]
        assert int(raised.value.response.headers["retry-after"]) > 0


def test_lost_servers_are_sought_as_the_person_says(
    spare_swarm: tuple[MemorySwarm, list[Any]], api_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a second time, after idle conversations have given their room to the answer."""
    swarm, servers = spare_swarm
    given_up: list[NoChainError] = []
    give_up = ServerSearch.given_up

    def noting(search: ServerSearch, error: NoChainError) -> NoChainError:
        given_up.append(give_up(search, error))
        return given_up[-1]

    monkeypatch.setattr(ServerSearch, "given_up", noting)
    monkeypatch.setattr(chain, "DEADLINES", replace(chain.DEADLINES, reopen=3600.0))
    asked: dict[str, Any] = {"prompt": "go on", "max_tokens": 2}
    with memory_api(swarm, api_model, limits=ApiLimits(context=256), reopen_timeout=0.2) as api:
        assert httpx.post(f"{api.url}/v1/completions", json=asked, timeout=None).status_code == 200
        assert api.core.conversations.idle
        for server in servers:
            server.kill()
        refused = httpx.post(f"{api.url}/v1/completions", json={**asked, "prompt": "another"}, timeout=None)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        missing = set(refused.json()["error"]["missing_blocks"])  # of those who were asked last
        assert missing and missing <= set(range(6))
    assert [error.gone for error in given_up] == [True]


def test_other_streams_go_on_when_others_are_killed(
    spare_swarm: tuple[MemorySwarm, list[Any]], api_model: Path
) -> None:
    """Greedy and sampled. `benchmarks/api_chaos.py` is the same with processes."""
    swarm, servers = spare_swarm
    biased = {"127": -100, "0": -100, "1": -100}
    requests: list[dict[str, Any]] = [
        {
            "prompt": f"stream {number}",
            "max_tokens": 16,
            "temperature": number % 2,
            "seed": number,
            "logit_bias": biased,
        }
        for number in range(12)
    ]
    begun, found = count(1), dict[int, str]()
    with memory_api(swarm, api_model, limits=ApiLimits(context=256, kept=0)) as api:
        alone = [
            httpx.post(f"{api.url}/v1/completions", json=asked, timeout=None).json()["choices"][0]["text"]
            for asked in requests
        ]

        def read(number: int) -> None:
            pieces = []
            asked = {**requests[number], "stream": True}
            with httpx.stream("POST", f"{api.url}/v1/completions", json=asked, timeout=None) as answer:
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
                    if len(pieces) == 1:
                        if (began := next(begun)) in (4, 8):  # the others read, or are about to
                            servers[0 if began == 4 else 2].kill()
                        if number % 4 == 3:
                            return  # which closes the connection
            found[number] = "".join(pieces)

        with ThreadPoolExecutor(len(requests)) as readers:
            list(readers.map(read, range(len(requests))))
        assert found == {number: text for number, text in enumerate(alone) if number % 4 != 3}
        settled(api)
        left = [server for server in servers if server.alive]
        trio.run(eventually, lambda: not any(sessions_at(server) for server in left), "servers hold no session")
