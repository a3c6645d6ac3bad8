"""/v1/messages by the official `anthropic` client, every object checked against its types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from petalnode.node.api.http.admission import Admission, ApiKeys, hash_of_key
from tests.api.bodies import PLACE
from tests.api.conftest import Served
from tests.memory_api import MemoryApi, memory_api

MODEL = "tiny-llama"
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "say something"}],
    "max_tokens": 12,
    "extra_body": {"temperature": 0},
}
TOOL: dict[str, Any] = {"name": "look_up", "description": "looks it up", "input_schema": PLACE}


@pytest.fixture(scope="module")
def claude(api: MemoryApi) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=api.url, api_key="none", max_retries=0) as opened:
        yield opened


def checked(message: Any) -> Any:
    Message.model_validate(message.model_dump(mode="json", by_alias=True))
    return message


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_says_what_a_chat_says(claude: Any, client: Any) -> None:
    messages = [{"role": "system", "content": "be brief"}, *ASKED["messages"]]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)
    message = checked(claude.messages.create(**ASKED, system=[{"type": "text", "text": "be brief"}]))
    assert text_of(message) == chat.choices[0].message.content
    assert message.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[chat.choices[0].finish_reason]
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens
    assert message.model_extra["x_petalnode"]["choices"][0]["route"]
    counted = claude.messages.count_tokens(model=MODEL, messages=ASKED["messages"], system="be brief")
    assert counted.input_tokens == chat.usage.prompt_tokens
    assert [model.id for model in claude.models.list()] == [MODEL]


def test_the_events_of_a_message(claude: Any) -> None:
    whole = claude.messages.create(**ASKED)
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    events = list(claude.messages.create(**ASKED, stream=True))
    for event in events:
        adapter.validate_python(event.model_dump(mode="json", by_alias=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with claude.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_stop_sequence_is_named(claude: Any) -> None:
    text = text_of(claude.messages.create(**ASKED))
    message = checked(claude.messages.create(**ASKED, stop_sequences=["never", text[4:6]]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[4:6])
    assert text_of(message) == text[: text.index(text[4:6])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look_up"}], ids=["any", "named"])
def test_a_tool_is_used_and_its_result_taken(choice: dict[str, Any], stream: bool, claude: Any) -> None:
    asked: dict[str, Any] = {**ASKED, "max_tokens": 200, "tools": [TOOL], "tool_choice": choice}
    asked["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    if stream:
        with claude.messages.stream(**asked) as opened:
            message = checked(opened.get_final_message())
    else:
        message = checked(claude.messages.create(**asked))
    (block,) = message.content
    assert (message.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "look_up")
    assert block.input["where"] in ("here", "there")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "found"}]}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    checked(claude.messages.create(**{**ASKED, "messages": messages, "max_tokens": 3}, tools=[TOOL]))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "gone on with"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "think"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "client's"),
        ({"max_tokens": 0}, "out of range"),
        ({"max_tokens": 5000}, "context"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
    ],
    ids=["empty", "prefill", "image", "thinking", "search", "none", "context", "choice"],
)
def test_what_a_message_cannot_be_asked_for(fields: dict[str, Any], told: str, claude: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match=told) as raised:
        claude.messages.create(**{**ASKED, **fields})
    assert raised.value.body["error"]["type"] == "invalid_request_error"


def test_the_key_is_that_of_the_client(served: Served) -> None:
    keys = ApiKeys({hash_of_key("pn-a"): "alice"})
    with memory_api(served.swarm, served.folder, admission=Admission(keys)) as running:
        with anthropic.Anthropic(base_url=running.url, api_key="pn-a", max_retries=0) as alice:
            assert alice.messages.count_tokens(model=MODEL, messages=ASKED["messages"]).input_tokens
            with pytest.raises(anthropic.NotFoundError) as missing:
                alice.messages.create(**{**ASKED, "model": "other"})
            assert missing.value.body["error"]["type"] == "not_found_error"
        with anthropic.Anthropic(base_url=running.url, api_key="pn-b", max_retries=0) as mallory:
            with pytest.raises(anthropic.AuthenticationError) as raised:
                mallory.messages.create(**ASKED)
            assert raised.value.body["error"]["type"] == "authentication_error"
