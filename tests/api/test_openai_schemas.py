"""Every answer of OpenAI's endpoints against OpenAI's published specification."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from petalnode.node.api.batches.runner import BatchLimits, BatchRunner
from petalnode.node.api.batches.store import BatchStore
from petalnode.node.api.engine.generation import ApiLimits
from petalnode.node.api.errors import ApiError
from petalnode.node.api.fields import Fields
from petalnode.node.api.http.admission import Admission, ApiKeys, hash_of_key
from petalnode.node.api.openai.responses import ResponseWriter, parse_response
from tests.api.bodies import PLACE
from tests.api.conftest import Served
from tests.api.specifications import OpenAISpecification
from tests.memory_api import MemoryApi, memory_api

MODEL = "tiny-llama"
MESSAGES = [{"role": "user", "content": "say something"}]
FUNCTION = {"name": "look_up", "description": "looks it up", "parameters": PLACE}
TOOLS = [{"type": "function", "function": FUNCTION}]
FORM = {"name": "x", "strict": True, "schema": PLACE}

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def specification() -> OpenAISpecification:
    return OpenAISpecification()


@pytest.fixture(scope="module")
def keyed(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryApi]:
    """With keys, files and batches, of which nothing is computed; its bodies are small."""
    store = BatchStore(tmp_path_factory.mktemp("batches") / "batches.sqlite")
    admission = Admission(ApiKeys({hash_of_key("pn-a"): "alice"}))
    runner = BatchRunner(store, BatchLimits(slots=0))
    limits = ApiLimits(body_bytes=10_000)
    with memory_api(served.swarm, served.folder, admission=admission, batches=runner, limits=limits) as api:
        yield api
    store.close()


@pytest.fixture
def ask(api: MemoryApi, specification: OpenAISpecification) -> Ask:
    return asking(api, specification)


@pytest.fixture
def ask_keyed(keyed: MemoryApi, specification: OpenAISpecification) -> Ask:
    return asking(keyed, specification, authorization="Bearer pn-a")


def asking(api: MemoryApi, specification: OpenAISpecification, **headers: str) -> Ask:
    """Asks, and checks the answer: with a body by POST, else by GET."""

    def asked(path: str, body: Any = None, method: str = "", status: int = 200, **fields: Any) -> Any:
        given = {"json": {"model": MODEL, "temperature": 0, **body}} if isinstance(body, dict) else fields
        method = method or ("GET" if not given else "POST")
        response = httpx.request(method, f"{api.url}/v1{path}", headers=headers, timeout=None, **given)
        assert response.status_code == status, response.text
        return specification.check(response)

    return asked


CHATS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 4},
    "choices": {"max_tokens": 3, "n": 2, "temperature": 1, "seed": 3, "stop": ["x"]},
    "logprobs": {"max_tokens": 3, "logprobs": True, "top_logprobs": 2},
    "no top logprobs": {"max_tokens": 3, "logprobs": True},
    "call": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100},
    "schema": {"response_format": {"type": "json_schema", "json_schema": FORM}, "max_tokens": 40, "logprobs": True},
    "everything that changes nothing": {
        "max_tokens": 2,
        "metadata": {"a": "b"},
        "user": "u",
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
    },
}


@pytest.mark.parametrize("name", CHATS)
def test_chats(name: str, ask: Ask) -> None:
    asked = {"messages": MESSAGES, **CHATS[name]}
    answer = ask("/chat/completions", asked)
    assert len(answer["choices"]) == asked.get("n", 1)
    assert ("tool_calls" in answer["choices"][0]["message"]) == (name == "call")
    counts = name == "plain"
    options = {"include_usage": True, "include_progress": True} if counts else None
    chunks = ask("/chat/completions", {**asked, "stream": True, "stream_options": options})
    assert any(chunk.get("usage") is not None for chunk in chunks) == counts
    assert any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 2, "temperature": 1, "seed": 3}, {"logprobs": 3}, {"logprobs": 0, "prompt": [40, 41, 42]}],
    ids=["plain", "choices", "logprobs", "logprobs of token ids"],
)
def test_completions(fields: dict[str, Any], stream: bool, ask: Ask) -> None:
    asked = {"prompt": "abc", "max_tokens": 3, **fields}
    answer = ask("/completions", {**asked, "stream": stream})
    assert isinstance(answer, list) == stream
    if not stream:
        ask("/completions", {**asked, "echo": True, "max_tokens": 0 if "logprobs" in fields else 1})


def test_models_and_embeddings(ask: Ask) -> None:
    assert [model["id"] for model in ask("/models")["data"]] == [MODEL]
    ask(f"/models/{MODEL}")
    assert len(ask("/embeddings", {"input": ["a", "bc"]})["data"]) == 2


RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {"max_output_tokens": 4},
    "instructed": {
        "instructions": "be short",
        "input": MESSAGES,
        "max_output_tokens": 2,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "service_tier": "auto",
        "prompt_cache_key": "p",
    },
    "logprobs": {"max_output_tokens": 3, "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    "call": {
        "tools": [{"type": "function", "name": "go"}],  # which takes no arguments
        "tool_choice": {"type": "function", "name": "go"},
        "parallel_tool_calls": False,
    },
    "schema": {"text": {"format": {"type": "json_schema", **FORM}}, "max_output_tokens": 40},
    "object": {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 4},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", RESPONSES)
def test_responses(name: str, stream: bool, ask: Ask) -> None:
    answer = ask("/responses", {"input": "where?", **RESPONSES[name], "stream": stream})
    response = answer[-1]["response"] if stream else answer
    assert response["status"] in ("completed", "incomplete")
    kinds = [item["type"] for item in response["output"]]
    assert kinds == (["function_call"] if name == "call" else ["message"])
    assert name != "call" or response["output"][0]["arguments"] == "{}"


def test_responses_that_are_kept(ask: Ask, api: MemoryApi) -> None:
    items = [
        {"role": "system", "content": "s"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"role": "assistant", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ]
    made = ask("/responses", {"input": items, "max_output_tokens": 2})
    again = ask("/responses", {"input": [*items, *made["output"]], "max_output_tokens": 2})
    path = f"/responses/{again['id']}"
    assert ask(path)["id"] == again["id"]
    assert len(ask(f"{path}/input_items")["data"]) == 6
    assert ask("/responses/input_tokens", {"input": items})["input_tokens"] > 0
    assert httpx.delete(f"{api.url}/v1{path}", timeout=None).json()[
        "deleted"
    ]  # of which the specification says nothing
    ask(path, status=404)


def test_a_response_that_failed(specification: OpenAISpecification) -> None:
    asked = parse_response(Fields({"model": MODEL, "input": "x", "stream": True}))
    chat: Any = SimpleNamespace(generation=SimpleNamespace(model=SimpleNamespace(name=MODEL)), form=None, tools=())
    writer = ResponseWriter(asked, chat, str, lambda response, answer: None)
    for event in writer.opening():
        specification.check_event(event)
    assert specification.check_event(writer.failed(ApiError(503, "gone")))["response"]["error"]["message"] == "gone"


def test_files_and_batches(ask_keyed: Ask) -> None:
    assert ask_keyed("/files")["data"] == ask_keyed("/batches")["data"] == []
    body = {"model": MODEL, "messages": MESSAGES}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body})
    made = [
        ask_keyed("/files", files={"file": ("requests.jsonl", content.encode())}, data={"purpose": "batch"})
        for content in (line, "{")
    ]
    ask_keyed(f"/files/{made[0]['id']}")
    assert len(ask_keyed("/files?limit=1")["data"]) == 1
    batches = [
        ask_keyed(
            "/batches",
            {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        )
        for file in made
    ]
    assert len(ask_keyed("/batches")["data"]) == 2
    ask_keyed(f"/batches/{batches[0]['id']}/cancel", method="POST")
    assert {ask_keyed(f"/batches/{batch['id']}")["object"] for batch in batches} == {"batch"}
    assert ask_keyed(f"/files/{made[0]['id']}", method="DELETE")["deleted"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/chat/completions", {"messages": []}, 400),
        ("/chat/completions", {"messages": MESSAGES, "max_tokens": 1 << 20}, 400),
        ("/chat/completions", {"messages": MESSAGES, "model": "other"}, 404),
        ("/chat/completions", {"messages": [{"role": "user", "content": "x" * 10_000}]}, 413),
        ("/completions", {"prompt": 3}, 400),
        ("/embeddings", {"input": []}, 400),
        ("/responses", {"input": 3}, 400),
        ("/responses", None, 405),
        ("/responses/none", None, 404),
        ("/models/none", None, 404),
        ("/files/none", None, 404),
        ("/batches/none", None, 404),
        ("/batches", {"input_file_id": "none", "endpoint": "/v1/completions", "completion_window": "24h"}, 400),
        ("/nothing", None, 404),
    ],
)
def test_errors(path: str, body: dict[str, Any] | None, status: int, ask_keyed: Ask) -> None:
    error = ask_keyed(path, body, status=status)["error"]
    assert error["message"]


def test_errors_of_admission(served: Served, keyed: MemoryApi, specification: OpenAISpecification) -> None:
    assert asking(keyed, specification)("/models", status=401)["error"]["code"] == "invalid_api_key"
    foreign = asking(keyed, specification, origin="https://other.example")
    assert foreign("/models", status=403)["error"]["code"] == "origin"
    with memory_api(served.swarm, served.folder, admission=Admission(requests=0)) as full:
        busy = asking(full, specification)("/completions", {"prompt": "a"}, status=429)
        assert busy["error"]["code"] == "too_many_requests"
