"""Anthropic's /v1/messages: what it takes, what it gives, and where."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..client.generation.sampling import Sampling
from .engine.core import Core
from .engine.generation import ChatRequest, ChosenToken, Finished, Grammar, TextRequest, provenance
from .engine.preparing import PreparedChat, chat_prompt, prepare_chat
from .engine.tools import ToolCall
from .errors import MESSAGES_PATH, ApiError, error_object
from .fields import Fields
from .http.answers import AnswersResponse
from .http.bodies import read_asked
from .one_answer import Chunk, SingleAnswerWriter
from .parts import (
    REQUEST_LIMITS,
    bounded,
    function_tool,
    known_tool,
    positive,
    schema_grammar,
    session_options,
    stop_strings,
    template_call,
)

Message = dict[str, Any]

_THOUGHTS: Final = ("thinking", "redacted_thinking")


def parse_messages(fields: Fields, *, counted: bool = False) -> ChatRequest:
    """
    Args:
        counted: only the tokens of the prompt are asked for, and no limit of the answer.

    Raises:
        ApiError: a field is missing, of a wrong type, out of range, or asks for what is not done here.
    """
    fields.refuse(container="there are no containers here", mcp_servers="there are no tools here but the client's")
    thinking = fields.object("thinking")
    if thinking is not None and thinking.text("type") != "disabled":
        raise thinking.wrong("type", "the model cannot be told to think", "unsupported_parameter")
    limit = fields.integer("max_tokens", 1, REQUEST_LIMITS.largest)
    if limit is None and not counted:
        raise fields.wrong("max_tokens", "it is missing", "missing_field")
    text = TextRequest(
        model=fields.text("model", ""),
        sampling=Sampling(
            temperature=fields.number("temperature", 1.0, 0, 99),
            top_p=positive(fields, "top_p"),
            top_k=fields.integer("top_k", 0, REQUEST_LIMITS.largest) or 0,
        ),
        max_tokens=limit,
        stop=stop_strings(fields, "stop_sequences"),
        stream=fields.flag("stream"),
        grammar=_grammar(fields),
        options=session_options(fields),
    )
    messages = tuple(_messages(fields))
    if messages[-1]["role"] == "assistant":
        raise fields.wrong("messages", "the last one is the model's own: answers are not gone on with here")
    tools = tuple(_tool(tool) for tool in fields.objects("tools", REQUEST_LIMITS.max_tools))
    tool, named, parallel = _tool_choice(fields, tools)
    return ChatRequest(text, messages, tools, tool, named, parallel)


def _grammar(fields: Fields) -> Grammar | None:
    config = fields.object("output_config")
    form = config.object("format") if config is not None else None
    if form is None:
        return None
    form.one_of("type", ("json_schema",), "")
    return bounded(form, schema_grammar(form.needed("schema")), "schema")


def _messages(fields: Fields) -> Iterable[Message]:
    if fields.get("system") is not None:
        system = "\n\n".join(_texts(_blocks(fields, "system")))
        if system:
            yield {"role": "system", "content": system}
    given = fields.objects("messages", REQUEST_LIMITS.max_messages)
    if not given:
        raise fields.wrong("messages", "at least one message is needed")
    for message in given:
        role = message.one_of("role", ("user", "assistant"), "")
        blocks = _blocks(message, "content")
        if role == "assistant":
            yield _assistant(blocks)
        else:
            yield from _user(blocks)


def _blocks(fields: Fields, name: str) -> list[Fields]:
    value = fields.get(name)
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, fields.path(f"{name}."))]
    if value is None:
        raise fields.wrong(name, "it is missing", "missing_field")
    return fields.objects(name, REQUEST_LIMITS.max_messages)


def _texts(blocks: Sequence[Fields]) -> Iterable[str]:
    for block in blocks:
        if block.text("type") != "text":
            raise block.wrong("type", "there is only text here", "unsupported_content")
        yield block.text("text")


def _assistant(blocks: Sequence[Fields]) -> Message:
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    text = "".join(_texts([block for block in blocks if block.get("type") not in ("tool_use", *_THOUGHTS)]))
    return {"role": "assistant", "content": text or (None if calls else ""), **({"tool_calls": calls} if calls else {})}


def _call(block: Fields) -> dict[str, Any]:
    given = block.object("input")
    return template_call(block.text("name"), dict(given.data) if given is not None else {}, block.text("id"))


def _user(blocks: Sequence[Fields]) -> Iterable[Message]:
    """Results of tools are messages of their own, and stand before what the user says."""
    others = [block for block in blocks if block.get("type") != "tool_result"]
    for block in blocks:
        if block.get("type") == "tool_result":
            content = "" if block.get("content") is None else "".join(_texts(_blocks(block, "content")))
            yield {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": content}
    if others or not blocks:
        yield {"role": "user", "content": "".join(_texts(others))}


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.text("type", "custom") != "custom":
        raise tool.wrong("type", "there are no tools here but the client's", "unsupported_parameter")
    return function_tool(Fields({**tool.data, "parameters": tool.needed("input_schema").data}, tool.path("")))


def _tool_choice(fields: Fields, tools: tuple[dict[str, Any], ...]) -> tuple[str, bool, bool]:
    """The choice as `ChatRequest` has it, whether it is a name, and whether several calls may follow each other."""
    choice = fields.object("tool_choice")
    if choice is None:
        return ("auto" if tools else "none"), False, True
    parallel = not choice.flag("disable_parallel_tool_use")
    kind = choice.one_of("type", ("auto", "any", "tool", "none"), "")
    if kind == "tool":
        return known_tool(choice, tools, choice.text("name")), True, parallel
    if kind == "any" and not tools:
        raise choice.wrong("type", "it needs tools")
    return {"any": "required"}.get(kind, kind if tools else "none"), False, parallel


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; those that are none are in one as `arguments`."""
    found = json.loads(text)
    return found if isinstance(found, dict) else {"arguments": found}


class MessageWriter(SingleAnswerWriter):
    """What Anthropic's specification requires, and of which nothing is known here, is null."""

    def __init__(self, request: TextRequest, chat: PreparedChat, request_id: str) -> None:
        super().__init__(request, chat, f"msg_{secrets.token_hex(12)}")
        self._request_id = request_id
        self._prompt_tokens = len(chat.generation.prompts[0])
        self._text = ""
        self._blocks: list[dict[str, Any]] = []

    def opening(self) -> list[Chunk]:
        # What the servers hold of the prompt is known at the end only.
        usage = _usage(self._prompt_tokens, None, 0)
        return [{"type": "message_start", "message": self._message(_stop(None, None), usage)}]

    def finish(self, end: Finished, calls: Sequence[ToolCall]) -> list[Chunk]:
        chunks: list[Chunk] = []
        if self._text:
            chunks.append({"type": "content_block_stop", "index": 0})
            self._blocks.append({"type": "text", "text": self._text, "citations": None})
        for call in calls:
            chunks += self._call(call)
        delta = _stop(_reason(end, bool(calls)), end.stopped_by)
        usage = _usage(end.prompt_tokens - end.cached, end.cached, end.tokens)
        more = {"x_petalnode": provenance([end])}
        self.complete = {**self._message(delta, usage), **more}
        return [
            *chunks,
            {"type": "message_delta", "delta": delta, "usage": usage, **more},
            {"type": "message_stop"},
        ]

    def failed(self, error: ApiError) -> Chunk:
        return error_object(error, MESSAGES_PATH, self._request_id)

    def _message(self, stop: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(self._blocks),
            **stop,
            "usage": {**usage, "cache_creation": None, "inference_geo": None, "service_tier": None},
        }

    def add(self, text: str, tokens: Sequence[ChosenToken]) -> list[Chunk]:
        if not text:
            return []
        begun: list[Chunk] = []
        if not self._text:
            block = {"type": "text", "text": "", "citations": None}
            begun.append({"type": "content_block_start", "index": 0, "content_block": block})
        self._text += text
        delta = {"type": "text_delta", "text": text}
        return [*begun, {"type": "content_block_delta", "index": 0, "delta": delta}]

    def _call(self, call: ToolCall) -> list[Chunk]:
        index = len(self._blocks)
        block = {
            "type": "tool_use",
            "id": call.id.replace("call_", "toolu_", 1),
            "name": call.name,
            "caller": {"type": "direct"},  # the model itself, not a program that it wrote
        }
        arguments = arguments_of(call.arguments)
        self._blocks.append({**block, "input": arguments})
        delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments, ensure_ascii=False)}
        return [
            {"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]


def _reason(end: Finished, calls: bool) -> str:
    if calls:
        return "tool_use"
    if end.stopped_by is not None:
        return "stop_sequence"
    return "max_tokens" if end.reason == "length" else "end_turn"


def _stop(reason: str | None, sequence: str | None) -> dict[str, Any]:
    """Why a message has ended. Nothing is refused, and nothing runs in a container."""
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}


def _usage(uncached: int, cached: int | None, written: int) -> dict[str, Any]:
    """Tokens as Anthropic counts them: what the servers held already is apart, None while that is not known."""
    return {
        "input_tokens": uncached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": written,
        "output_tokens_details": None,
        "server_tool_use": None,
    }


def anthropic_routes(core: Core) -> list[BaseRoute]:
    """The routes of /v1/messages."""
    return [
        Route(MESSAGES_PATH, partial(_create, core), methods=["POST"]),
        Route(f"{MESSAGES_PATH}/count_tokens", partial(_count, core), methods=["POST"]),
    ]


async def _create(core: Core, request: Request) -> Response:
    asked = await read_asked(request, core, parse_messages)
    prepared = await prepare_chat(core, request.state.owner, asked)
    return AnswersResponse(core, prepared.generation, MessageWriter(asked.text, prepared, request.state.request_id))


async def _count(core: Core, request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    asked = await read_asked(request, core, partial(parse_messages, counted=True))
    prompt = await chat_prompt(core, core.model(asked.text.model), asked)
    return JSONResponse({"input_tokens": len(prompt)})
