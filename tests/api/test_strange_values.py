"""No body gets a 500, whatever stands in any field of any interface: asked over HTTP, and answered where it can be."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from petalnode.node.api.engine.generation import ApiLimits
from tests.api.bodies import BODIES, STRANGE, changed, encoded, places
from tests.api.conftest import CONTEXT, Served
from tests.memory_api import memory_api

SAMPLE = 60
"""Of the bodies of each endpoint, besides all that change its numbers."""


@pytest.fixture(scope="module")
def asking(served: Served) -> Iterator[httpx.Client]:
    with (
        memory_api(served.swarm, served.folder, limits=ApiLimits(context=CONTEXT, answer_tokens=2, kept=0)) as api,
        httpx.Client(base_url=api.url, timeout=None) as client,
    ):
        yield client


def told(path: str, answer: httpx.Response) -> str:
    """The error of the interface's own shape."""
    found = answer.json()
    if path.startswith("/api/"):
        return str(found["error"])
    if path.startswith("/v1/messages"):
        assert found["type"] == "error" and found["request_id"]
    return str(found["error"]["message"])


def cases(path: str) -> list[bytes]:
    body = BODIES[path]
    every = [encoded(changed(body, place, value)) for place in places(body) for value in STRANGE]
    return random.Random(25).sample(every, min(SAMPLE, len(every)))


@pytest.mark.parametrize("path", BODIES)
def test_strange_values(path: str, asking: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for content in cases(path):
            answer = asking.post(path, content=content)
            assert answer.status_code in (200, 400, 404, 503), (content, answer.text)
            assert b"internal_error" not in answer.content, content  # in a stream, either
            if answer.status_code != 200:
                assert told(path, answer)
    assert not caplog.records


def test_numbers_as_small_or_large_as_can_be(asking: httpx.Client) -> None:
    chat: dict[str, Any] = {"model": "tiny-llama", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    limits = {
        "temperature": (5e-324, 1e-300, 1e-30, 99),
        "top_p": (0, 5e-324, 1e-30, 1),
        "min_p": (5e-324, 1),
        "repetition_penalty": (0.01, 100),
        "seed": (-(2**63), 2**63 - 1),
        "top_k": (1, 2**31),
        "logit_bias": ({"1": -100}, {"1": 100}, {"0": 1e-300}),
    }
    for name, values in limits.items():
        for value in values:
            for _ in range(300):
                answer = asking.post("/v1/chat/completions", json={**chat, name: value, "n": 2})
                if answer.status_code != 503:
                    break
                time.sleep(0.2)  # on a busy machine a server may be taken for silent for a while
            assert answer.status_code == 200, (name, value, answer.text)


@pytest.mark.parametrize("path", ["/v1/models/%00", "/v1/responses/%ff%00", "/api/tags", "/v1/petalnode/receipts/%f0"])
def test_strange_names(path: str, asking: httpx.Client) -> None:
    for query in ("", "?limit=%00&after=%ff&order=%00", "?stream=%00"):
        assert asking.get(path + query).status_code in (200, 400, 404)


def test_the_number_of_the_finding(asking: httpx.Client) -> None:
    chat = BODIES["/v1/chat/completions"]
    for field in ({"temperature": 10**400}, {"logit_bias": {"1": 10**400}}, {"n": -(10**400)}):
        answer = asking.post("/v1/chat/completions", content=encoded({**chat, **field}))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
