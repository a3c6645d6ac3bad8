"""/v1/responses by the official `openai` client, every object checked against its types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from petalnode.node.api.http.admission import Admission, ApiKeys, hash_of_key
from petalnode.node.api.openai.endpoints import ResponseStore, StoredResponse
from tests.api.bodies import PLACE
from tests.api.conftest import Served
from tests.memory_api import MemoryApi, memory_api

MODEL = "tiny-llama"
ASKED: dict[str, Any] = {"model": MODEL, "input": "say something", "temperature": 0, "max_output_tokens": 12}
TOOL: dict[str, Any] = {"type": "function", "name": "look_up", "parameters": PLACE}


def checked(response: Any) -> Any:
    Response.model_validate(response.model_dump(mode="json", by_alias=True))
    return response


def events_of(stream: Any) -> list[Any]:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = [adapter.validate_python(event.model_dump(mode="json", by_alias=True)) for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def test_a_response_says_what_a_chat_says(client: Any) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say something"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)
    whole = checked(client.responses.create(**ASKED, instructions="be brief", metadata={"of": "a test"}))
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    cut = chat.choices[0].finish_reason == "length"
    assert whole.status == ("incomplete" if cut else "completed")
    assert (whole.incomplete_details is not None) == cut
    assert (whole.instructions, whole.metadata) == ("be brief", {"of": "a test"})
    assert whole.model_extra["x_petalnode"]["choices"][0]["route"]
    counted = client.responses.input_tokens.count(model=MODEL, input="say something", instructions="be brief")
    assert counted.input_tokens == whole.usage.input_tokens


def test_the_events_of_a_response(client: Any) -> None:
    whole = client.responses.create(**ASKED)
    events = events_of(client.responses.create(**ASKED, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.output[0].id == events[2].item.id
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}}}
    with client.responses.stream(model=MODEL, input="say something", text=form, temperature=0) as helped:
        assert json.loads(helped.get_final_response().output_text) in ("yes", "no")


def test_a_response_goes_on_from_the_one_before(client: Any) -> None:
    first = client.responses.create(**ASKED, instructions="of the first one only")
    second = checked(client.responses.create(**{**ASKED, "input": "go on"}, previous_response_id=first.id))
    said: list[Any] = [
        {"role": "user", "content": "say something"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "go on"},
    ]
    stateless = client.responses.create(**{**ASKED, "input": said}, store=False)
    assert second.output_text == stateless.output_text
    assert second.usage.input_tokens == stateless.usage.input_tokens
    assert second.previous_response_id == first.id
    found = client.responses.retrieve(first.id)
    assert found.output_text == first.output_text
    (item,) = client.responses.input_items.list(first.id)
    assert item.content[0].text == "say something"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(stateless.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**ASKED, previous_response_id=first.id)
    assert raised.value.code == "previous_response_not_found"
    # The second one has its own copy of what was said before it.
    client.responses.create(**{**ASKED, "max_output_tokens": 1}, previous_response_id=second.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_its_output_taken(stream: bool, client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "tools": [TOOL]}
    chosen = {"type": "function", "name": "look_up"}
    if stream:
        events = events_of(client.responses.create(**asked, input="where?", tool_choice=chosen, stream=True))
        response = events[-1].response
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert done.arguments == response.output[0].arguments
    else:
        response = checked(client.responses.create(**asked, input="where?", tool_choice=chosen))
    (call,) = response.output
    assert (call.type, call.name, response.status) == ("function_call", "look_up", "completed")
    assert json.loads(call.arguments)["where"] in ("here", "there")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    short: dict[str, Any] = {**asked, "max_output_tokens": 4}
    going_on = client.responses.create(**short, input=[output], previous_response_id=response.id)
    before = [{"role": "user", "content": "where?"}, call.model_dump(exclude_none=True), output]
    stateless = checked(client.responses.create(**short, input=before))
    assert going_on.output_text == stateless.output_text


def test_a_response_follows_its_schema_and_tells_likelihoods(client: Any) -> None:
    schema = {"properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "object", **schema}}}
    asked: dict[str, Any] = {**ASKED, "max_output_tokens": 60, "text": form}
    response = checked(client.responses.create(**asked, include=["message.output_text.logprobs"], top_logprobs=2))
    assert isinstance(json.loads(response.output_text)["ok"], bool)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs).startswith(response.output_text)
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": []}, "input"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "x", "arguments": "{"}]}, "input[0].arguments"),
    ],
)
def test_what_a_response_cannot_be_asked_for(fields: dict[str, Any], param: str, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**{**ASKED, **fields})
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"


@pytest.fixture
def keyed(served: Served) -> Iterator[MemoryApi]:
    keys = ApiKeys({hash_of_key("pn-a"): "alice", hash_of_key("pn-b"): "bob"})
    with memory_api(served.swarm, served.folder, admission=Admission(keys)) as running:
        yield running


def test_responses_are_found_by_key_that_asked_only(keyed: MemoryApi) -> None:
    def of(key: str) -> Any:
        return openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=key, max_retries=0, timeout=None)

    with of("pn-a") as alice, of("pn-b") as bob:
        response = alice.responses.create(**{**ASKED, "max_output_tokens": 1})
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.delete(response.id)
        with pytest.raises(openai.BadRequestError):
            bob.responses.create(**ASKED, previous_response_id=response.id)
        assert alice.responses.retrieve(response.id).id == response.id


def stored(text: str) -> StoredResponse:
    return StoredResponse({"output": text}, (), ())


def test_store_is_bounded_and_largest_owner_loses_first() -> None:
    size = stored("x" * 100).size
    store = ResponseStore(max_bytes=10 * size, max_responses=8)
    store.keep("bob", "b", stored("x" * 100))
    for number in range(50):
        store.keep("alice", str(number), stored("x" * 100))
    assert len(store) == 8
    assert store.find("bob", "b") is not None
    assert store.find("alice", "49") is not None
    assert store.find("alice", "0") is None
    store.keep("alice", "large", stored("x" * 9 * size))
    assert store.find("bob", "b") is not None
    store.keep("alice", "too large", stored("x" * 11 * size))
    assert store.find("alice", "too large") is None
    assert not store.drop("bob", "49")
    assert store.drop("bob", "b")
