"""What a client can send to cost the API more than him: it ends in an error of OpenAI's shape, within a bound."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from petalnode.node.api.engine.generation import ApiLimits, Grammar
from tests.api.conftest import CONTEXT, Served
from tests.memory_api import MemoryApi, memory_api

MODEL = "tiny-llama"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def api(served: Served) -> Iterator[MemoryApi]:
    """One of their own, which keeps no conversations: other tests count what theirs has kept."""
    with memory_api(served.swarm, served.folder, limits=ApiLimits(context=CONTEXT, kept=0)) as running:
        yield running


@pytest.fixture(scope="module")
def hurried(served: Served) -> Iterator[MemoryApi]:
    """An API that gives a form next to no time, and makes one ready at once."""
    with memory_api(served.swarm, served.folder, limits=ApiLimits(grammar_seconds=0.05, grammars=1)) as running:
        yield running


def ask(api: MemoryApi, path: str = "chat/completions", **fields: Any) -> httpx.Response:
    return httpx.post(f"{api.url}/v1/{path}", json={**CHAT, **fields}, timeout=None)


def refused(answer: httpx.Response, param: str | None = None) -> str:
    """The code of a 400 in OpenAI's shape."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1000
    if param is not None:
        assert error["param"] == param
    return str(error["code"])


def test_endless_form_holds_up_nobody_else(hurried: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library cannot be interrupted: its thread is left behind, and others get no more than a bound of them."""
    go, begun = threading.Event(), []
    grammars = hurried.core.grammars

    def slowly(wanted: Grammar) -> str:
        begun.append(wanted)
        go.wait()
        return ""

    monkeypatch.setattr(grammars, "compiled", slowly)
    try:
        for _ in range(4):
            assert refused(ask(hurried, guided_regex="(a{1,9}){1,9}"), "response_format") == "invalid_schema"
        assert len(begun) == 1  # the others were not begun, as their threads would be there still
        assert ask(hurried).status_code == 200
    finally:
        go.set()


NESTED = {"type": "object", "properties": {"x": {"type": "null"}}}
for _ in range(200):
    NESTED = {"type": "object", "properties": {"x": NESTED}}

FORMS: dict[str, dict[str, Any]] = {
    "many groups": {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
    "not closed": {"guided_regex": "(" * 50_000},
    "long": {"guided_regex": "a" * 200_000},
    "look behind": {"guided_regex": "(?<=a)b(?=c)\\1"},
    "nested schema": {"guided_json": NESTED},
    "a schema of nothing": {"guided_json": {"type": "array", "minItems": 5, "maxItems": 1}},
    "unknown reference": {"guided_json": {"$ref": "#/$defs/nowhere"}},
    "foreign reference": {"guided_json": {"$ref": "http://192.0.2.1/schema.json"}},
    "regex in a schema": {"guided_json": {"type": "string", "pattern": "^(a|b)*a(a|b){500}$", "maxLength": 10**9}},
    "a large number": {"guided_json": {"type": "integer", "minimum": 10**400}},
    "two forms": {"guided_regex": "a", "guided_choice": ["b"]},
    "many choices": {"guided_choice": ["x"] * 1025},
    "long choices": {"guided_choice": ["x" * 1000] * 1000},
}


@pytest.mark.parametrize("name", FORMS)
def test_hostile_forms(name: str, api: MemoryApi) -> None:
    assert refused(ask(api, **FORMS[name])) in ("invalid_schema", "invalid_value", "invalid_json")


def test_form_that_explodes_while_answer_is_made(api: MemoryApi) -> None:
    """Within the library's own limits: refused as the client's fault, and nothing stays behind."""
    answer = ask(api, guided_regex="((a{0,100}){0,100}){0,100}", max_tokens=40)
    assert answer.status_code == 200 or refused(answer) == "invalid_schema"
    assert ask(api).status_code == 200


TOOL = {"type": "function", "function": {"name": "x", "parameters": {"type": "object", "properties": {}}}}
WIDE = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(20_000)}}

REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "many tools": ({"tools": [TOOL] * 129}, "tools"),
    "a large tool": (
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": WIDE}}], "tool_choice": "required"},
        "tools",
    ),
    "a long name": ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
    "many answers": ({"n": 17}, "n"),
    "very many answers": ({"n": 10**30}, "n"),
    "many biases": ({"logit_bias": {str(token): 1 for token in range(2000)}}, "logit_bias"),
    "strange biases": ({"logit_bias": {"1e3": 2}}, "logit_bias"),
    "large bias": ({"logit_bias": {"1": 1e300}}, "logit_bias.1"),
    "many stops": ({"stop": ["x"] * 17}, "stop"),
    "long stop": ({"stop": "x" * 257}, "stop"),
    "many messages": ({"messages": CHAT["messages"] * 5000}, "messages"),
    "many parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 5000}]},
        "messages[0].content",
    ),
    "nested arguments": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "x", "arguments": "[" * 100_000}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    "long model": ({"model": ["x"]}, "model"),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_floods_of_one_field(name: str, api: MemoryApi) -> None:
    fields, param = REQUESTS[name]
    refused(ask(api, **fields), param)


def test_arguments_that_nest_as_deep_as_json_can(api: MemoryApi) -> None:
    """What the template cannot write is the client's fault."""
    for depth in (100, 900, 990):
        call = {"function": {"name": "x", "arguments": "[" * depth + "]" * depth}}
        answer = ask(api, messages=[{"role": "assistant", "tool_calls": [call]}])
        assert answer.status_code == 200 or refused(answer)


@pytest.mark.parametrize(
    "path", ["responses", "messages", "completions", "embeddings", "petalnode/hidden_states", "responses/input_tokens"]
)
def test_every_endpoint_takes_nonsense(path: str, api: MemoryApi) -> None:
    bodies = [b"", b"[" * 100_000, b'{"a":' * 500 + b"1" + b"}" * 500, b"\xff", b"null", b"{}", b'{"model": 1e999}']
    bodies += [
        json.dumps({field: value}).encode() for field in ("input", "messages", "prompt") for value in (1, [[]], {})
    ]
    for body in bodies:
        answer = httpx.post(f"{api.url}/v1/{path}", content=body, timeout=None)
        assert answer.status_code == 400, (body[:50], answer.text)
        assert answer.json()["error"]["message"]


def test_body_of_100_megabytes_is_not_waited_for(api: MemoryApi) -> None:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {100 << 20}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", api.port)) as connection:
        connection.sendall(head.encode())
        received = b""
        while data := connection.recv(4096):
            received += data
    assert received.startswith(b"HTTP/1.1 413")
    assert b'"request_too_large"' in received
