"""LangChain's `ChatOpenAI` against the API: `make compat`.

The model is a tiny one with random weights, so that an answer makes sense only where its form is bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.memory_api import MemoryApi

MODEL = "tiny-llama"
ASKED = "where is it?"


class Place(BaseModel):
    """Where something is."""

    where: Literal["here", "there"]
    sure: bool


@tool
def look_up(where: Literal["here", "there"]) -> str:
    """Looks it up."""
    return f"nothing {where}"


@tool
def give_up() -> str:
    """Gives up."""
    return "given up"


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """LangChain keeps its connections for the next client, and they belong to one loop."""
    with asyncio.Runner() as running:
        yield running


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat(request: pytest.FixtureRequest, api: MemoryApi) -> ChatOpenAI:
    """By either of the two endpoints that LangChain knows."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "max_retries": 0}
    options |= {"use_responses_api": True} if request.param else {"stream_usage": True}
    return ChatOpenAI(model=MODEL, base_url=f"{api.url}/v1", api_key="none", **options)


def test_an_answer_whole_streamed_and_async(chat: ChatOpenAI, runner: asyncio.Runner) -> None:
    short = chat.model_copy(update={"max_tokens": 12})
    whole = short.invoke(ASKED)
    assert whole.text
    assert whole.usage_metadata["output_tokens"] <= 12
    chunks = list(short.stream(ASKED))
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0

    async def both() -> tuple[str, str]:
        streamed = [chunk.text async for chunk in short.astream(ASKED)]
        return (await short.ainvoke(ASKED)).text, "".join(streamed)

    assert runner.run(both()) == (whole.text, whole.text)
    assert [answer.text for answer in short.batch([ASKED, ASKED])] == [whole.text] * 2


@pytest.mark.parametrize("choice", ["any", "look_up", "give_up"])
def test_a_tool_is_called_and_its_output_taken(choice: str, chat: ChatOpenAI) -> None:
    tools = {known.name: known for known in (look_up, give_up)}
    bound = chat.bind_tools(list(tools.values()), tool_choice=choice, parallel_tool_calls=False)
    answer = bound.invoke(ASKED)
    (call,) = answer.tool_calls
    assert call["name"] in (tools if choice == "any" else [choice])
    output = tools[call["name"]].invoke(call)
    assert isinstance(output, ToolMessage)
    said = [HumanMessage(ASKED), answer, output]
    after = chat.model_copy(update={"max_tokens": 4}).bind_tools(list(tools.values()), tool_choice="none").invoke(said)
    assert isinstance(after, AIMessage)
    assert after.text
    assert not after.tool_calls
    streamed = None
    for chunk in bound.stream(ASKED):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [(call["name"], call["args"])]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_is_an_object(method: Any, chat: ChatOpenAI, runner: asyncio.Runner) -> None:
    bound = chat.with_structured_output(Place, method=method, include_raw=True)
    answer = bound.invoke(ASKED)
    assert answer["parsing_error"] is None
    assert isinstance(answer["parsed"], Place)
    strict = chat.with_structured_output(Place, method=method, strict=True)
    assert strict.invoke(ASKED) == answer["parsed"]
    assert [*strict.stream(ASKED)][-1] == answer["parsed"]
    assert runner.run(strict.ainvoke(ASKED)) == answer["parsed"]


def test_likelihoods_completions_and_embeddings(api: MemoryApi) -> None:
    given: dict[str, Any] = {"model": MODEL, "base_url": f"{api.url}/v1", "api_key": "none", "max_retries": 0}
    chat = ChatOpenAI(**given, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2)
    content = chat.invoke(ASKED).response_metadata["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    completion = OpenAI(**given, temperature=0, max_tokens=4)
    assert "".join(completion.stream(ASKED)) == completion.invoke(ASKED) != ""
    embeddings = OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
    texts = ["a", "another"]
    for text, vector in zip(texts, embeddings.embed_documents(texts), strict=True):
        assert vector == pytest.approx(embeddings.embed_query(text))
