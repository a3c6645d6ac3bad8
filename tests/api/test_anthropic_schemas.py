"""Every answer of /v1/messages against Anthropic's published specification."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from petalnode.node.api.anthropic import MessageWriter, parse_messages
from petalnode.node.api.engine.generation import ApiLimits
from petalnode.node.api.errors import ApiError
from petalnode.node.api.fields import Fields
from petalnode.node.api.http.admission import Admission, ApiKeys, hash_of_key
from tests.api.bodies import PLACE
from tests.api.conftest import Served
from tests.api.specifications import AnthropicSpecification
from tests.memory_api import MemoryApi, memory_api

ASKED: dict[str, Any] = {
    "model": "tiny-llama",
    "messages": [{"role": "user", "content": "say something"}],
    "max_tokens": 4,
    "temperature": 0,
}
TOOLS = [{"name": "look_up", "description": "looks it up", "input_schema": PLACE}]
MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "instructed": {"system": "be short", "stop_sequences": ["x"]},
    "call": {
        "tools": TOOLS,
        "tool_choice": {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True},
        "max_tokens": 100,
    },
    "schema": {"output_config": {"format": {"type": "json_schema", "schema": PLACE}}, "max_tokens": 40},
}


@pytest.fixture(scope="module")
def specification() -> AnthropicSpecification:
    return AnthropicSpecification()


@pytest.fixture(scope="module")
def keyed(served: Served) -> Iterator[MemoryApi]:
    """With keys; its bodies are small."""
    admission = Admission(ApiKeys({hash_of_key("pn-a"): "alice"}))
    with memory_api(served.swarm, served.folder, admission=admission, limits=ApiLimits(body_bytes=10_000)) as api:
        yield api


def post(api: MemoryApi, body: dict[str, Any], path: str = "", **headers: str) -> httpx.Response:
    return httpx.post(f"{api.url}/v1/messages{path}", json=body, headers=headers, timeout=None)


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str, api: MemoryApi, specification: AnthropicSpecification) -> None:
    asked = {**ASKED, **MESSAGES[name]}
    whole = specification.check(post(api, asked))
    blocks = [block["type"] for block in whole["content"]]
    assert blocks == (["tool_use"] if name == "call" else ["text"])
    if name == "schema":
        assert json.loads(whole["content"][0]["text"])["where"] in ("here", "there")
    streamed = post(api, {**asked, "stream": True})
    events = specification.check(streamed)
    assert [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"] == blocks
    start, end = events[0]["message"], events[-2]
    assert start["usage"]["cache_read_input_tokens"] is None
    usage = end["usage"]
    assert start["usage"]["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert end["delta"]["stop_reason"] == whole["stop_reason"]
    again = post(api, {key: value for key, value in asked.items() if key != "max_tokens"}, "/count_tokens")
    assert specification.check(again)["input_tokens"] == start["usage"]["input_tokens"]
    assert again.headers["request-id"] != streamed.headers["request-id"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "kind"),
    [
        ("", {"messages": []}, 400, "invalid_request_error"),
        ("", {"max_tokens": 1 << 20}, 400, "invalid_request_error"),
        ("", {"model": "other", "stream": True}, 404, "not_found_error"),
        ("/count_tokens", {"model": "other"}, 404, "not_found_error"),
        ("/batches", {}, 404, "not_found_error"),
        ("", {"system": "x" * 10_000}, 413, "request_too_large"),
    ],
)
def test_errors(
    path: str,
    fields: dict[str, Any],
    status: int,
    kind: str,
    keyed: MemoryApi,
    specification: AnthropicSpecification,
) -> None:
    response = post(keyed, {**ASKED, **fields}, path, **{"x-api-key": "pn-a"})
    assert response.status_code == status, response.text
    assert specification.check(response)["error"]["type"] == kind


def test_errors_of_admission(served: Served, keyed: MemoryApi, specification: AnthropicSpecification) -> None:
    with memory_api(served.swarm, served.folder, admission=Admission(requests=0)) as full:
        refused = {
            "authentication_error": post(keyed, ASKED),
            "permission_error": post(keyed, ASKED, origin="https://other.example"),
            "invalid_request_error": httpx.get(f"{full.url}/v1/messages", timeout=None),
            "rate_limit_error": post(full, ASKED),
        }
    assert {kind: specification.check(response)["error"]["type"] for kind, response in refused.items()} == {
        kind: kind for kind in refused
    }
    assert "request-id" not in httpx.get(f"{keyed.url}/v1/models", timeout=None).headers


def test_a_stream_that_failed(specification: AnthropicSpecification) -> None:
    asked = parse_messages(Fields({**ASKED, "stream": True}))
    generation = SimpleNamespace(model=SimpleNamespace(name="tiny-llama"), prompts=[[1, 2]])
    chat: Any = SimpleNamespace(generation=generation, form=None, tools=())
    writer = MessageWriter(asked.text, chat, "req_1")
    for event in writer.opening():
        specification.check_object("MessageStartEvent", event)
    failed = specification.check_object("ErrorResponse", writer.failed(ApiError(503, "gone")))
    assert (failed["error"]["type"], failed["request_id"]) == ("overloaded_error", "req_1")
