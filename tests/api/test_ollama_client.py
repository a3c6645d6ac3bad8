"""Ollama's endpoints by the official `ollama` client."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

import ollama
import pytest

from petalnode.node.api.http.admission import Admission, ApiKeys, hash_of_key
from petalnode.node.cli.commands.api import lan_urls
from tests.api.conftest import CONTEXT, Served
from tests.memory_api import MemoryApi, memory_api

MODEL = "tiny-llama"
MESSAGES = [{"role": "user", "content": "say something"}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 12}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "wait", "description": "waits", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def other(api: MemoryApi) -> ollama.Client:
    return ollama.Client(host=api.url)


def test_the_models_that_there_are(other: ollama.Client, api: MemoryApi) -> None:
    (model,) = other.list().models
    assert model.model == MODEL
    assert model.details is not None and model.details.family == "llama"
    shown = other.show(f"{MODEL}:latest")
    assert shown.template == api.core.text.template
    assert shown.modelinfo is not None and shown.modelinfo["llama.context_length"] == CONTEXT
    assert shown.capabilities == ["completion", "tools"]
    assert [one.model for one in other.ps().models] == [MODEL]
    assert other.pull(f"{MODEL}:latest").status == "success"
    assert [step.status for step in other.pull(MODEL, stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError):
        other.pull("other")
    with pytest.raises(ollama.ResponseError) as raised:
        other.show("other")
    assert raised.value.status_code == 404
    assert "other" in raised.value.error


def test_embeddings_are_those_of_openai(other: ollama.Client, api: MemoryApi) -> None:
    found = other.embed(MODEL, ["some", "text"])
    wanted = json.load(
        urlopen(Request(f"{api.url}/v1/embeddings", json.dumps({"model": MODEL, "input": ["some", "text"]}).encode()))
    )
    assert [list(one) for one in found.embeddings] == [one["embedding"] for one in wanted["data"]]
    assert found.prompt_eval_count == wanted["usage"]["prompt_tokens"]
    assert len(other.embed(MODEL, "some").embeddings) == 1
    assert list(other.embeddings(MODEL, "some").embedding) == list(found.embeddings[0])
    with pytest.raises(ollama.ResponseError, match="one size only"):
        other.embed(MODEL, "some", dimensions=8)


def test_health_needs_no_key_and_no_swarm(api: MemoryApi) -> None:
    with urlopen(f"{api.url}/health") as answer:
        assert json.load(answer) == {"status": "ok"}


def test_other_machines_are_told_a_dialable_address() -> None:
    assert lan_urls("127.0.0.1", "http://127.0.0.1:8000") == []
    found = lan_urls("0.0.0.0", "http://0.0.0.0:8000")
    assert found and all(url.endswith(":8000") and "0.0.0.0" not in url for url in found)


def test_a_chat_says_what_openais_says(other: ollama.Client, client: Any) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=12)
    expected = chat.choices[0].message.content
    answer = other.chat(model=MODEL, messages=MESSAGES, options=GREEDY)
    assert answer.message.content == expected
    assert (answer.done, answer.done_reason) == (True, chat.choices[0].finish_reason)
    assert (answer.prompt_eval_count, answer.eval_count) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    lines = list(other.chat(model=MODEL, messages=MESSAGES, options=GREEDY, stream=True))
    assert "".join(line.message.content or "" for line in lines) == expected
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == answer.eval_count
    assert other.chat(model=MODEL, messages=[]).done_reason == "load"


def test_a_text_by_the_template_and_without(other: ollama.Client, client: Any) -> None:
    expected = other.chat(model=MODEL, messages=MESSAGES, options=GREEDY).message.content
    assert other.generate(model=MODEL, prompt="say something", options=GREEDY).response == expected
    likeliest = {"num_predict": 12, "top_k": -1, "top_p": 0}  # of all tokens the first, at any temperature
    assert other.generate(model=MODEL, prompt="say something", options=likeliest).response == expected
    raw = client.completions.create(model=MODEL, prompt="say something", temperature=0, max_tokens=12)
    lines = other.generate(model=MODEL, prompt="say something", raw=True, options=GREEDY, stream=True, logprobs=True)
    found = list(lines)
    assert "".join(line.response or "" for line in found) == raw.choices[0].text
    assert sum(len(line.logprobs or ()) for line in found) == raw.usage.completion_tokens
    assert other.generate(model=MODEL).done_reason == "load"


def test_answer_has_form_that_is_asked_for(other: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = other.chat(model=MODEL, messages=MESSAGES, format=schema, options={"seed": 3, "temperature": 1.5})
    assert isinstance(json.loads(answer.message.content or "")["ok"], bool)


def test_every_seed_but_minus_one_is_one(other: ollama.Client) -> None:
    def said(seed: int) -> set[str]:
        options = {"seed": seed, "temperature": 1.5, "num_predict": 12}
        return {other.generate(model=MODEL, prompt="say something", options=options).response for _ in range(2)}

    assert len(said(0)) == len(said((1 << 32) - 1)) == 1
    assert len(said(-1)) == 2


def test_messages_with_calls_and_their_results(other: ollama.Client) -> None:
    messages: list[dict[str, Any]] = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "wait", "arguments": {}}}]},
        {"role": "tool", "tool_name": "wait", "content": "waited"},
    ]
    answer = other.chat(model=MODEL, messages=messages, tools=[TOOL], options=GREEDY)
    assert answer.done_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"think": True}, "think"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"num_predict": 5000}}, "context"),
        ({"format": "xml"}, "format"),
        ({"images": ["aGFsbG8="]}, "no picture"),
        ({"suffix": "x"}, "suffix"),
    ],
    ids=["think", "temperature", "context", "format", "images", "suffix"],
)
def test_what_cannot_be_asked_for(fields: dict[str, Any], told: str, other: ollama.Client) -> None:
    if "format" in fields:  # the client lets only known ones through
        answer = other._client.post("/api/generate", json={"model": MODEL, "prompt": "a", **fields})
        assert (answer.status_code, told in answer.json()["error"]) == (400, True)
        return
    with pytest.raises(ollama.ResponseError, match=told) as raised:
        other.generate(model=MODEL, prompt="a", **fields)
    assert raised.value.status_code == 400


def test_the_key_is_needed_here_too(served: Served) -> None:
    keys = ApiKeys({hash_of_key("pn-a"): "alice"})
    with memory_api(served.swarm, served.folder, admission=Admission(keys)) as running:
        alice = ollama.Client(host=running.url, headers={"Authorization": "Bearer pn-a"})
        assert alice.list().models
        with pytest.raises(ollama.ResponseError) as raised:
            ollama.Client(host=running.url).list()
        assert raised.value.status_code == 401
